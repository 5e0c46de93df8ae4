"""Names, shapes and placements on paper are those of a real torchtitan model on a process group without peers."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from goaly.models.architecture import Architecture
from goaly.models.catalog import MODELS
from goaly.models.device import prepare_torchtitan
from goaly.models.families.qwen3 import Qwen3
from goaly.plan.parallelism import Parallelism
from goaly.weights.dtensor_layout import shards_of

prepare_torchtitan()

SIZES = {"layers": 8, "dim": 256, "heads": 16, "kv_heads": 8, "head_dim": 128, "vocab_size": 2048, "max_context": 4096}
DENSE = Qwen3(**SIZES, hidden_dim=3072, tied=True)
MOE = Qwen3(**SIZES, hidden_dim=768, experts=64)


def meta_model(flavor: str, family: str = "qwen3") -> tuple[Any, Any]:
    from torchtitan.models import llama3, qwen3

    spec = {"qwen3": qwen3, "llama3": llama3}[family].model_registry(flavor, attn_backend="varlen")
    with torch.device("meta"):
        return spec, spec.model.build()


def shapes_of(decoder: Architecture) -> dict[str, tuple[int, ...]]:
    return {parameter.name: parameter.shape for parameter in decoder.parameters()}


@pytest.mark.parametrize(
    ("family", "flavor", "decoder"),
    [
        ("qwen3", "debugmodel", DENSE),
        ("qwen3", "debugmodel_moe", MOE),
        ("qwen3", "8B", MODELS["qwen3-8b"]),
        ("qwen3", "32B", MODELS["qwen3-32b"]),
        ("qwen3", "30B-A3B", MODELS["qwen3-30b-a3b"]),
        ("qwen3", "235B-A22B", MODELS["qwen3-235b-a22b"]),
        ("llama3", "70B", MODELS["llama3-70b"]),
    ],
)
def test_names_and_shapes_are_torchtitans(family: str, flavor: str, decoder: Architecture) -> None:
    _, model = meta_model(flavor, family)
    assert shapes_of(decoder) == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@contextmanager
def fake_world(rank: int, ranks: int) -> Iterator[None]:
    """A process group in which collectives do nothing and this process has any rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def parallelized(flavor: str, parallelism: Parallelism) -> Any:
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend

    config = ParallelismConfig(
        data_parallel_replicate_degree=parallelism.replicas,
        data_parallel_shard_degree=parallelism.fsdp,
        tensor_parallel_degree=parallelism.tp,
        expert_parallel_degree=parallelism.ep,
        spmd_backend="partial_dtensor",
    )
    set_spmd_backend(config.spmd_backend)
    dims = ParallelDims.from_config(config, parallelism.ranks)
    dims.build_mesh()
    spec, _ = meta_model(flavor)

    class Titan:
        parallelism = config

    spec.model.update_from_config(config=Titan())
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(),
        parallelism=config,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    if model.enable_weight_tying:
        model.tok_embeddings.weight = model.lm_head.weight  # tensor parallelism parts them until `init_states`
    return model


@pytest.mark.parametrize(
    ("flavor", "decoder", "parallelism", "rank"),
    [
        ("debugmodel", DENSE, Parallelism(fsdp=3), 2),
        ("debugmodel", DENSE, Parallelism(replicas=2, fsdp=2, tp=2), 5),
        ("debugmodel_moe", MOE, Parallelism(fsdp=8, ep=4), 6),
        ("debugmodel_moe", MOE, Parallelism(replicas=2, fsdp=4, tp=2, ep=4), 13),
        ("debugmodel_moe", MOE, Parallelism(fsdp=4, tp=2), 3),
        ("debugmodel_moe", MOE, Parallelism(fsdp=128, ep=8), 77),
        ("debugmodel_moe", MOE, Parallelism(fsdp=64, tp=2, ep=2), 100),
        ("debugmodel_moe", MOE, Parallelism(replicas=2, fsdp=64), 100),
    ],
    ids=[
        "fsdp",
        "hsdp and tp",
        "ep",
        "hsdp, tp and ep",
        "tp within experts",
        "fsdp within experts",
        "tp ranks, too",
        "replicas, too",
    ],
)
def test_a_rank_holds_what_torchtitan_puts_there(flavor, decoder, parallelism, rank) -> None:
    with fake_world(rank, parallelism.ranks):
        tensors = dict(parallelized(flavor, parallelism).named_parameters())
    held: dict[str, int] = {name: 0 for name in tensors}
    for shard in parallelism.layout(decoder.parameters(), rank, torch.float32):
        held[shard.name] += shard.elements
    assert held == {name: tensor.to_local().numel() for name, tensor in tensors.items()}
    for parameter in decoder.parameters():
        mesh, placements = parallelism.placed(parameter)
        on_axes = [(n, on) for n, on in zip(mesh, placements, strict=True) if n > 1]
        tensor = tensors[parameter.name]
        torchs = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        assert on_axes == [(n, on) for n, on in torchs if n > 1], parameter.name


@pytest.mark.parametrize(("rows", "fsdp", "tp"), [(7, 3, 2), (5, 2, 2), (8, 2, 2)])
def test_uneven_rows_under_fsdp_and_tp_are_where_fully_shard_leaves_them(rows: int, fsdp: int, tp: int) -> None:
    for rank in range(fsdp * tp):
        with fake_world(rank, fsdp * tp):
            mesh = init_device_mesh("cpu", (fsdp, tp), mesh_dim_names=("fsdp", "tp"))
            model = torch.nn.Sequential(torch.nn.Linear(1, rows, bias=False))
            model[0].weight.data = torch.arange(float(rows))[:, None]
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()}, src_data_rank=None)
            fully_shard(model, mesh=mesh["fsdp"])
            weight = model[0].weight
        held = shards_of("w", weight.dtype, (rows, 1), (fsdp, tp), (rank // tp, rank % tp), weight.placements)
        rows_held = [row for shard in held for row in range(shard.offset[0], shard.offset[0] + shard.shape[0])]
        assert weight.to_local().flatten().tolist() == rows_held


def test_a_generators_ranks_hold_whole_experts_or_slices_of_each() -> None:
    experts = next(parameter for parameter in MOE.parameters() if parameter.name.endswith("w2_EDF"))
    (by_expert,) = Parallelism(tp=4, ep=4).layout([experts], 1, torch.bfloat16)
    (by_slice,) = Parallelism(tp=4).layout([experts], 1, torch.bfloat16)
    assert (by_expert.offset, by_expert.shape) == ((16, 0, 0), (16, 256, 768))
    assert (by_slice.offset, by_slice.shape) == ((0, 0, 192), (64, 256, 192))


@pytest.mark.parametrize("parallelism", [Parallelism(replicas=2, fsdp=2, tp=2), Parallelism(fsdp=4, tp=2, ep=4)])
def test_all_ranks_together_hold_each_element_in_every_replica(parallelism: Parallelism) -> None:
    held = dict.fromkeys(shapes_of(MOE), 0)
    for rank in range(parallelism.ranks):
        for shard in parallelism.layout(MOE.parameters(), rank, torch.float32):
            held[shard.name] += shard.elements
    for parameter in MOE.parameters():
        mesh, placements = parallelism.placed(parameter)
        copies = prod(n for n, placement in zip(mesh, placements, strict=True) if placement == Replicate())
        assert held[parameter.name] == copies * parameter.elements


@pytest.mark.parametrize(
    ("parallelism", "said"),
    [
        (Parallelism(fsdp=0), "--trainer fsdp=0: must be at least 1"),
        (Parallelism(fsdp=4, ep=3), "--trainer ep=3: must divide fsdp * tp, 4"),
        (Parallelism(tp=4, ep=2), "--trainer ep=2: must be 1 or tp=4 where fsdp is 1"),
        (Parallelism(fsdp=128, ep=128), "--trainer ep=128: must divide the 64 experts"),
        (Parallelism(tp=3), "--trainer tp=3: must divide 2048, a size of the model"),
    ],
)
def test_axes_that_do_not_fit_the_model_are_named(parallelism: Parallelism, said: str) -> None:
    assert said in parallelism.problems("--trainer ", MOE.parameters())


def test_experts_on_a_model_without_any_are_named() -> None:
    assert Parallelism(fsdp=2, ep=2).problems("", DENSE.parameters()) == ["ep=2: must be 1, the model has no experts"]


def test_a_plain_shard_is_not_strided_over_tensor_parallelism_on_another_dim() -> None:
    wo = next(parameter for parameter in DENSE.parameters() if parameter.name.endswith("wo.weight"))
    assert Parallelism(fsdp=2, tp=2).placed(wo)[1] == (Replicate(), Shard(0), Shard(1))
