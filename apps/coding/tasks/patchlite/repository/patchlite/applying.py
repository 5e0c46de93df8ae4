"""From a text and a patch to another text."""

from patchlite.patch import PatchError, parse


def apply(text, patch):
    """The text after the change."""
    lines, result, at = text.splitlines(), [], 0
    for hunk in parse(patch):
        place = hunk.old_start - bool(hunk.old)
        if place < at or lines[place : place + len(hunk.old)] != hunk.old or place > len(lines):
            raise PatchError(f"the hunk of line {hunk.old_start} does not fit")
        result += lines[at:place] + hunk.new
        at = place + len(hunk.old)
    return "".join(f"{line}\n" for line in result + lines[at:])
