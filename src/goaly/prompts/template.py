"""The chat template of a Hugging Face folder, compiled as transformers compiles it, but without importing transformers.

`tests/unit/prompts/test_template.py` renders the same chats with both, and compares the features of templates.
Two things are done as vLLM's server does them, before the template sees the messages: a template that reads contents
in parts gets parts, and the role `developer` becomes `system` where the template does not know it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_DEFAULT, _WITH_TOOLS = "default", "tool_use"
DEVELOPER, SYSTEM, TOOL = "developer", "system", "tool"
_DEVELOPER_TEXT = re.compile(f"""['"]{DEVELOPER}['"]""")
_PARTS = [{"type": "text", "text": "one part"}, {"type": "text", "text": "another"}]
"""A content with which a template shows whether it reads parts."""
Messages = Sequence[Mapping[str, Any]]


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text; it renders its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        enclosed = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_rendered"), [], [], enclosed).set_lineno(line)

    def _rendered(self, caller: Any) -> str:
        return caller()


class ChatTemplate:
    """Renders chats as text by the template of a folder, or by that of a file."""

    def __init__(self, folder: Path, *, file: str | Path | None = None, args: Mapping[str, Any] | None = None):
        """`args` are further variables of the template, such as `enable_thinking`."""
        self._folder = folder
        self._args = dict(args or {})
        self.special_tokens = special_tokens(folder)
        self._sources = sources(folder) if file is None else {_DEFAULT: Path(file).read_text(encoding="utf-8")}
        environment = _environment()
        self._templates: dict[str, Template] = {
            name: environment.from_string(source) for name, source in self._sources.items()
        }
        for template in self._templates.values():  # each rendering copies them, and jinja's chain of maps slowly
            template.globals = dict(template.globals)
        self._reading_parts = {name for name in self._templates if self._finds_parts(name)}
        self._with_developer = {name for name, source in self._sources.items() if _DEVELOPER_TEXT.search(source)}

    @property
    def source(self) -> str | None:
        """The template of chats without tools, if there is one."""
        return self._sources.get(_DEFAULT)

    def reads_parts(self, tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Whether the template reads the content of a message as a list of parts; others read it as one text."""
        return self._name(tools) in self._reading_parts

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        args: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of the chat; `args` override those of the template. ValueError for a content that is no text."""
        name = self._name(tools)
        if name not in self._templates:
            raise ValueError(
                f"{self._folder}: no chat template in tokenizer_config.json or chat_template.jinja; "
                "set chat.template_file"
            )
        if name not in self._with_developer and any(message["role"] == DEVELOPER for message in messages):
            messages = _with_one_system(messages)
        shown = _in_parts if name in self._reading_parts else _as_text
        return self._templates[name].render(
            messages=[shown(message) for message in messages],
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens, **self._args, **(args or {})},
        )

    def _name(self, tools: Sequence[Mapping[str, Any]]) -> str:
        return _WITH_TOOLS if tools and _WITH_TOOLS in self._templates else _DEFAULT

    def _finds_parts(self, name: str) -> bool:
        """Whether the template shows the texts of parts, and not the list that has them."""
        variables = {**self.special_tokens, **self._args, "tools": None, "documents": None}
        asked = {"messages": [{"role": "user", "content": _PARTS}], "add_generation_prompt": False}
        try:
            text = self._templates[name].render(**variables, **asked)
        except Exception:  # a template is a program of its own, and this one wants a text
            return False
        _, _, rest = text.partition(_PARTS[0]["text"])
        between, found, _ = rest.partition(_PARTS[1]["text"])
        return bool(found) and "text" not in between

    def unread_args(self) -> list[str]:
        """The names in `args` that the template does not read."""
        environment = _environment()
        read = set().union(*(find_undeclared_variables(environment.parse(source)) for source in self._sources.values()))
        return [name for name in self._args if name not in read]


def text_of(content: Any) -> str:
    """The text of a content: one text, or that of its parts, a line each. ValueError if it has other parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"content={content!r}: must be a text or a list of parts with type text")
    return "\n".join(filter(None, texts))


def _as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return message if content is None or isinstance(content, str) else {**message, "content": text_of(content)}


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its content in parts; the results of tools are texts for these templates, too."""
    if message["role"] == TOOL:
        return _as_text(message)
    content = message.get("content") or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    text_of(parts)
    return {**message, "content": parts}


def _with_one_system(messages: Messages) -> Messages:
    """The messages with one of role system in front, in place of all of the system and the developer."""
    special = [message for message in messages if message["role"] in (SYSTEM, DEVELOPER)]
    content: Any = special[0].get("content")
    if special != messages[:1]:
        content = "\n\n".join(text for message in special if (text := text_of(message.get("content") or "")))
    return [{"role": SYSTEM, "content": content}, *(message for message in messages if message not in special)]


def sources(folder: Path) -> dict[str, str]:
    """The templates of a folder by name: its files, or if there are none those of the tokenizer's config."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (path := folder / "chat_template.jinja").is_file():
        files[_DEFAULT] = path
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    listed = read_json(folder / "tokenizer_config.json").get("chat_template") or []
    if isinstance(listed, str):
        return {_DEFAULT: listed}
    return {entry["name"]: entry["template"] for entry in listed}


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens of the tokenizer's config, by key."""
    config = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_json(folder / "special_tokens_map.json")
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    extra = config.get("extra_special_tokens")
    named |= extra if isinstance(extra, dict) else {}
    return {key: text for key, value in named.items() if (text := _token_text(value))}


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file; empty if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
