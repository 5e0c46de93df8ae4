"""Text of tokens, and text that is safe to show: a policy can write anything.

Text that is shown has no control characters but line breaks and tabs, and none that change its direction.
"""

from collections.abc import Sequence
from unicodedata import category

from goaly.prompts.tokenizer import ChatTokenizer

REPLACEMENT = "\ufffd"
"""Decoding gives it for bytes that are no character."""
MOST_BYTES = 4
"""A character has at most this many bytes in UTF-8, and this many tokens."""


def pieces(chat: ChatTokenizer, tokens: Sequence[int]) -> list[str]:
    """The text of each token. A character that several tokens make is in the last one of them."""
    texts = []
    begin = read = 0  # what is decoded is always the end of the text before, and the new tokens
    for end in range(1, len(tokens) + 1):
        before = chat.decode(tokens[begin:read], skip_special_tokens=False)
        text = chat.decode(tokens[begin:end], skip_special_tokens=False)
        if text.endswith(REPLACEMENT) and end - read < MOST_BYTES and end < len(tokens):
            texts.append("")
            continue
        texts.append(text[len(before) :])
        begin, read = read, end
    return texts


def safe(text: str) -> str:
    """The text with everything else than visible characters, line breaks and tabs as escapes."""
    return text if text.isprintable() else "".join(one if _is_safe(one) else _escape(one) for one in text)


def one_line(text: str) -> str:
    """The text with line breaks and tabs as escapes, too."""
    return safe(text).replace("\n", "\\n").replace("\t", "\\t")


def _is_safe(one: str) -> bool:
    return one in "\n\t" or (category(one)[0] != "C" and category(one) not in ("Zl", "Zp"))


def _escape(one: str) -> str:
    return one.encode("unicode_escape").decode()
