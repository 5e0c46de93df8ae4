"""Names of tables and columns."""

import re

NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?", re.ASCII)


def checked(name):
    """The name, if it is safe as a part of SQL."""
    if not NAME.fullmatch(name):
        raise ValueError(f"not a name: {name!r}")
    return name
