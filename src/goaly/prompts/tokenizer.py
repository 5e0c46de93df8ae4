"""Chat rendering over a Hugging Face folder's tokenizer: the only place where text becomes tokens and back.

Reads `tokenizer.json` and the folder's chat template without importing transformers (2 s in every worker process);
`tests/unit/prompts/test_tokenizer.py` compares the two.

Invariants
    TK-1  The tokens of a chat are those that transformers makes of it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from goaly.prompts.prompt import Message

_SPECIAL_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTokenizer:
    """The tokenizer and chat template of a Hugging Face folder."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{self.folder}: no tokenizer.json; a model folder needs a fast tokenizer saved in it")
        self._tokenizer = Tokenizer.from_file(str(path))
        self._config = _json(self.folder / "tokenizer_config.json")
        self._special = {key: text for key in _SPECIAL_KEYS if (text := _token_text(self._config.get(key)))}
        self._template = _compile(_chat_template(self.folder, self._config))
        self.stop_token_ids = self._stop_tokens()
        self.pad_token = self._pad_token()

    @property
    def vocab_size(self) -> int:
        """How many tokens the tokenizer knows, special ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def render_text(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The chat as the one text that the template makes of it."""
        if self._template is None:
            raise ValueError(
                f"{self.folder}: no chat template, neither in tokenizer_config.json nor chat_template.jinja"
            )
        plain = [{"role": message.role, "content": message.content} for message in messages]
        return self._template.render(messages=plain, add_generation_prompt=add_generation_prompt, **self._special)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """The chat as tokens; with `add_generation_prompt` the policy's answer comes next."""
        return self.encode(self.render_text(messages, add_generation_prompt))

    def encode(self, text: str) -> list[int]:
        """The text's tokens, nothing added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text that the tokens stand for."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def _stop_tokens(self) -> tuple[int, ...]:
        listed = _json(self.folder / "generation_config.json").get("eos_token_id")
        if listed is None:
            listed = []
        stops = list(listed) if isinstance(listed, list) else [listed]
        if "eos_token" in self._special:
            stops.append(self._id(self._special["eos_token"]))
        return tuple(dict.fromkeys(stops))

    def _pad_token(self) -> int:
        if "pad_token" in self._special:
            return self._id(self._special["pad_token"])
        return self.stop_token_ids[0] if self.stop_token_ids else 0

    def _id(self, text: str) -> int:
        token = self._tokenizer.token_to_id(text)
        if token is None:
            raise ValueError(f"{self.folder}: tokenizer_config.json names {text!r}, which tokenizer.json does not hold")
        return token


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template


def _compile(source: str | None):
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


def _raise(message: str) -> None:
    raise TemplateError(message)
