"""Chat rendering over a Hugging Face folder's tokenizer: the only place where text becomes tokens and back.

Reads `tokenizer.json` and the folder's chat template without importing transformers (2 s in every worker process);
`tests/unit/prompts/test_tokenizer.py` and `test_template.py` compare the two.

Invariants
    TK-1  The tokens of a chat are those that transformers makes of it.
    TK-2  What is recorded stays: a chat is continued only by tokens that come after the recorded ones.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer

from goaly.errors import EpisodeError
from goaly.prompts.prompt import ASSISTANT, Message
from goaly.prompts.settings import ChatSettings
from goaly.prompts.template import ChatTemplate, read_json

SHOWN = 30
"""Characters that an error shows of two texts, from where they differ."""


class ChatTokenizer:
    """The tokenizer and chat template of a Hugging Face folder."""

    def __init__(self, folder: str | Path, chat: ChatSettings | None = None):
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{self.folder}: no tokenizer.json; a model folder needs a fast tokenizer saved in it")
        self._tokenizer = Tokenizer.from_file(str(path))
        chat = chat or ChatSettings()
        self._template = ChatTemplate(self.folder, file=chat.template_file, args=chat.template_args)
        self._special = self._template.special_tokens
        self.stop_token_ids = self._stop_tokens()
        self.pad_token = self._pad_token()

    @property
    def vocab_size(self) -> int:
        """How many tokens the tokenizer knows, special ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def render_text(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """The chat as the one text that the template makes of it."""
        chat = [message.as_dict() for message in messages]
        return self._template.render(chat, add_generation_prompt=add_generation_prompt, tools=tools)

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The chat as tokens; with `add_generation_prompt` the policy's answer comes next."""
        return self.encode(self.render_text(messages, add_generation_prompt, tools))

    def render_more(
        self,
        messages: Sequence[Message],
        tokens: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        as_recorded: bool = False,
    ) -> list[int]:
        """The tokens that continue `tokens`, a recorded chat that ends with an answer, to the whole of `messages`.

        The template must write what is recorded as it is recorded: EpisodeError where it does not (TK-2), such as one
        that leaves out what the policy thought before. With `as_recorded` the chat goes on after what is recorded, as
        the template goes on after the last answer, whatever it makes of the past."""
        whole = self.render_text(messages, tools=tools)
        recorded = self.decode(tokens, skip_special_tokens=False)
        if whole.startswith(recorded):
            return self.encode(whole[len(recorded) :])
        if as_recorded:
            return self.encode(whole[self._end_of_answer(messages, whole, tokens, tools) :])
        differ = next((at for at, (a, b) in enumerate(zip(recorded, whole, strict=False)) if a != b), len(whole))
        raise EpisodeError(
            f"the chat template writes the past differently once it goes on: {recorded[differ:][:SHOWN]!r} is recorded "
            f"at character {differ}, and the template writes {whole[differ:][:SHOWN]!r}; give the assistant's message "
            "the content that the policy wrote, or go on from what is recorded by as_recorded=True"
        )

    def _end_of_answer(
        self, messages: Sequence[Message], whole: str, tokens: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> int:
        """Where in the rendered chat the last answer ends, as the recorded tokens end: with its stop token, or before
        it where they have none."""
        last = max((at for at, message in enumerate(messages) if message.role == ASSISTANT), default=-1)
        ends = {self._tokenizer.id_to_token(stop): stop for stop in self.stop_token_ids}
        pattern = "|".join(map(re.escape, sorted(ends, key=len, reverse=True))) or r"(?!)"

        def count(messages: Sequence[Message]) -> int:
            return len(re.findall(pattern, self.render_text(messages, False, tools))) if messages else 0

        stops = count(messages[: last + 1])
        if last < 0 or stops == count(messages[:last]):
            raise EpisodeError(
                "as_recorded=True: needs an assistant's message that the chat template ends with a stop token "
                f"({', '.join(ends)}); encode what comes next by context.encode"
            )
        end = list(re.finditer(pattern, whole))[stops - 1]
        return end.end() if tokens and tokens[-1] == ends[end.group()] else end.start()

    def encode(self, text: str) -> list[int]:
        """The text's tokens, nothing added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text that the tokens stand for."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def _stop_tokens(self) -> tuple[int, ...]:
        listed = read_json(self.folder / "generation_config.json").get("eos_token_id")
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


def chat_problems(chat: ChatSettings, folder: str, prefix: str) -> list[str]:
    """What can't work about these settings with this model folder, a line each."""
    if chat == ChatSettings() or chat.problems(""):
        return []
    try:
        template = ChatTemplate(Path(folder), file=chat.template_file, args=chat.template_args)
    except TemplateError as error:
        return [f"{prefix}template_file={chat.template_file}: is not a chat template: {error}"]
    return [
        f"{prefix}template_args.{name}={chat.template_args[name]}: has no effect, the chat template does not read it"
        for name in template.unread_args()
    ]
