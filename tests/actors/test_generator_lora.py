"""vLLM's engine over a model with adapters, on one rank and on two, against plain transformers with merged weights."""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from random_model import write_random_model

from goaly.generate.settings import GeneratorSettings
from goaly.models.settings import LoraSettings, ModelSettings
from goaly.run.rendezvous import lasting_port
from tests.actors.engine_in_ranks import become_rank, load, sampled
from tests.actors.expected import NOISE, Expected

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

LAYOUTS: dict[str, dict[str, int]] = {
    "dense": {},
    "dense, tp": {"tp": 2},
    "experts": {},
    "experts, tp": {"tp": 2},
    "experts, ep": {"tp": 2, "ep": 2},
}
PROMPTS = [[(7 * i + 3 * j) % 30 + 2 for j in range(20 + i)] for i in range(4)]
LORA = LoraSettings(rank=8, alpha=24.0, save="merged")


def in_each_process(rank: int, port: int, folder: Path, degrees: dict[str, int], adapters: Path, out: Path) -> None:
    """Sample with the folder's weights, and with the adapters beside them."""
    become_rank(rank, degrees.get("tp", 1), port)
    from goaly.base.errors import WeightsError
    from goaly.generate.vllm_engine import VllmEngine
    from goaly.models.lora import BASE

    settings = GeneratorSettings(max_running=8, max_context=64, kv_cache_gib=0.01, max_step_tokens=64, **degrees)
    engine = VllmEngine(settings, ModelSettings(path=str(folder)), lora=LORA)
    before = sampled(engine, PROMPTS, max_tokens=20)
    live, weights = engine.named_tensors(), torch.load(adapters)
    assert live.keys() == weights.keys() == engine.live_tensors().keys()  # models-3
    load(engine, weights)
    torch.save((before, sampled(engine, PROMPTS, max_tokens=20)), f"{out}.{rank}")
    live[BASE].add_(1)
    with pytest.raises(WeightsError, match="the adapters were trained beside weights with digest"):  # models-5
        engine.apply(lambda: 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_of_adapters_gives_the_log_probs_of_the_merged_model(tmp_path: Path, layout: str) -> None:  # models-4
    from goaly.models.lora import B, draw_adapters
    from goaly.train.settings import TrainerSettings
    from goaly.train.train_engine import TrainEngine

    folder = write_random_model(tmp_path / "base", experts=4 if "experts" in layout else 0)
    trainer = TrainEngine(ModelSettings(path=str(folder)), TrainerSettings(lora=LORA))
    tensors = trainer.named_tensors()
    draw_adapters(tensors, seed=2, which=B)
    torch.save(dict(tensors), tmp_path / "adapters")
    trainer.save_hf(tmp_path / "merged")

    degrees = LAYOUTS[layout]
    ranks = degrees.get("tp", 1)
    arguments = (lasting_port(), folder, degrees, tmp_path / "adapters", tmp_path / "sampled")
    torch.multiprocessing.start_processes(in_each_process, arguments, nprocs=ranks, start_method="forkserver")
    found = [torch.load(f"{tmp_path / 'sampled'}.{rank}", weights_only=False) for rank in range(ranks)]
    transformers = Expected([folder, tmp_path / "merged"])
    for which, samples in enumerate(found[0]):
        for number, (prompt, one) in enumerate(zip(PROMPTS, samples, strict=True)):
            torch.testing.assert_close(one.logprobs, transformers.logprobs(prompt, one, which), atol=NOISE, rtol=0)
            assert all(torch.equal(of_rank[which][number].tokens, one.tokens) for of_rank in found)
    assert any(not torch.equal(one.tokens, two.tokens) for one, two in zip(*found[0], strict=True))
