"""The model of a sampler's rank, without memory: torchtitan's definition, divided over the ranks of a replica.

vLLM's model class (`vllm_model.py`) gives it memory and attention over the key-value cache; plans build it to know its
tensors. It does not import vLLM.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import spmd_types
import torch
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as torchtitan_distributed
from torchtitan.distributed.parallel_dims import MeshAxisName
from torchtitan.models.common.moe_sharding import expert_param_placement_dense

from goaly.models.definition import divide
from goaly.models.settings import Numerics

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec


def divided_on_meta(
    spec: "ModelSpec", tp: int, rank: int, *, divides_experts: bool, numerics: Numerics
) -> tuple[Any, ParallelDims | None]:
    """The part of the model on this rank of `tp`, and torchtitan's dimensions of the ranks (None: one rank has all).

    With `divides_experts` each rank has some experts of every layer, instead of a part of each expert.
    """
    config: Any = spec.model
    if tp == 1:
        with torch.device("meta"):
            return config.build(), None
    parallelism = ParallelismConfig(
        tensor_parallel_degree=tp,
        data_parallel_shard_degree=1,
        enable_sequence_parallel=False,
        spmd_backend="spmd_types",
    )
    torchtitan_distributed.set_spmd_backend("spmd_types")
    dims = ParallelDims.from_config(parallelism, world_size=tp)
    divide(config, parallelism)
    if divides_experts:
        _divide_experts(config, tp, rank, numerics)
    with torch.device("meta"):
        model = config.build()
    model.parallelize(dims)  # a family's `parallelize_fn` would add FSDP, and not all of them can leave it out
    return model, dims


def add_parts_by(model: torch.nn.Module, add: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let a divided model add the ranks' parts of an output by `add`, and drop what torchtitan does around each module
    for gradients and types: in a sampler's step it is most of the host's time."""
    for module in model.modules():
        sharding: Any = getattr(module, "_sharding_config", None)
        if sharding is None:
            continue
        of_inputs, wanted = (found or {} for found in (sharding.in_src_shardings, sharding.in_dst_shardings))
        move = [found for name in wanted if (found := _move(of_inputs.get(name), wanted[name]))]
        of_output = _move(sharding.out_src_shardings, sharding.out_dst_shardings)
        if move or of_output not in (None, (spmd_types.P, spmd_types.I)):
            raise NotImplementedError(f"{type(module).__name__}: {move or of_output} is not a sum over ranks")
        vars(module).pop("forward")
        if of_output:
            module.forward = _added(module.forward, add)
        dispatcher: Any = getattr(module, "token_dispatcher", None)
        if hasattr(dispatcher, "add"):
            dispatcher.add = add


def _move(source: Any, target: Any) -> tuple[Any, Any] | None:
    """How the ranks' parts of a tensor change between two layouts; I and R differ in their gradients only."""
    if source is None or target is None:
        return None
    found = [spmd_types.I if one is spmd_types.R else one for one in map(_placement, (source, target))]
    return None if found[0] == found[1] else (found[0], found[1])


def _placement(layout: Any) -> Any:
    return layout.per_axis_spmd_types()[MeshAxisName.TP]


def _added(compute: Callable[..., torch.Tensor], add: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        return add(compute(*args, **kwargs))

    return forward


def split_dim(model: torch.nn.Module, name: str) -> int | None:
    """The dimension along which a divided model's parameter is split over the ranks; None: each rank has all of it."""
    module, _, state = name.rpartition(".")
    sharding: Any = model.get_submodule(module)._sharding_config
    placement = _placement(sharding.state_shardings[state])
    return placement.dim if isinstance(placement, spmd_types.Shard) else None


def _divide_experts(config: Any, ranks: int, rank: int, numerics: Numerics) -> None:
    if numerics == "bitwise":
        from goaly.numerics.bitwise_experts import BitwiseOwnExpertsDispatcher as OwnExperts
    else:
        from goaly.numerics.experts import OwnExpertsDispatcher as OwnExperts
    for layer in config.layers:
        if layer.moe is None:
            continue
        experts, count = layer.moe.routed_experts, layer.moe.num_experts // ranks
        by_expert = expert_param_placement_dense(tp_placement=spmd_types.S(0))
        shardings = experts.inner_experts.sharding_config.state_shardings
        experts.inner_experts.sharding_config.state_shardings = dict.fromkeys(shardings, by_expert)
        if numerics == "bitwise":  # it adds the outputs of all ranks itself, so they are whole
            layer.moe.sharding_config.out_src_shardings = layer.moe.sharding_config.out_dst_shardings
        experts.token_dispatcher = OwnExperts.Config(
            num_experts=layer.moe.num_experts,
            top_k=layer.moe.router.top_k,
            first=rank * count,
            count=count,
        )
