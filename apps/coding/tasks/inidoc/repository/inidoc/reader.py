"""From text to documents."""

import re

from inidoc.document import KEY, Document
from inidoc.errors import ParseError

COMMENT = re.compile(r"(?:^|[ \t])[#;].*")
ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\"}


def strip_comment(line):
    """The line without its comment, and without spaces around it."""
    return COMMENT.sub("", line).strip(" \t")


def unquote(text, number):
    """The value of a quoted text."""
    value, at = [], 1
    while at < len(text):
        char = text[at]
        if char == '"':
            if at != len(text) - 1:
                raise ParseError(number, f"nothing may follow the quote: {text[at + 1:]!r}")
            return "".join(value)
        if char == "\\":
            at += 1
            if text[at : at + 1] not in ESCAPES or at == len(text):
                raise ParseError(number, f"unknown escape: {text[at - 1 : at + 1]!r}")
            char = ESCAPES[text[at]]
        value.append(char)
        at += 1
    raise ParseError(number, "the quote is not closed")


def loads(text):
    """The document of a text; raises ParseError with the number of the wrong line."""
    document, section = Document(), ""
    for number, line in enumerate(text.split("\n"), 1):
        line = strip_comment(line)
        if not line:
            continue
        if line.startswith("["):
            if not line.endswith("]") or not line[1:-1].strip():
                raise ParseError(number, f"not a section: {line!r}")
            section = line[1:-1].strip()
            continue
        key, equals, value = (part.strip(" \t") for part in line.partition("="))
        if not equals or not KEY.fullmatch(key):
            raise ParseError(number, f"neither a section nor `key = value`: {line!r}")
        if key in document.sections.get(section, {}):
            raise ParseError(number, f"{key} is there twice")
        document.set(section, key, unquote(value, number) if value.startswith('"') else value)
    return document
