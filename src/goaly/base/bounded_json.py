"""JSON that others wrote: a policy, a client, a tool, the server of an environment.

What is read can be written as JSON again, compared, and rendered by a chat template: that takes a call for each level,
and a number of its own kind.
"""

import sys
from typing import Any

from pydantic_core import from_json

MOST_CHARACTERS = 64 << 20
MOST_DEPTH = 64
"""Objects and lists within each other. The schemas of vLLM's grammars may have as many."""


def bounded_json(text: str | bytes) -> Any:
    """The value of this text. ValueError if it is not JSON in Unicode, is longer or deeper than the limits, or has a
    number that is not finite or larger than any float."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{len(text)} characters of JSON, must have at most {MOST_CHARACTERS}")
    encoded = text.encode() if isinstance(text, str) else text  # ValueError for a lone surrogate
    value = from_json(encoded, allow_inf_nan=False)
    level, depth = [value], 0
    while level:
        for each in level:
            if isinstance(each, int | float) and not abs(each) <= sys.float_info.max:
                raise ValueError("has a number that is larger than any float, must be finite")
        holders = [each for each in level if isinstance(each, dict | list)]
        depth += bool(holders)
        if depth > MOST_DEPTH:
            raise ValueError(f"is nested too deeply, must have at most {MOST_DEPTH} levels")
        level = [inner for each in holders for inner in (each.values() if isinstance(each, dict) else each)]
    return value
