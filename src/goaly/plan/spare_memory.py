"""Where generators keep the weights that they have fetched, chosen by what fits their GPUs, and what would fit.

"auto" becomes "device" only if that leaves `HEADROOM` of the GPU free, beside all roles that share it.
"""

from dataclasses import dataclass, replace
from typing import Literal

from goaly.models.catalog import shape_of
from goaly.plan.host_settings import COMPUTING
from goaly.plan.rank_memory import DTYPE_BYTES, GIB, cached_tokens, memory_by_role
from goaly.plan.run_config import RunConfig
from goaly.weights.settings import HEADROOM

PLACES: tuple[Literal["device", "host"], ...] = ("device", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spare:
    """The choice, and the GiB that each place of the fetched weights leaves on a generator's GPU."""

    asked: Literal["auto", "device", "host"]
    chosen: Literal["auto", "device", "host"]
    """"auto" if the plan does not know; then the generator chooses by what is free on its GPU."""
    gpu_gib: float
    device_left: float
    host_left: float

    @property
    def headroom(self) -> float:
        """The GiB that must stay free."""
        return HEADROOM * self.gpu_gib

    def __str__(self) -> str:
        """The choice and its reason, as a line of a dry run."""
        return (
            f"weights.spare={self.asked}: {self.chosen}. GiB left on a generator's GPU: {self.device_left:.1f} with "
            f"the fetched weights on it, {self.host_left:.1f} with them in the host's memory; at least "
            f"{self.headroom:.1f} must be left"
        )


def spare_of(config: RunConfig, gpu_gib: float, *, traced: bool) -> Spare:
    """The choice for GPUs of this size. Without `traced`, the plan does not know what a pass of a trained role takes
    that shares the generator's GPU."""
    sharing = _beside_generators(config)

    def left(place: Literal["device", "host"], *, traced: bool) -> float:
        found = memory_by_role(with_spare(config, place), on_gpu=True, traced=traced)
        return gpu_gib - sum(max(one.device_gib for one in found[role]) for role in ("generator", *sharing))

    asked = chosen = config.weights.spare
    if asked == "auto":
        known = traced and bool(sharing)  # a run, which traces nothing, must choose the same
        if traced or not {"trainer", "critic"} & sharing:
            chosen = "device" if left("device", traced=known) >= HEADROOM * gpu_gib else "host"
    device_left, host_left = (left(place, traced=traced) for place in PLACES)
    return Spare(asked=asked, chosen=chosen, gpu_gib=gpu_gib, device_left=device_left, host_left=host_left)


def with_spare(config: RunConfig, place: Literal["auto", "device", "host"]) -> RunConfig:
    """The config with fetched weights in this place."""
    return replace(config, weights=replace(config.weights, spare=place))


def what_would_fit(config: RunConfig, spare: Spare) -> str:
    """Settings with which a generator that does not fit would fit; empty if it fits."""
    if (spare.device_left if spare.chosen == "device" else spare.host_left) >= spare.headroom:
        return ""
    if spare.chosen == "device" and spare.host_left >= spare.headroom:
        return "weights.spare=host would fit"
    cache = int(10 * (config.generator.kv_cache_gib + spare.host_left - spare.headroom)) / 10
    if cached_tokens(config, shape_of(config.model), cache) >= config.generator.max_context:
        return f"generator.kv_cache_gib={cache:g} would fit" + " with weights.spare=host" * (spare.chosen == "device")
    shape = shape_of(config.model)
    weights = DTYPE_BYTES[config.model.dtype] * shape.elements / GIB
    return f"raise generator.tp, which divides its {weights:.1f} GiB of weights"


def _beside_generators(config: RunConfig) -> set[str]:
    """The roles that share GPUs with generators."""

    def owner(role: str) -> str:
        lender = config.hosts.of(role).share_with
        return role if lender is None else owner(lender)

    absent = {"generator"}
    if not config.uses_reference:
        absent.add("reference")
    if config.critic is None:
        absent.add("critic")
    return {role for role in COMPUTING if role not in absent and owner(role) == owner("generator")}
