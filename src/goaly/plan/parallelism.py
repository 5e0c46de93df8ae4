"""How torchtitan lays a model out over ranks: the placements of each parameter, without a process group.

Ranks are numbered with tensor parallelism innermost and replicas outermost. Experts use the same ranks as another mesh,
in which the expert axis replaces tensor parallelism and as much of FSDP as it needs.

A rank's layout is that of torchtitan's `parallelize_fn`, for FSDP, HSDP, TP, EP and their mixes.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from goaly.models.architecture import Parameter
from goaly.weights.dtensor_layout import shards_of
from goaly.weights.layout import Extent, Layout

MeshPlacements = tuple[tuple[int, int, int], tuple[Placement, ...]]
"""The sizes of a mesh's axes, and a placement on each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """The sizes of the axes of the ranks' mesh."""

    replicas: int = 1
    """Whole copies of the model: HSDP's outer axis, or a generator's replicas."""
    fsdp: int = 1
    tp: int = 1
    ep: int = 1
    """Ranks that share a layer's experts; they are taken from `fsdp * tp`."""

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.replicas * self.fsdp * self.tp

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in asdict(self).items() if size > 1) or "tp=1"

    def problems(self, prefix: str, parameters: Sequence[Parameter] = ()) -> list[str]:
        """The sizes that can't work, a line each."""
        found = [f"{prefix}{axis}={size}: must be at least 1" for axis, size in asdict(self).items() if size < 1]
        if found:
            return found
        if self.fsdp == 1 and self.ep not in (1, self.tp):
            found.append(f"{prefix}ep={self.ep}: must be 1 or tp={self.tp} where fsdp is 1")
        elif self.fsdp * self.tp % self.ep:
            found.append(f"{prefix}ep={self.ep}: must divide fsdp * tp, {self.fsdp * self.tp}")
        experts = {parameter.shape[0] for parameter in parameters if parameter.expert}
        if parameters and self.ep > 1 and not experts:
            found.append(f"{prefix}ep={self.ep}: must be 1, the model has no experts")
        found.extend(f"{prefix}ep={self.ep}: must divide the {count} experts" for count in experts if count % self.ep)
        split = {parameter.shape[parameter.tp_dim] for parameter in parameters if parameter.tp_dim is not None}
        found.extend(
            f"{prefix}tp={self.tp}: must divide {size}, a size of the model" for size in sorted(split) if size % self.tp
        )
        return found

    def placed(self, parameter: Parameter) -> MeshPlacements:
        """The mesh of the parameter, and its placements there."""
        on_tp = Replicate() if parameter.tp_dim is None else Shard(parameter.tp_dim)
        if not parameter.expert:
            return (self.replicas, self.fsdp, self.tp), (Replicate(), self._on_fsdp(0, on_tp, self.tp), on_tp)
        # With more ranks than experts, FSDP divides within an expert.
        among = self.fsdp * self.tp if self.ep > 1 else self.replicas * self.fsdp
        fsdp_dim = 1 if among > parameter.shape[0] else 0
        if self.ep == 1:
            return (self.replicas, self.fsdp, self.tp), (Replicate(), self._on_fsdp(fsdp_dim, on_tp, self.tp), on_tp)
        mesh = (self.replicas, self.fsdp * self.tp // self.ep, self.ep)
        return mesh, (Replicate(), self._on_fsdp(fsdp_dim, Shard(0), self.ep), Shard(0))

    def _on_fsdp(self, dim: int, inner: Placement, inner_ranks: int) -> Placement:
        """FSDP's placement around an inner one."""
        if self.fsdp == 1:
            return Replicate()
        over = inner_ranks > 1 and inner.is_shard(dim)
        return _StridedShard(dim, split_factor=inner_ranks) if over else Shard(dim)

    def layout(self, parameters: Sequence[Parameter], rank: int, dtype: torch.dtype) -> Layout:
        """The shards of the parameters that this rank holds."""
        alike: dict[tuple[Extent, int | None, bool], Layout] = {}  # layers repeat the same shapes
        shards = []
        for parameter in parameters:
            kind = (parameter.shape, parameter.tp_dim, parameter.expert)
            if kind not in alike:
                mesh, placements = self.placed(parameter)
                coordinate = (rank // (mesh[1] * mesh[2]), rank // mesh[2] % mesh[1], rank % mesh[2])
                alike[kind] = shards_of("", dtype, parameter.shape, mesh, coordinate, placements)
            shards.extend(replace(shard, name=parameter.name) for shard in alike[kind])
        return tuple(shards)
