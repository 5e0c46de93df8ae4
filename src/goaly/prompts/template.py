"""The chat template of a Hugging Face folder, compiled as transformers compiles it, but without importing transformers.

That import takes 2.3 s in every worker process and the controller, ten times as long as this module's.
`tests/unit/prompts/test_template.py` renders the same chats with both (TK-1), and compares the features of templates.
"""

import json
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

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        args: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of the chat; `args` override those of the template."""
        name = _WITH_TOOLS if tools and _WITH_TOOLS in self._templates else _DEFAULT
        if name not in self._templates:
            raise ValueError(
                f"{self._folder}: no chat template in tokenizer_config.json or chat_template.jinja; "
                "set chat.template_file"
            )
        return self._templates[name].render(
            messages=messages,
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens, **self._args, **(args or {})},
        )

    def unread_args(self) -> list[str]:
        """The names in `args` that the template does not read."""
        environment = _environment()
        read = set().union(*(find_undeclared_variables(environment.parse(source)) for source in self._sources.values()))
        return [name for name in self._args if name not in read]


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
