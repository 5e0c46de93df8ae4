"""Sections of keys and values."""

import re

KEY = re.compile(r"[\w.-]+", re.ASCII)


class Document:
    """Sections by name, each a dict of text by key."""

    def __init__(self, sections=()):
        self.sections = {}
        for name, values in dict(sections).items():
            for key, value in values.items():
                self.set(name, key, value)

    def set(self, section, key, value):
        """Set a value; the section is made if there is none."""
        if not KEY.fullmatch(key):
            raise ValueError(f"not a key: {key!r}")
        self.sections.setdefault(section, {})[key] = str(value)

    def __getitem__(self, section):
        return self.sections[section]

    def __eq__(self, other):
        return isinstance(other, Document) and self.sections == other.sections

    def __repr__(self):
        return f"Document({self.sections!r})"
