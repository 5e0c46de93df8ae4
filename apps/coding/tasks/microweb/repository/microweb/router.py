"""Finding the handler of a path."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Route:
    """A pattern of segments, its methods, and the handler."""

    segments: tuple
    methods: frozenset
    handler: object

    def match(self, path):
        """The values of the path's variables, or None if the path does not fit."""
        parts = path.split("/")
        if len(parts) != len(self.segments):
            return None
        values = {}
        for segment, part in zip(self.segments, parts):
            if not (segment.startswith("<") and segment.endswith(">")):
                if segment != part:
                    return None
                continue
            kind, _, name = segment[1:-1].rpartition(":")
            if not part or (kind == "int" and not part.isdecimal()):
                return None
            values[name] = int(part) if kind == "int" else part
        return values


class Router:
    """Routes in the order in which they were added."""

    def __init__(self):
        self.routes = []

    def add(self, pattern, methods, handler):
        """Add a route."""
        if not pattern.startswith("/"):
            raise ValueError(f"a pattern starts with /: {pattern!r}")
        self.routes.append(Route(tuple(pattern.split("/")), frozenset(method.upper() for method in methods), handler))

    def find(self, path):
        """The route that fits the path, and the values of its variables; None and no values if none does."""
        for route in self.routes:
            values = route.match(path)
            if values is not None:
                return route, values
        return None, {}
