"""Choosing versions of packages that depend on each other."""

from semver.ranges import Range
from semver.version import Version


class Conflict(Exception):
    """There is no choice that satisfies all ranges."""


def resolve(index, wanted):
    """A version by package name that satisfies all ranges, the newest ones that go together."""
    chosen = _choose(index, {}, [(name, Range.parse(text)) for name, text in wanted.items()])
    if chosen is None:
        raise Conflict(f"no versions go together for {wanted}")
    return {name: str(version) for name, version in sorted(chosen.items())}


def _choose(index, chosen, ranges):
    """The chosen versions with those of all names in `ranges`; None if that is impossible."""
    if any(name in chosen and chosen[name] not in allowed for name, allowed in ranges):
        return None
    name = next((name for name, _ in ranges if name not in chosen), None)
    if name is None:
        return chosen
    versions = {Version.parse(text): needs for text, needs in index.get(name, {}).items()}
    for version in sorted(versions, reverse=True):
        needs = [(other, Range.parse(text)) for other, text in versions[version].items()]
        found = _choose(index, chosen | {name: version}, ranges + needs)
        if found is not None:
            return found
    return None
