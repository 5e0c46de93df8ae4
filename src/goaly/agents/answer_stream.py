"""One answer of the policy while it is sampled: the reasoning and the text that clients may see before its end.

vLLM's streaming parsers read it. They may take its beginning for a tool call that the whole answer is not, so its calls
are sent once the whole has been read, as the recorded message has them.

The pieces of an answer and the rest of its recorded message are that message, for each client, whenever it connects.
Where a parser reads the parts of an answer differently than the whole, the recorded message has the reasoning and the
text of the parts, which clients have seen. No piece has a part of a character, the beginning of a stop string, or
spaces that may end the text.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from goaly.agents.turn import RecordedTurn
from goaly.generate.request import Decode, Detokenizer, Finish
from goaly.generate.versioned_tokens import VersionedTokens
from goaly.prompts.prompt import Message

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer that clients get at once."""

    tokens: list[int]
    logprobs: list[float]
    reasoning: str = ""
    content: str = ""
    calls: Sequence[Mapping[str, Any]] = ()
    finish: Finish | None = None
    """Why the answer ended; None if this is not the last piece."""


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """A parser of vLLM for one answer, and the request that it reads an answer to."""

    parser: Any
    request: Any


class AnswerStream:
    """The pieces of an answer so far."""

    def __init__(
        self, decode: Decode, stops: Sequence[str], reading: AnswerReading | None, on_piece: Callable[[], None]
    ):
        """Without a `reading` the answer is its text. `on_piece` is called after each new piece."""
        self.pieces: list[Piece] = []
        self._text = Detokenizer(decode)  # it holds parts of characters
        self._stops = stops
        self._reading = reading
        self._on_piece = on_piece
        self._tokens = 0
        self._unread: list[tuple[str, list[int]]] = []
        """Tokens that the parser does not have yet, each with the text that it added."""
        self._spaces = ""
        """At the end of what was read."""
        self._in_content = self._in_calls = self._is_broken = False

    def wrote(self, part: VersionedTokens) -> None:
        """Add the next tokens. Never raises."""
        reasoning, content = ("", "") if self._in_calls else self._tried(part.tokens)
        self.pieces.append(Piece(part.tokens, part.logprobs, reasoning, content))
        self._on_piece()

    def agreed(self, message: Message, tokens: Sequence[int], stop: str | None) -> Message:
        """The message to record for the answer with these tokens, of which the whole reads as `message`."""
        reasoning = "".join(piece.reasoning for piece in self.pieces)
        content = "".join(piece.content for piece in self.pieces)
        whole = message.reasoning_content or "", message.content or ""
        if whole[0].startswith(reasoning) and whole[1].startswith(content) and (not content or whole[0] == reasoning):
            return message
        logger.info("the parts of a streamed answer read differently than the whole; the parts are recorded")
        if not self._is_broken:
            more = self._tried(tokens[self._tokens :], stop, finished=True)
            reasoning, content = reasoning + more[0], content + more[1]
            if self._in_content:
                content += self._spaces
            else:
                reasoning += self._spaces
        return replace(message, reasoning_content=reasoning or None, content=content or None)

    def _tried(self, tokens: Sequence[int], stop: str | None = None, *, finished: bool = False) -> tuple[str, str]:
        """As `_read`; nothing if the parser raises."""
        try:
            return self._read(tokens, stop, finished=finished)
        except Exception:  # the whole is read by other methods of the parser, which may fail or not
            logger.warning("a parser cannot read a stream: its answers come when they are whole", exc_info=True)
            self._in_calls = self._is_broken = True
            return "", ""

    def _read(self, tokens: Sequence[int], stop: str | None = None, *, finished: bool = False) -> tuple[str, str]:
        """The reasoning and the text that these tokens add; `stop` is the stop string that ended the answer."""
        self._tokens += len(tokens)
        some = [tokens] if self._reading is None else [[token] for token in tokens]  # as vLLM's parsers expect them
        self._unread += [(self._text.wrote(*each), list(each)) for each in some]
        text = "".join(text for text, _ in self._unread)
        if not finished and self._may_stop(text):
            return "", ""
        unread, self._unread = self._unread, []
        room = len(text) if stop is None or stop not in text else text.rfind(stop)
        if self._reading is None:
            return self._kept("", text[:room])
        reasoning = content = ""
        for at, (new, token) in enumerate(unread or [("", [])], 1):
            more = self._parsed(new[:room], token, finished=finished and at >= len(unread))
            room = max(0, room - len(new))
            reasoning, content = reasoning + more[0], content + more[1]
        return reasoning, content

    def _parsed(self, text: str, tokens: list[int], *, finished: bool) -> tuple[str, str]:
        assert self._reading is not None
        parser, request = self._reading.parser, self._reading.request
        delta = parser.parse_delta(text, tokens, request, prompt_token_ids=[], finished=finished)
        if delta is None or self._in_calls:
            return "", ""
        self._in_calls = bool(delta.tool_calls)
        return self._kept(delta.reasoning or "", delta.content or "")

    def _kept(self, reasoning: str, content: str) -> tuple[str, str]:
        """The part of this that may be shown: spaces wait for the text after them."""
        if not self._in_content:
            reasoning = self._spaces + reasoning
            if not content:
                shown = reasoning.rstrip()
                self._spaces = reasoning[len(shown) :]
                return shown, ""
            self._in_content, self._spaces = True, ""
        content = self._spaces + content
        shown = content.rstrip()
        self._spaces = content[len(shown) :]
        return reasoning, shown

    def _may_stop(self, text: str) -> bool:
        return any(text.endswith(stop[:length]) for stop in self._stops for length in range(1, len(stop)))


class Reader:
    """How far one client has come in an answer."""

    def __init__(self) -> None:
        self._pieces = self._tokens = self._reasoning = self._content = 0

    def take(self, pieces: Sequence[Piece]) -> Piece | None:
        """The new pieces as one; None if there is none."""
        new = pieces[self._pieces :]
        if not new:
            return None
        self._pieces += len(new)
        piece = Piece(
            [token for each in new for token in each.tokens],
            [logprob for each in new for logprob in each.logprobs],
            "".join(each.reasoning for each in new),
            "".join(each.content for each in new),
        )
        self._tokens += len(piece.tokens)
        self._reasoning += len(piece.reasoning)
        self._content += len(piece.content)
        return piece

    def rest(self, turn: RecordedTurn) -> Piece:
        """The rest of the recorded answer."""
        return Piece(
            turn.tokens[self._tokens :].tolist(),
            turn.logprobs[self._tokens :].tolist(),
            (turn.message.get("reasoning_content") or "")[self._reasoning :],
            (turn.message.get("content") or "")[self._content :],
            turn.message.get("tool_calls") or (),
            turn.finish,
        )
