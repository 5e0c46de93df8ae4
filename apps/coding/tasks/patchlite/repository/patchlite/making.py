"""From two texts to a patch."""

from difflib import SequenceMatcher

from patchlite.patch import Hunk


def diff(old, new, context=3):
    """The patch that turns one text into another."""
    old_lines, new_lines = old.splitlines(), new.splitlines()
    matcher = SequenceMatcher(None, old_lines, new_lines, autojunk=False)
    return "".join(str(_hunk(group, old_lines, new_lines)) for group in matcher.get_grouped_opcodes(context))


def _hunk(group, old_lines, new_lines):
    lines = []
    for kind, old_from, old_to, new_from, new_to in group:
        if kind == "equal":
            lines += [(" ", text) for text in old_lines[old_from:old_to]]
        else:
            lines += [("-", text) for text in old_lines[old_from:old_to]]
            lines += [("+", text) for text in new_lines[new_from:new_to]]
    (_, old_from, _, new_from, _), (_, _, old_to, _, new_to) = group[0], group[-1]
    return Hunk(old_from + (old_to > old_from), new_from + (new_to > new_from), tuple(lines))
