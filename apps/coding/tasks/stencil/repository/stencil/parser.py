"""From text to nodes."""

import re

from stencil.nodes import FILTERS, For, If, Include, Place, Text, Value

TAG = re.compile(r"\{\{(?P<value>.*?)\}\}|\{%(?P<tag>.*?)%\}|\{#.*?#\}", re.DOTALL)
PATH = r"[A-Za-z_]\w*(?:\.\w+)*"
VALUE = re.compile(rf"\s*({PATH})\s*((?:\|\s*\w+\s*)*)")
IF = re.compile(rf"if (not )?({PATH})")
FOR = re.compile(rf"for ([A-Za-z_]\w*) in ({PATH})")
INCLUDE = re.compile(r"include (\S+)")


class Parser:
    """Keeps the nodes that are not closed yet; new nodes go to the last list."""

    def __init__(self, name, text):
        self.name = name
        self.text = text
        self.nodes = []
        self.open = []
        self.targets = [self.nodes]

    def parse(self):
        """The nodes of the template."""
        at = 0
        for match in TAG.finditer(self.text):
            place = Place(self.name, 1 + self.text.count("\n", 0, match.start()))
            self.add_text(self.text[at : match.start()])
            if match["value"] is not None:
                self.targets[-1].append(self.value(match["value"], place))
            elif match["tag"] is not None:
                self.tag(" ".join(match["tag"].split()), place)
            at = match.end()
        self.add_text(self.text[at:])
        if self.open:
            raise self.open[-1].place.error("this tag has no end")
        return self.nodes

    def add_text(self, text):
        if text:
            self.targets[-1].append(Text(text))

    def value(self, text, place):
        match = VALUE.fullmatch(text)
        if match is None:
            raise place.error(f"not a value: {text.strip()!r}")
        filters = match[2].replace("|", " ").split()
        for name in filters:
            if name not in FILTERS:
                raise place.error(f"there is no filter {name!r}")
        return Value(place, match[1], filters)

    def tag(self, text, place):
        if match := IF.fullmatch(text):
            self.start(If(place, bool(match[1]), match[2]))
        elif match := FOR.fullmatch(text):
            self.start(For(place, match[1], match[2]))
        elif match := INCLUDE.fullmatch(text):
            self.targets[-1].append(Include(place, match[1]))
        elif text == "else" and self.open and self.targets[-1] is self.open[-1].body:
            self.targets[-1] = self.open[-1].otherwise
        elif text == "end" and self.open:
            self.open.pop()
            self.targets.pop()
        else:
            raise place.error(f"this tag is not known here: {text!r}")

    def start(self, node):
        self.targets[-1].append(node)
        self.open.append(node)
        self.targets.append(node.body)
