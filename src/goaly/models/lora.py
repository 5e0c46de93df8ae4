"""Low-rank adapters (LoRA): layers with a frozen weight W, beside which a product of two thin matrices is trained.

A layer computes `x W^T + scale * (x A^T) B^T`, where the scale is alpha / rank. It never adds the product to W: in
bfloat16 most small changes of W would be rounded away. Trainer and generator build the same layers. W comes from the
model's folder in each process, and does not change, so only A and B travel.

The adapters of a weight have its name with `_lora_a` and `_lora_b` appended. The dims that a rank holds of them are
those that it holds of the weight.

Shape suffixes: R rows routed to experts, grouped by expert, E experts.

New adapters change nothing: B is 0. A depends on `trainer.lora.seed` and the weight's name, not on the ranks.

Invariants
    models-3: Of a model with adapters only these are trained, published, checkpointed and part of the digest.
    models-4: A model with adapters computes what the merged one computes, whose weights are W + scale * B A, but for
    rounding.
    models-5: Adapters are used beside the weights that they were trained beside: the digest of these is published and
    checkpointed with them, and a process that has read others from its folder raises an error.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import spmd_types
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torchtitan.models.common.attention import QKVLinear
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.sharding import ShardingConfig, SpmdLayout

from goaly.base.errors import WeightsError
from goaly.models.settings import LoraSettings
from goaly.numerics.cpu_training import lean_linear
from goaly.numerics.experts import Experts
from goaly.numerics.layer_replacement import of_kind
from goaly.weights.digest import Digest
from goaly.weights.dtensor_layout import copy_whole

A, B = "_lora_a", "_lora_b"
BASE = "base_digest"
"""The buffer of a decoder with adapters that has the digest of its frozen weights (models-5)."""


def is_adapter(name: str) -> bool:
    """Whether this is the name of an adapter."""
    return name.endswith((A, B))


def note_base(decoder: Any, weights: Mapping[str, torch.Tensor], *, alone: bool = False) -> None:
    """Let the decoder hold the digest of these frozen weights, which it has just loaded; all ranks must call it, unless
    this one holds all `alone`."""
    digest = int(Digest(weights, alone=alone).compute(), 16) - 2**63  # as an int64
    device = next(iter(weights.values())).device
    decoder.register_buffer(BASE, torch.tensor([digest], device=device), persistent=False)
    decoder._loaded_base = digest


def check_base(decoder: Any) -> None:
    """Raise unless the adapters that the decoder got belong to the weights that it has loaded (models-5)."""
    expected, found = int(decoder.get_buffer(BASE)), decoder._loaded_base
    if found != expected:
        raise WeightsError(
            f"the adapters were trained beside weights with digest {expected + 2**63:016x}, the model's folder has "
            f"{found + 2**63:016x} here: it must hold the same files on every host, and as long as the run"
        )


class LoraLinear(Linear):
    """A linear layer with adapters."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """A linear layer's, and the adapters' rank and scale."""

        rank: int
        scale: float

    def __init__(self, config: Config):
        super().__init__(config)
        _add(self, ("weight",), config.rank)
        self._scale = config.scale

    def parallelize(self, parallel_dims: Any) -> None:
        """Divide the adapters as the weight is divided."""
        self._sharding_config = _divided(self._sharding_config, ("weight",))
        super().parallelize(parallel_dims)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        weight, a, b = (getattr(self, f"weight{which}") for which in ("", A, B))
        if not isinstance(weight, DTensor):
            return self._output(input, weight, a, b)
        mesh, (placement,) = weight.device_mesh, weight.placements
        by_output = placement == Shard(0)
        assert isinstance(input, DTensor), "tensor-parallel layers exchange DTensors"
        x = input.to_local(grad_placements=[Partial() if by_output else input.placements[0]])
        out = self._output(x, *(_own_part(one) for one in (weight, a, b)))
        return DTensor.from_local(out, mesh, [Shard(out.ndim - 1) if by_output else Partial()], run_check=False)

    def _output(self, x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.add(lean_linear(x, weight), lean_linear(lean_linear(x, a), b), alpha=self._scale)


class SeparateQKV(QKVLinear):
    """Projections to queries, keys and values of which each may have adapters: torchtitan's has one config for both
    keys and values."""

    @dataclass(kw_only=True, slots=True)
    class Config(QKVLinear.Config):
        """`wkv` is the config for keys."""

        wv: Linear.Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.wv = dataclasses.replace(config.wv, sharding_config=config.wkv.sharding_config).build()


class LoraExperts(Experts):
    """Experts of which each has adapters of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(Experts.Config):
        """The experts', and the adapters' rank and scale."""

        rank: int
        scale: float

    WEIGHTS = ("w1_EFD", "w2_EDF", "w3_EFD")

    def __init__(self, config: Config):
        super().__init__(config)
        _add(self, self.WEIGHTS, config.rank)
        self._scale = config.scale

    def parallelize(self, parallel_dims: Any) -> None:
        """Divide the adapters as the weights are divided."""
        self._sharding_config = _divided(self._sharding_config, self.WEIGHTS)
        super().parallelize(parallel_dims)

    def _product(self, rows: torch.Tensor, name: str, ends_E: torch.Tensor) -> torch.Tensor:
        a, b = (_own_part(getattr(self, name + which)).transpose(-2, -1) for which in (A, B))
        thin = self._grouped_mm(A=rows, B_t=a, offs=ends_E)
        change = self._grouped_mm(A=thin, B_t=b, offs=ends_E)
        return torch.add(super()._product(rows, name, ends_E), change, alpha=self._scale)


def add_adapters(decoder: Any, lora: LoraSettings) -> None:
    """Replace the layers of these targets in the config of a torchtitan decoder without fused projections."""
    targets = set(lora.chosen)

    def linear(target: str, config: Any) -> Any:
        return _with_adapters(LoraLinear, config, ("weight",), lora) if target in targets else config

    for layer in decoder.layers:
        attention = layer.attention
        qkv = attention.qkv_linear
        attention.qkv_linear = SeparateQKV.Config(
            head_dim=qkv.head_dim,
            wq=linear("q", qkv.wq),
            wkv=linear("k", qkv.wkv),
            wv=linear("v", dataclasses.replace(qkv.wkv)),
        )
        attention.wo = linear("o", attention.wo)
        network = layer.feed_forward
        if network is not None:
            network.w1, network.w2, network.w3 = (
                linear(target, one) for target, one in (("gate", network.w1), ("down", network.w2), ("up", network.w3))
            )
        elif "experts" in targets:
            routed = layer.moe.routed_experts
            routed.inner_experts = _with_adapters(LoraExperts, routed.inner_experts, LoraExperts.WEIGHTS, lora)


def train_only_adapters(model: torch.nn.Module) -> None:
    """Freeze all other parameters of a model that is not sharded yet. Adapters become float32."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            parameter.data = parameter.data.float()


@torch.no_grad()
def draw_adapters(tensors: Mapping[str, torch.Tensor], seed: int, *, which: str = A) -> None:
    """Fill this rank's part of each A, or of `which` adapters, with numbers that depend on nothing but seed, name and
    place."""
    for name, tensor in tensors.items():
        if not name.endswith(which):
            continue
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
        bound = 1 / math.sqrt(tensor.shape[-1])
        whole = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
        whole.uniform_(-bound, bound, generator=torch.Generator().manual_seed(int.from_bytes(digest, "little")))
        copy_whole(whole, tensor)


def merged(state: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """Whole weights with their adapters added (models-4): computed in float32 or more, and rounded once."""
    found = {name: tensor for name, tensor in state.items() if not is_adapter(name)}
    for name, tensor in found.items():
        if name + A in state:
            exact = torch.promote_types(tensor.dtype, torch.float32)
            change = state[name + B].to(exact) @ state[name + A].to(exact)
            found[name] = torch.add(tensor.to(exact), change, alpha=scale).to(tensor.dtype)
    return found


def _add(module: torch.nn.Module, weights: Iterable[str], rank: int) -> None:
    for name in weights:
        weight = getattr(module, name)
        *experts, rows, columns = weight.shape
        module.register_parameter(name + A, torch.nn.Parameter(weight.new_empty(*experts, rank, columns)))
        module.register_parameter(name + B, torch.nn.Parameter(weight.new_empty(*experts, rows, rank)))


def _with_adapters(layer: Any, config: Any, weights: Iterable[str], lora: LoraSettings) -> Any:
    # The generator computes with zeros until it gets its first version; the trainer draws A.
    zeros = {name + which: torch.nn.init.zeros_ for name in weights for which in (A, B)}
    return of_kind(layer, config, rank=lora.rank, scale=lora.scale, param_init=config.param_init | zeros)


def _divided(sharding: ShardingConfig | None, weights: Iterable[str]) -> ShardingConfig | None:
    """The sharding of a layer with that of its adapters: A has the weight's columns, B its rows, both its experts."""
    if sharding is None:
        return None
    states = dict(sharding.state_shardings)
    for name in weights:
        rows, columns = (1, 2) if name in LoraExperts.WEIGHTS else (0, 1)
        states[name + A] = _without(states[name], rows)
        states[name + B] = _without(states[name], columns)
    return dataclasses.replace(sharding, state_shardings=states)


def _without(layout: SpmdLayout, dim: int) -> SpmdLayout:
    """The layout, in which no axis divides this dim."""
    axes = layout.per_axis_spmd_types()
    return SpmdLayout({axis: spmd_types.R if kind == spmd_types.S(dim) else kind for axis, kind in axes.items()})


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a layer's matrix. The gradient of what all tensor-parallel ranks have is the sum of theirs:
    each computes with its part of the rows or columns."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = [Partial() if isinstance(one, Replicate) else one for one in tensor.placements]
    return tensor.to_local(grad_placements=placements)
