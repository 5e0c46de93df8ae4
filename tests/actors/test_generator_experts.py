"""vLLM's engine over a model with experts, on one rank and on two, against plain transformers."""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from random_model import (
    angles,
    native_tensors,
    write_random_deepseek,
    write_random_dots,
    write_random_gpt_oss,
    write_random_model,
)

from goaly.generate.request import Sample
from goaly.generate.settings import GeneratorSettings
from goaly.models.families import architecture, read_config
from goaly.models.settings import ModelSettings
from goaly.plan.generator_memory import replica_memory
from goaly.run.rendezvous import lasting_port
from tests.actors.engine_in_ranks import become_rank, load, sampled
from tests.actors.expected import NOISE, Expected
from tests.actors.own_choices import OwnChoices

pytestmark = pytest.mark.timeout(180)

LAYOUTS: dict[str, dict[str, int]] = {
    "alone": {},
    "tp": {"tp": 2},
    "ep": {"tp": 2, "ep": 2},
    "tied": {"tp": 2},
    "latent": {},
    "latent, tp": {"tp": 2},
    "latent, ep": {"tp": 2, "ep": 2},
    "shared, tp": {"tp": 2},
    "shared, ep": {"tp": 2, "ep": 2},
    "sinks, tp": {"tp": 2},
    "sinks, ep": {"tp": 2, "ep": 2},
}
PROMPTS = [[(7 * i + 3 * j) % 30 + 2 for j in range(20 + i)] for i in range(6)]


def in_each_process(rank: int, port: int, folders: list[Path], degrees: dict[str, int], out: Path) -> None:
    """Sample with the weights of the first folder, and with those of the second."""
    become_rank(rank, degrees.get("tp", 1), port)
    from goaly.generate.vllm_engine import VllmEngine
    from goaly.models.definition import model_spec
    from goaly.weights.dtensor_layout import local

    settings = GeneratorSettings(max_running=16, max_context=128, kv_cache_gib=0.01, max_step_tokens=32, **degrees)
    engine = VllmEngine(settings, ModelSettings(path=str(folders[0])), records_choices=True)
    counter = engine.counter()
    before = sampled(engine, PROMPTS, max_tokens=30)
    assert counter.counts.prompts_in_parts > 2
    load(engine, native_tensors(model_spec(folders[1]), folders[1]))
    after = sampled(engine, PROMPTS, max_tokens=30)
    shapes = {name: tuple(local(tensor).shape) for name, tensor in engine.named_tensors().items()}
    bytes_held = sum(local(tensor).nbytes for tensor in engine.named_tensors().values())
    torch.save((before, after, shapes, angles(engine._model().model), bytes_held), f"{out}.{rank}")


@pytest.fixture
def folders(tmp_path: Path, layout: str) -> list[Path]:
    """Two models of eight experts."""
    if "latent" in layout:
        rank = None if layout == "latent, tp" else 48  # None: queries have no latent vector
        return [write_random_deepseek(tmp_path / f"latent{seed}", seed=seed, q_lora_rank=rank) for seed in range(2)]
    if "shared" in layout:
        return [write_random_dots(tmp_path / f"shared{seed}", seed=seed) for seed in range(2)]
    if "sinks" in layout:
        return [write_random_gpt_oss(tmp_path / f"sinks{seed}", seed=seed) for seed in range(2)]
    tied = layout == "tied"
    return [
        write_random_model(tmp_path / f"experts{seed}", seed=seed, experts=8, tie_word_embeddings=tied)
        for seed in range(2)
    ]


def tokens(samples: list[Sample]) -> list[torch.Tensor]:
    return [one.tokens for one in samples]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replica_samples_from_the_model_that_transformers_has_before_and_after_an_update(
    folders: list[Path], tmp_path: Path, layout: str
) -> None:
    degrees = LAYOUTS[layout]
    ranks = degrees.get("tp", 1)
    arguments = (lasting_port(), folders, degrees, tmp_path / "sampled")
    torch.multiprocessing.start_processes(in_each_process, arguments, nprocs=ranks, start_method="forkserver")
    found = [torch.load(f"{tmp_path / 'sampled'}.{rank}", weights_only=False) for rank in range(ranks)]
    transformers = Expected(folders)
    for which in range(2):
        own = OwnChoices(folders[which])
        for prompt, one in zip(PROMPTS, found[0][which], strict=True):
            torch.testing.assert_close(one.logprobs, transformers.logprobs(prompt, one, which), atol=NOISE, rtol=0)
            own.assert_recorded(prompt, one)  # generate-7
        for of_rank in found:
            assert of_rank[3] == 1  # three layers have one table
            assert all(map(torch.equal, tokens(of_rank[which]), tokens(found[0][which])))
    planned = replica_memory(
        architecture(read_config(folders[0])), ModelSettings(path=str(folders[0])), GeneratorSettings(**degrees), None
    )
    for which, memory in planned.items():
        assert all(memory.updated == found[rank][4] for rank in which)
    name, rows = ("mlp1_weight_EGD", 128) if "sinks" in layout else ("w1_EFD", 64)
    shape = found[0][2][f"layers.1.moe.routed_experts.inner_experts.{name}"]
    assert shape == ((4, rows, 96) if "ep" in degrees else (8, rows // ranks, 96))
