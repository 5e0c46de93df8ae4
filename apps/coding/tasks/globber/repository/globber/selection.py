"""Lists of patterns that include and exclude."""

from globber.paths import matches


def select(patterns, paths):
    """The paths for which the last pattern that matches is not an exclusion, in their order."""
    chosen = []
    for path in paths:
        included = False
        for pattern in patterns:
            if matches(pattern.removeprefix("!"), path):
                included = not pattern.startswith("!")
        if included:
            chosen.append(path)
    return chosen
