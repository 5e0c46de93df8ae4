"""Looks for stop strings in an answer while it is written. Pure, but for the tokenizer's file.

vLLM looks for them in its front end, which the engine does not use: it has no tokenizer and makes no text.

Invariants
    ST-1  An answer ends with the token that completes a stop string. No token is cut, changed or taken back: what the
          last one says after the stop string stays too.
"""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

CONTEXT_TOKENS = 6
"""Tokens of the prompt that are decoded with the first token: some tokenizers write the first word of a text
differently."""
LONGEST_CHARACTER = 4
"""Bytes of a character, and so the most tokens that one can be spread over."""
INCOMPLETE = "\ufffd"
"""What stands for the bytes of a character that is not complete yet."""

Decode = Callable[[Sequence[int]], str]


class StopStrings:
    """The stop strings of one request, and what may be the beginning of one at the end of its answer."""

    def __init__(self, stops: Sequence[str], decode: Decode, prompt: Sequence[int], min_tokens: int = 0):
        """No stop string ends an answer of `min_tokens` or fewer, as in vLLM. `decode` must show special tokens."""
        self._stops = tuple(stops)
        self._decode = decode
        self._min_tokens = min_tokens
        self._longest = max(map(len, self._stops))
        self._window = list(prompt[-CONTEXT_TOKENS:])
        self._read = len(self._window)
        self._tail = ""
        self._written = 0

    def wrote(self, token: int) -> str | None:
        """Take note of the answer's next token; the stop string that it completes (ST-1)."""
        self._written += 1
        new = self._new_text(token)
        text = self._tail + new
        self._tail = text[max(0, len(text) - self._longest + 1) :]
        if self._written <= self._min_tokens:
            return None
        ends = {}
        for stop in self._stops:
            at = text.find(stop, max(0, len(text) - len(new) - len(stop) + 1))
            if at >= 0:
                ends[stop] = at + len(stop)
        return min(ends, key=ends.__getitem__, default=None)

    def _new_text(self, token: int) -> str:
        """What this token adds to the answer's text; nothing as long as a character is incomplete."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(INCOMPLETE) and len(self._window) - self._read < LONGEST_CHARACTER:
            return ""
        before = self._decode(self._window[: self._read])
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return text[len(before) :]


@cache
def decoder(folder: str) -> Decode:
    """Turns tokens into text by the tokenizer of a model folder, special tokens included; ValueError if it has none."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"stop: {folder} has no tokenizer.json, and stop strings need a tokenizer; use stop_token_ids")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=False)
