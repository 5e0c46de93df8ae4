"""What a slot says of itself while its writer is at it: weights-4."""

from collections.abc import Sequence

import torch
from local_store import LocalStore

from goaly.weights.copier import Pair
from goaly.weights.publisher import Publisher
from goaly.weights.settings import WeightSettings
from goaly.weights.shared_memory import Ring
from goaly.weights.slots import UNSEALED


async def test_a_bucket_is_sealed_once_it_holds_the_version_and_unsealed_before_it_is_written_again() -> None:
    settings = WeightSettings(slots=2, bucket_mib=64 / (1 << 20))
    tensors = {name: torch.zeros(16) for name in "abc"}  # a bucket each
    writer = Publisher(LocalStore(settings), tensors, settings, rank=0, world=1)
    copy = writer._copier.copy
    found: list[list[int]] = []

    def copying(pairs: Sequence[Pair]) -> None:
        ring = writer._slots
        assert isinstance(ring, Ring)
        slot = next(slot for slot in range(2) if any(pairs[0][0] is view for view in ring.views(slot)))
        found.append(ring.seals(slot))
        copy(pairs)

    writer._copier.copy = copying  # type: ignore[method-assign]
    for version in range(4):  # each slot twice
        for tensor in tensors.values():
            tensor.fill_(version)
        await writer.publish(version)
        begun = [[version] * done + [UNSEALED] * (3 - done) for done in range(3)]
        assert found == begun
        found.clear()
        for tensor in tensors.values():
            tensor.fill_(-1.0)  # nobody sees this
        ring = writer._slots
        assert isinstance(ring, Ring)
        held = [ring.views(slot) for slot in range(2) if ring.seals(slot) == [version] * 3]
        assert [float(view.sum()) for view in held[0]] == [16.0 * version] * 3
    await writer.close()
