"""Reads one value."""

import re

WHITE = " \t\n\r"
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
WORD = re.compile(r"[^\s\[\]{}\",:]+")
WORDS = {"true": True, "false": False, "null": None}
ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
HEX = re.compile(r"[0-9a-fA-F]{4}")


class JsonError(ValueError):
    """Text that is not JSON, and the position of the mistake."""

    def __init__(self, message, position):
        super().__init__(f"{message} at position {position}")
        self.message = message
        self.position = position


class Parser:
    """Reads a text from its start."""

    def __init__(self, text):
        self.text = text
        self.at = 0

    def skip(self):
        """Skip white space; return the next character, or "" at the end."""
        while self.at < len(self.text) and self.text[self.at] in WHITE:
            self.at += 1
        return self.text[self.at : self.at + 1]

    def expect(self, chars):
        """Skip white space and take one of these characters."""
        char = self.skip()
        if not char or char not in chars:
            raise JsonError(f"one of {chars} is expected" if char else "the text ends too early", self.at)
        self.at += 1
        return char

    def value(self):
        """The value that starts here."""
        char = self.skip()
        if char == "{":
            return self.members()
        if char == "[":
            return self.elements()
        if char == '"':
            return self.string()
        return self.word()

    def members(self):
        self.expect("{")
        found = {}
        if self.skip() == "}":
            self.at += 1
            return found
        while True:
            if self.skip() != '"':
                self.expect('"')
            key = self.string()
            self.expect(":")
            found[key] = self.value()
            if self.expect(",}") == "}":
                return found

    def elements(self):
        self.expect("[")
        found = []
        if self.skip() == "]":
            self.at += 1
            return found
        while True:
            found.append(self.value())
            if self.expect(",]") == "]":
                return found

    def word(self):
        """A number, or one of the words."""
        match = WORD.match(self.text, self.at)
        if match is None:
            raise JsonError("a value is expected" if self.at < len(self.text) else "the text ends too early", self.at)
        number = NUMBER.fullmatch(match[0])
        if number is None and match[0] not in WORDS:
            raise JsonError(f"{match[0]!r} is no value", self.at)
        self.at = match.end()
        if number is None:
            return WORDS[match[0]]
        return float(match[0]) if number[1] or number[2] else int(match[0])

    def string(self):
        self.at += 1
        pieces = []
        while (char := self.text[self.at : self.at + 1]) != '"':
            if char == "":
                raise JsonError("the text ends too early", self.at)
            if char < " ":
                raise JsonError("a control character in a string", self.at)
            pieces.append(self.escape() if char == "\\" else char)
            self.at += len(char) if char != "\\" else 0
        self.at += 1
        return "".join(pieces).encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def escape(self):
        """The character of the escape that starts here."""
        start, char = self.at, self.text[self.at + 1 : self.at + 2]
        if char in ESCAPES and char:
            self.at += 2
            return ESCAPES[char]
        match = HEX.match(self.text, start + 2) if char == "u" else None
        if match is None:
            raise JsonError("a wrong escape", start)
        self.at = match.end()
        return chr(int(match[0], 16))


def loads(text):
    """The value of a text."""
    parser = Parser(text)
    value = parser.value()
    if parser.skip():
        raise JsonError("something follows the value", parser.at)
    return value
