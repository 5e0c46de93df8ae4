"""What a reader needs of the published tensors, whoever holds them: rectangles, by the tensors' names.

A reader that reads whole buckets tells the store before the first publish, so that writers cut buckets to it.

Invariants
    WY-1  Needs say nothing about sources: a reader that is wrong about a tensor's shape is told so by `plan`, and
          spoils no writer's buckets.
"""

from collections.abc import Iterable, Mapping, Sequence

from goaly.weights.layout import Layout, Shard
from goaly.weights.rectangle import Rectangle, common, joined

Needs = Mapping[str, tuple[Rectangle, ...]]


def needs_of(layout: Layout) -> Needs:
    """What fills this layout, in as few rectangles as touching ones can be joined to."""
    rectangles: dict[str, list[Rectangle]] = {}
    for shard in layout:
        rectangles.setdefault(shard.name, []).append((shard.offset, shard.shape))
    return {name: joined(needed) for name, needed in rectangles.items()}


def distinct(needs: Iterable[Needs]) -> tuple[Needs, ...]:
    """Each of them once: replicas need the same."""
    found: list[Needs] = []
    for one in needs:
        if one and one not in found:
            found.append(one)
    return tuple(found)


def needed_of(shard: Shard, needs: Sequence[Needs]) -> tuple[tuple[Rectangle, ...], ...]:
    """By reader, the parts of the shard that it needs."""
    place = (shard.offset, shard.shape)
    return tuple(
        tuple(
            part
            for rectangle in one.get(shard.name, ())
            if len(rectangle[0]) == len(shard.offset) and (part := common(place, rectangle)) is not None  # WY-1
        )
        for one in needs
    )
