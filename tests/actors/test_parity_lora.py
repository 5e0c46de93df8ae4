"""The trainer recomputes the log-probs of a sampler with adapters to the last bit."""

from pathlib import Path

import pytest

from goaly.generate.settings import GeneratorSettings
from goaly.models.settings import LoraSettings, ModelSettings
from goaly.models.tiny import TinyModel, write_tiny_model
from goaly.parity import Recomputer, Sampler, recompute_in_ranks, sample_in_ranks
from goaly.parity_requests import mixed_requests, with_cache_of
from goaly.train.settings import TrainerSettings

pytestmark = pytest.mark.timeout(200)

LORA = LoraSettings(rank=8)
LONGEST = 200
SIZES = {"dense": TinyModel(layers=2), "experts": TinyModel(layers=2, experts=6, experts_per_token=3, hidden_dim=48)}


@pytest.mark.parametrize(
    ("model", "dtype", "replica", "trainer"),
    [
        ("dense", "float32", {}, {"tp": 2}),
        ("experts", "bfloat16", {"tp": 2, "ep": 2}, {"fsdp": 2, "ep": 2}),
    ],
    ids=["one-tp", "ep-ep"],
)
def test_adapters_have_the_same_bits_on_both_sides_over_an_update(  # LB-1
    tmp_path: Path, model: str, dtype: str, replica: dict[str, int], trainer: dict[str, int]
):
    folder = write_tiny_model(tmp_path / "model", SIZES[model])
    settings = ModelSettings(path=str(folder), dtype=dtype, numerics="bitwise")
    asked, file = mixed_requests(40, vocabulary=32, longest=LONGEST), tmp_path / "sequences"
    limits = GeneratorSettings(max_running=24, max_context=LONGEST, max_step_tokens=48, **replica)
    generator = with_cache_of(settings, limits, 4 * LONGEST)
    sampler = Sampler(model=settings, generator=generator, asked=asked, updates=True, lora=LORA)
    assert sample_in_ranks(sampler, file).preemptions > 0
    recomputer = Recomputer(
        model=settings, trainer=TrainerSettings(lora=LORA, **trainer), sequences=file, packings=[(350, 2), (1024, 4)]
    )
    (found,) = recompute_in_ranks([recomputer])
    assert [one.differing for one in found] == [0, 0]
    assert found[0].tokens > 1000
