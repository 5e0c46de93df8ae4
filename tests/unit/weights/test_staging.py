"""The seal of a slot while its writer fills it: weights-4."""

from collections.abc import Sequence

import torch
from local_store import LocalStore

from goaly.weights.copier import Pair
from goaly.weights.publisher import Publisher
from goaly.weights.settings import WeightSettings
from goaly.weights.slots import UNSEALED


async def test_a_slot_is_sealed_once_it_holds_the_version_and_unsealed_before_it_is_written_again() -> None:
    settings = WeightSettings(slots=2, bucket_mib=64 / (1 << 20))
    tensors = {name: torch.zeros(16) for name in "abc"}  # a bucket each
    writer = Publisher(LocalStore(settings), tensors, settings, rank=0, world=1)
    copy = writer._copier.copy
    found: list[int] = []

    def copying(pairs: Sequence[Pair]) -> None:
        slot = next(slot for slot in range(2) if any(pairs[0][0] is view for view in writer._slots.views(slot)))
        found.append(writer._slots.sealed(slot))
        copy(pairs)

    writer._copier.copy = copying  # type: ignore[method-assign]
    for version in range(4):  # each slot twice
        for tensor in tensors.values():
            tensor.fill_(version)
        await writer.publish(version)
        assert found == [UNSEALED] * 3
        found.clear()
        for tensor in tensors.values():
            tensor.fill_(-1.0)  # nobody sees this
        held = [writer._slots.views(slot) for slot in range(2) if writer._slots.sealed(slot) == version]
        assert [float(view.sum()) for view in held[0]] == [16.0 * version] * 3
    await writer.close()
