"""What templates are made of."""

from dataclasses import dataclass, field
from html import escape

from stencil.errors import TemplateError

FILTERS = {"raw": lambda value: value, "upper": lambda value: str(value).upper(), "lower": lambda value: str(value).lower(), "length": len}


@dataclass(frozen=True)
class Place:
    """Where something is, for errors."""

    template: str
    line: int

    def error(self, message):
        return TemplateError(message, self.template, self.line)


class Context:
    """The variables at a place, and the templates that can be included."""

    def __init__(self, variables, templates):
        self.variables = variables
        self.templates = templates

    def with_variable(self, name, value):
        return Context({**self.variables, name: value}, self.templates)

    def look_up(self, path, place):
        """The value of a dotted path."""
        value = self.variables
        for name in path.split("."):
            try:
                value = value[name] if isinstance(value, dict) else getattr(value, name)
            except (KeyError, AttributeError):
                raise place.error(f"there is no {path}") from None
        return value


def render_all(nodes, context):
    return "".join(node.render(context) for node in nodes)


@dataclass
class Text:
    text: str

    def render(self, context):
        return self.text


@dataclass
class Value:
    place: Place
    path: str
    filters: list

    def render(self, context):
        value = context.look_up(self.path, self.place)
        for name in self.filters:
            value = FILTERS[name](value)
        return str(value) if "raw" in self.filters else escape(str(value))


@dataclass
class If:
    place: Place
    negated: bool
    path: str
    body: list = field(default_factory=list)
    otherwise: list = field(default_factory=list)

    def render(self, context):
        holds = bool(context.look_up(self.path, self.place)) != self.negated
        return render_all(self.body if holds else self.otherwise, context)


@dataclass
class For:
    place: Place
    name: str
    path: str
    body: list = field(default_factory=list)
    otherwise: list = field(default_factory=list)

    def render(self, context):
        values = list(context.look_up(self.path, self.place))
        if not values:
            return render_all(self.otherwise, context)
        return "".join(render_all(self.body, context.with_variable(self.name, value)) for value in values)


@dataclass
class Include:
    place: Place
    name: str

    def render(self, context):
        return context.templates.render_in(self.name, context, self.place)
