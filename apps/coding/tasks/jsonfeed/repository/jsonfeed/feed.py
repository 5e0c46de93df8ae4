"""Values of a stream."""

from jsonfeed.parser import loads


class Feed:
    """Takes the bytes of a stream, and returns the values in it."""

    def __init__(self):
        self._rest = ""

    def feed(self, data):
        """The values that these bytes complete."""
        *lines, self._rest = (self._rest + data.decode("utf-8")).split("\n")
        return [loads(line) for line in lines if line.strip()]

    def close(self):
        """The value that ends with the stream, if there is one."""
        rest, self._rest = self._rest, ""
        return [loads(rest)] if rest.strip() else []
