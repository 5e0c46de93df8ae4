"""The chat tokenizer of a Hugging Face folder: the only place that turns text into tokens and back.

Reads `tokenizer.json` and the folder's chat template without importing transformers, which takes 2 s in every worker
process. The tokens of a chat are those of transformers: `tests/unit/prompts/test_tokenizer.py` compares the two.

    prompts-2: Recorded tokens never change: a chat is only continued by tokens after them.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel

from goaly.base.errors import EpisodeError
from goaly.prompts.prompt import ASSISTANT, Message
from goaly.prompts.settings import ChatSettings
from goaly.prompts.template import ChatTemplate, read_json

T = TypeVar("T")
Room = Callable[[int], object]
"""Gets a number of tokens, and raises if these are more than fit."""

LONG = 1 << 16
"""Texts with more characters are tokenized beside the event loop, if `beside` does it."""
MOST_COMPOSED = 4
"""The most characters of which Unicode's NFC makes one."""
SHOWN = 30
"""Number of characters that an error shows of two texts, from their first difference."""


class ChatTokenizer:
    """The tokenizer and chat template of a Hugging Face folder."""

    def __init__(self, folder: str | Path, chat: ChatSettings | None = None):
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{self.folder}: no tokenizer.json; a model folder must have a fast tokenizer")
        self._tokenizer = Tokenizer.from_file(str(path))
        chat = chat or ChatSettings()
        self._template = ChatTemplate(self.folder, file=chat.template_file, args=chat.template_args)
        self._special = self._template.special_tokens
        self.stop_token_ids = self._stop_tokens()
        self.pad_token = self._pad_token()

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary, with special tokens."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def stops(self) -> dict[str, int]:
        """The stop tokens by their text."""
        known = {stop: self._tokenizer.id_to_token(stop) for stop in self.stop_token_ids}
        return {text: stop for stop, text in known.items() if text is not None}

    @cached_property
    def stop_pattern(self) -> re.Pattern[str]:
        """Finds the text of a stop token; of two that begin alike, the longer one."""
        texts = sorted(self.stops, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    @property
    def template(self) -> str | None:
        """The chat template of chats without tools, if there is one."""
        return self._template.source

    def reads_parts(self, tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Whether the chat template reads the content of a message as a list of parts; others read it as one text."""
        return self._template.reads_parts(tools)

    def render_text(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        args: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of the chat; `args` are variables of the template for this chat only."""
        chat = [message.as_dict() for message in messages]
        return self._template.render(chat, add_generation_prompt=add_generation_prompt, tools=tools, args=args)

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The tokens of the chat; with `add_generation_prompt` up to where the policy's answer begins."""
        return self.encode(self.render_text(messages, add_generation_prompt, tools))

    def render_more(
        self,
        messages: Sequence[Message],
        tokens: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        as_recorded: bool = False,
    ) -> list[int]:
        """The tokens that extend `tokens`, a recorded chat that ends with an answer, to the chat of all `messages`.

        Raises EpisodeError if the template renders the recorded part differently (prompts-2), such as one that drops
        earlier reasoning. With `as_recorded` the recorded part is kept, and the result is what the template renders
        after the last answer."""
        whole = self.render_text(messages, tools=tools)
        recorded = self.decode(tokens, skip_special_tokens=False)
        if whole.startswith(recorded):
            return self.encode(whole[len(recorded) :])
        if as_recorded:
            return self.encode(whole[self._end_of_answer(messages, whole, tokens, tools) :])
        differ = next((at for at, (a, b) in enumerate(zip(recorded, whole, strict=False)) if a != b), len(whole))
        raise EpisodeError(
            f"the chat template renders earlier messages differently: {recorded[differ:][:SHOWN]!r} is recorded at "
            f"character {differ}, and the template renders {whole[differ:][:SHOWN]!r}; give the assistant's message "
            "the content that the policy wrote, or keep the recorded tokens with as_recorded=True"
        )

    def _end_of_answer(
        self, messages: Sequence[Message], whole: str, tokens: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> int:
        """The position in the rendered chat where the last answer ends: after its stop token, or before it if the
        recorded tokens have none."""
        last = max((at for at, message in enumerate(messages) if message.role == ASSISTANT), default=-1)
        ends, pattern = self.stops, self.stop_pattern

        def count(messages: Sequence[Message]) -> int:
            return len(pattern.findall(self.render_text(messages, False, tools))) if messages else 0

        stops = count(messages[: last + 1])
        if last < 0 or stops == count(messages[:last]):
            raise EpisodeError(
                "as_recorded=True: the last assistant's message must end with a stop token in the chat template "
                f"({', '.join(ends)}); otherwise use context.encode for the next tokens"
            )
        end = list(pattern.finditer(whole))[stops - 1]
        return end.end() if tokens and tokens[-1] == ends[end.group()] else end.start()

    def encode(self, text: str, room: Room | None = None) -> list[int]:
        """The tokens of the text, without special tokens. ValueError if it is not Unicode. Before a long text
        is tokenized, `room` gets the fewest tokens that it can have."""
        is_long = len(text) > LONG
        if room is not None and is_long:
            room(self.fewest_tokens(text))
        try:
            if is_long:  # this releases the interpreter's lock, but starts threads
                return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            if (lone := re.search("[\ud800-\udfff]", text)) is None:
                raise
            what = f"the text has a lone surrogate, {lone[0]!r} at character {lone.start()}"
            raise ValueError(f"{what}; it must have whole characters") from error

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the number of the text's tokens, without tokenizing it; 0 if none is known."""
        most = self._most_characters
        if most is None:
            return 0
        composed = MOST_COMPOSED if self._tokenizer.normalizer is not None and not text.isascii() else 1
        return -(-len(text) // (most * composed))

    @cached_property
    def _most_characters(self) -> int | None:
        """The most characters of a normalized text that one token can stand for, of a byte-level BPE that leaves out
        no part of a text; None for other tokenizers."""
        tokenizer, vocabulary = self._tokenizer, self._tokenizer.get_vocab()
        if not isinstance(tokenizer.model, BPE) or not isinstance(tokenizer.normalizer, NFC | None):
            return None
        splits = tokenizer.pre_tokenizer.__getstate__() if tokenizer.pre_tokenizer is not None else b""
        if b'"ByteLevel"' not in splits or b'"Removed"' in splits or not vocabulary.keys() >= set(ByteLevel.alphabet()):
            return None
        takes_spaces = any(one.lstrip or one.rstrip for one in tokenizer.get_added_tokens_decoder().values())
        return None if takes_spaces or tokenizer.truncation is not None else max(map(len, vocabulary))

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the tokens."""
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
            raise ValueError(f"{self.folder}: tokenizer_config.json names {text!r}, which is not in tokenizer.json")
        return token


def tokenizer_problems(folder: str | Path, vocab_size: int, chat: ChatSettings, where: str) -> list[str]:
    """The reasons why this folder's tokenizer cannot serve a model with this vocabulary, a line each. `where` names the
    folder."""
    try:
        tokenizer = ChatTokenizer(folder, chat if not chat.problems("") else None)
    except TemplateError as error:
        # `chat_problems` reports a wrong file.
        return [f"{where}: its chat template is wrong: {error}"] if chat.template_file is None else []
    except Exception as error:  # tokenizers raises no narrower one for a cut file
        return [f"{where}: its tokenizer cannot be read: {error}"]
    found = []
    if tokenizer.vocab_size > vocab_size:
        most = f"its config.json has vocab_size={vocab_size}"
        found.append(f"{where}: its tokenizer has {tokenizer.vocab_size} tokens, {most}, which must be as many or more")
    config = read_json(Path(folder) / "config.json").get("eos_token_id")
    listed = config if isinstance(config, list) else [] if config is None else [config]
    for stop in dict.fromkeys((*tokenizer.stop_token_ids, *listed)):
        if not isinstance(stop, int) or not 0 <= stop < vocab_size:
            found.append(f"{where}: eos_token_id={stop}: must be a token of its vocabulary, at most {vocab_size - 1}")
    return found


def vocabulary_difference(folder: str | Path, other: str | Path) -> str | None:
    """The first difference between the vocabularies of two folders; None if they are the same, or cannot be read."""
    files = [Path(one) / "tokenizer.json" for one in (folder, other)]
    if not all(file.is_file() for file in files):
        return None
    mine, theirs = (Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True) for file in files)
    for text, number in sorted(mine.items(), key=lambda one: one[1]):
        if theirs.get(text) != number:
            return f"token {number} is {text!r} here and {theirs.get(text, 'absent')} there"
    return None if len(mine) == len(theirs) else f"it has {len(theirs)} tokens, not {len(mine)}"


async def beside(read: Any, work: Callable[[], T]) -> T:
    """The result of this work, which renders what it has `read`: a text, or messages. If the texts in it are long, the
    event loop goes on meanwhile."""
    return await asyncio.to_thread(work) if _characters(read) > LONG else work()


def _characters(value: Any) -> int:
    """The length of all texts in this JSON but for keys."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0


def chat_problems(chat: ChatSettings, folder: str, prefix: str) -> list[str]:
    """The problems of these settings with this model folder, a line each; none if its template is not here to read."""
    if chat == ChatSettings() or chat.problems(""):
        return []
    if chat.template_file is None and not Path(folder).is_dir():
        return []
    try:
        template = ChatTemplate(Path(folder), file=chat.template_file, args=chat.template_args)
    except TemplateError as error:
        return [f"{prefix}template_file={chat.template_file}: is not a chat template: {error}"]
    except ValueError:  # a file of the folder is damaged, which `tokenizer_problems` reports
        return []
    return [
        f"{prefix}template_args.{name}={chat.template_args[name]}: has no effect, the chat template does not read it"
        for name in template.unread_args()
    ]
