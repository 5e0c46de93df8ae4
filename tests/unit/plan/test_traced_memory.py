"""A training pass is traced without memory, and what its ranks hold is what torchtitan's layout says."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from goaly.models.architecture import Architecture
from goaly.models.catalog import MODELS
from goaly.models.families import architecture
from goaly.models.settings import LoraSettings
from goaly.models.tiny_model import TinyModel, model_config
from goaly.plan.fake_ranks import as_fake_rank, most_process_bytes
from goaly.plan.live_bytes import LiveBytes, held_bytes
from goaly.plan.parallelism import Parallelism
from goaly.plan.pass_memory import PassMemory, trace
from goaly.train.settings import TrainerSettings

pytestmark = pytest.mark.slow

DENSE = architecture(model_config(TinyModel(dim=64, layers=3, hidden_dim=128)))
TIED = architecture(model_config(TinyModel(dim=64, layers=3, hidden_dim=128, tied=True)))
SINKS = architecture(
    {
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
    }
)
LATENT = architecture(
    {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
    }
)
EXPERTS = architecture(model_config(TinyModel(dim=64, layers=3, hidden_dim=32, experts=8)))


def traced(shape: Architecture, settings: TrainerSettings, *documents: int, **how: Any) -> PassMemory:
    """The memory of ranks that are all alike, in bfloat16."""
    (found,) = trace(shape, "bfloat16", settings, documents, **{"on_gpu": True, **how}).values()
    return found


def test_bytes_count_while_a_tensor_lives_and_a_view_counts_once():
    known = torch.zeros(64)
    with LiveBytes([known]) as live:
        one = known + 1
        view = one[:4]
        assert live.now == 256
        del one
        assert live.now == 256
        del view
        two = torch.zeros(32, dtype=torch.bfloat16)
        two.untyped_storage().resize_(0)
        assert (live.now, live.peak) == (0, 256)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        (DENSE, (2, 2, 1)),
        (TIED, (2, 2, 1)),
        (EXPERTS, (1, 2, 1)),
        (EXPERTS, (4, 1, 2)),
        (EXPERTS, (2, 2, 4)),
        (SINKS, (2, 2, 1)),
        (SINKS, (2, 2, 4)),
        (LATENT, (2, 2, 4)),
    ],
    ids=str,
)
def test_a_rank_holds_what_the_layout_says(shape: Architecture, axes: tuple[int, int, int]):
    fsdp, tp, ep = axes
    found = traced(shape, TrainerSettings(fsdp=fsdp, tp=tp, ep=ep), 128)
    layout = Parallelism(fsdp=fsdp, tp=tp, ep=ep).layout(shape.parameters(), 0, torch.float32)
    assert found.parameters == sum(shard.bytes for shard in layout)
    assert found.activations > 0 < found.logprobs


@pytest.mark.parametrize(
    ("shape", "on_gpu"), [(DENSE, False), (DENSE, True), (SINKS, True), (LATENT, False), (LATENT, True)], ids=str
)
def test_ranks_that_divide_tokens_shard_parameters_and_halve_activations(shape: Architecture, on_gpu: bool):
    alone, both = (traced(shape, TrainerSettings(**axes), 400, 112, on_gpu=on_gpu) for axes in ({"fsdp": 2}, {"cp": 2}))
    assert both.parameters == alone.parameters
    assert alone.activations / 2.5 < both.activations < alone.activations / 1.5
    assert both.logprobs < alone.logprobs / 1.5


def test_each_stage_holds_its_layers_and_the_activations_of_microbatches_that_wait():
    settings, documents = TrainerSettings(pp=3, tp=2), (400, 112)
    shape = replace(DENSE, layers=10)
    found = trace(shape, "bfloat16", settings, documents, on_gpu=True)
    alone = traced(shape, TrainerSettings(tp=2), *documents)
    assert list(found) == [(0, 1), (2, 3), (4, 5)]
    first, middle, last = found.values()
    assert first.parameters + middle.parameters + last.parameters == alone.parameters
    assert sum(one.stage_elements for one in found.values()) == shape.elements
    assert first.parameters == last.parameters - 4 * shape.dim  # the last norm
    assert (first.logprobs, middle.logprobs, last.logprobs) == (0, 0, pytest.approx(alone.logprobs, rel=0.05))
    assert last.activations < 0.75 * alone.activations
    for_each_layer = first.activations / 3, middle.activations / 4, last.activations / 3
    assert for_each_layer[0] > 1.2 * for_each_layer[1] > 1.5 * for_each_layer[2]


def test_stages_that_differ_only_in_what_waits_have_one_trace():
    shape = replace(DENSE, layers=14)
    found = trace(shape, "bfloat16", TrainerSettings(pp=4), (256,), on_gpu=True)
    _, second, third, _ = found.values()
    assert second.traced_rank == third.traced_rank == 1
    last = trace(shape, "bfloat16", TrainerSettings(pp=4), (256,), on_gpu=True, trains=False)
    assert len({one.activations for one in list(last.values())[1:3]}) == 1  # nothing waits without backward passes
    kept = second.activations - third.activations
    assert 0 < kept < third.activations


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        (DENSE, {"fsdp": 3}),
        (DENSE, {"pp": 2, "fsdp": 3}),
        (EXPERTS, {"fsdp": 6, "ep": 2}),
        (DENSE, {"fsdp": 3, "lora": LoraSettings(rank=4)}),
    ],
    ids=str,
)
def test_ranks_of_a_group_hold_what_the_traced_one_holds(shape: Architecture, axes: dict[str, Any]):
    settings = TrainerSettings(**axes)
    found = trace(shape, "bfloat16", settings, (128 * settings.tp,), on_gpu=True)
    assert sorted(rank for ranks in found for rank in ranks) == list(range(settings.ranks))
    assert len(found) > settings.pp  # sizes that do not divide evenly
    activations = {found[ranks].activations for ranks in found if ranks[0] < settings.stage_ranks}
    assert max(activations) == pytest.approx(min(activations), rel=1e-3)  # gathered parameters are the same
    for ranks, one in found.items():
        for rank in ranks:
            built = as_fake_rank(built_shards, rank, shape, settings, rank=rank, ranks=settings.ranks)
            assert one.parameters == sum(built), rank


def built_shards(rank: int, shape: Architecture, settings: TrainerSettings) -> list[int]:
    """The bytes of each parameter of this rank, as a run builds it."""
    from goaly.models.definition import spec_of
    from goaly.train.logprob_head import LOGPROBS
    from goaly.train.parallel_model import sharded_on_meta
    from goaly.train.pipeline import stage_of

    stage = stage_of(shape.layers, settings.pp, rank // settings.stage_ranks)
    model, _ = sharded_on_meta(spec_of(shape, lora=settings.lora), "bfloat16", settings, LOGPROBS, stage)
    return [held_bytes([one]) for one in model.parameters()]


def test_layers_that_are_left_out_count_as_those_that_are_run():
    extended, four, three = (
        traced(replace(EXPERTS, layers=layers), TrainerSettings(fsdp=2), 200, 56, on_gpu=False) for layers in (5, 4, 3)
    )
    assert extended.activations - four.activations == four.activations - three.activations > 0
    assert extended.logprobs == four.logprobs


def test_checkpointing_and_short_chunks_take_less():
    def activations(**settings: object) -> tuple[int, int]:
        found = traced(DENSE, TrainerSettings(**settings), 512)
        return found.activations, found.logprobs

    found = activations(logprob_chunk=512)
    assert activations(logprob_chunk=512, activation_checkpointing="full")[0] < found[0] / 2
    assert activations(logprob_chunk=128)[1] < found[1]


def test_a_pass_without_gradients_takes_less_and_trains_nothing():
    trained, frozen = (traced(DENSE, TrainerSettings(), 512, trains=trains) for trains in (True, False))
    assert (trained.parameters, frozen.parameters) == (4 * DENSE.elements, 2 * DENSE.elements)
    assert (trained.trained, frozen.trained) == (trained.parameters, 0)
    assert 0 < frozen.activations < trained.activations / 3


def test_a_critic_has_a_value_in_place_of_each_tokens_logits():
    policy, critic = (traced(DENSE, TrainerSettings(), 512, critic=critic) for critic in (False, True))
    head = 4 * DENSE.vocab_size * DENSE.dim
    assert critic.parameters == policy.parameters - head + 4 * DENSE.dim
    assert critic.activations + critic.logprobs < policy.activations + policy.logprobs


def test_the_largest_model_takes_no_memory_and_leaves_no_group():
    settings = TrainerSettings(fsdp=64, ep=8, activation_checkpointing="full")
    found = traced(MODELS["qwen3-235b-a22b"], settings, 8192)
    assert found.parameters == pytest.approx(4 * 235.09e9 / 64, rel=1e-3)
    assert 100e6 < most_process_bytes() < 2e9  # it would be 3.7e9 for each layer of a rank's parameters alone
    assert not dist.is_initialized()
