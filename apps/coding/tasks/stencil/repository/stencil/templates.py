"""Templates by name."""

from stencil.errors import TemplateError
from stencil.nodes import Context, render_all
from stencil.parser import Parser


class Templates:
    """Templates that can include each other."""

    def __init__(self, texts):
        self._texts = dict(texts)
        self._parsed = {}

    def render(self, name, /, **variables):
        """The text of a template with these variables."""
        if name not in self._texts:
            raise TemplateError("there is no such template", name, 0)
        return render_all(self._nodes(name), Context(variables, self))

    def render_in(self, name, context, place):
        """The text of a template that another one includes at a place."""
        if name not in self._texts:
            raise place.error(f"there is no template {name!r}")
        return render_all(self._nodes(name), context)

    def _nodes(self, name):
        if name not in self._parsed:
            self._parsed[name] = Parser(name, self._texts[name]).parse()
        return self._parsed[name]
