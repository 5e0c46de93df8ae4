class ParseError(ValueError):
    """Text that is no document; `line` is where."""

    def __init__(self, line, message):
        super().__init__(f"line {line}: {message}")
        self.line = line
