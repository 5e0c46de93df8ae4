"""The trainer recomputes the sampler's log-probs to the last bit; a child process holds both engines."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from random_model import native_tensors, write_random_llama, write_random_model

from goaly.generate.settings import GeneratorSettings
from goaly.models.families import architecture, read_config
from goaly.models.settings import ModelSettings
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.parity import (
    SHARED,
    Recomputer,
    Sampler,
    compared,
    mixed_requests,
    recompute_in_ranks,
    rows_of,
    sample_in_ranks,
    sampled,
)
from goaly.parity_search import with_cache_of
from goaly.train.settings import TrainerSettings
from goaly.trajectory import EXPERT_CHOICES

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

VOCABULARY = 32
REQUESTS = 40
LONGEST = 200
"""The most tokens of a sequence."""
CACHED = 800
"""Tokens that the cache holds: fewer than those of the requests that run, so some are preempted."""
PACKINGS = [(LONGEST, 1), (350, 2), (1024, 4)]
"""Row lengths, and rows of a microbatch."""


def limits(model: ModelSettings, step_tokens: int, **ranks: int) -> GeneratorSettings:
    """Those of every generator, with such steps."""
    settings = GeneratorSettings(max_running=24, max_context=LONGEST, max_step_tokens=step_tokens, **ranks)
    return with_cache_of(model, settings, CACHED)


class Both:
    """Trainer and sampler of one model."""

    def __init__(
        self, folder: Path, *, threads: int = 1, temperature: float = 1.0, step_tokens: int = 4096, **model: str
    ):
        from goaly.generate.vllm_engine import VllmEngine

        torch.set_num_threads(threads)  # later vLLM does not let us
        settings = ModelSettings(path=str(folder), **{"numerics": "bitwise"} | model)
        self.temperature = temperature
        self.model = settings
        experts = architecture(read_config(folder)).experts
        self.generator = VllmEngine(limits(settings, step_tokens), settings, records_choices=experts > 0)
        self.counter = self.generator.counter()

    def asked(self, seed: int = 0) -> list[Any]:
        return mixed_requests(REQUESTS, vocabulary=VOCABULARY, longest=LONGEST, temperature=self.temperature, seed=seed)

    def trainer(self, **settings: Any) -> Any:
        from goaly.train.train_engine import TrainEngine

        return TrainEngine(self.model, TrainerSettings(temperature=self.temperature, **settings))

    def differing(self, sequences: list[Any]) -> list[int]:
        """The tokens that differ on each packing, without gradients and with."""
        found, trainer = [], self.trainer()
        for row_length, microbatch_rows in PACKINGS:
            trainer.settings = replace(trainer.settings, microbatch_rows=microbatch_rows)
            rows = rows_of(sequences, row_length)
            found.append(compared(rows, trainer.logprobs(rows)).differing)
            found.append(in_training(trainer, rows, microbatch_rows))
        return found


def in_training(trainer: Any, rows: Any, microbatch_rows: int) -> int:
    """The tokens that differ in a pass that is differentiated."""
    from goaly.losses.objective import Contribution

    differing = []

    def objective(logprobs_P: torch.Tensor, entropies_P: torch.Tensor, columns: Any, version: int) -> Contribution:
        differing.append(int((logprobs_P != columns["sampler_logprobs"]).sum()))
        return Contribution(total=-logprobs_P.sum())

    trainer.forward_backward(rows.split(microbatch_rows), objective, 1000)
    return sum(differing)


def one_model(folder: Path, options: dict[str, Any]) -> tuple[list[int], int, int, int]:
    both = Both(folder, **options)
    sequences = sampled(both.generator, both.asked())
    tokens = sum(int(one["trained"].sum()) for one in sequences)
    counts = both.counter.counts
    return both.differing(sequences), tokens, counts.preemptions, counts.prompts_in_parts


def in_steps(folder: Path, dtype: str, step_tokens: Sequence[int]) -> tuple[list[list[Any]], list[int]]:
    """The sequences of engines with such steps, and how many prompts each computed in parts."""
    engines = [Both(folder, dtype=dtype, step_tokens=tokens) for tokens in step_tokens]
    sequences = [sampled(one.generator, one.asked()) for one in engines]
    return sequences, [one.counter.counts.prompts_in_parts for one in engines]


def over_an_update(folder: Path, other: Path, dtype: str, replays: bool, step_tokens: int) -> tuple[list[int], int]:
    """The tokens of each version that differ, of answers over which the weights of another folder came as version 1,
    and how many prompts were computed in parts."""
    from goaly.models.definition import model_spec

    both = Both(folder, dtype=dtype, step_tokens=step_tokens)
    generator, weights = both.generator, native_tensors(model_spec(other), other)

    def fill() -> int:
        for name, tensor in generator.named_tensors().items():
            tensor.copy_(weights[name])
        return 1

    asked, step = both.asked(), generator.step
    steps = 0

    def step_and_update() -> Any:
        nonlocal steps
        steps += 1
        if steps == 20:
            assert generator.running > REQUESTS // 3
            generator.apply(fill)
        return step()

    generator.step = step_and_update
    sequences = sampled(generator, asked)
    versions = {int(version) for one in sequences for version in one["sampler_versions"].unique()}
    assert versions == {-1, 0, 1}
    found = []
    for version, path in enumerate((folder, other)):
        both.model = replace(both.model, path=str(path))
        of_version = [one.clone() if replays else one.clone().exclude(EXPERT_CHOICES) for one in sequences]
        for one in of_version:
            one["trained"] &= one["sampler_versions"] == version
        found += both.differing(of_version)
    return found, both.counter.counts.prompts_in_parts


@pytest.fixture
def there():
    """Runs a function in a process of its own."""
    context = multiprocessing.get_context("forkserver")

    def run(function: Any, *arguments: Any) -> Any:
        with ProcessPoolExecutor(1, mp_context=context) as child:
            return child.submit(function, *arguments).result(timeout=280)

    return run


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ({}, {"step_tokens": 32}),
        ({"tied": True}, {"dtype": "bfloat16", "temperature": 0.6, "step_tokens": 32}),
        ({"hidden_dim": 250, "kv_heads": 4, "head_dim": 64}, {"temperature": 0.7}),
        ({}, {"threads": 2, "step_tokens": 48}),
        ({"experts": 6, "experts_per_token": 3, "hidden_dim": 64}, {"step_tokens": 32}),
    ],
    ids=["float32-in-parts", "bfloat16-tied-in-parts", "odd-width", "two-threads", "replayed-experts"],
)
def test_the_trainer_recomputes_the_samplers_bits(  # numerics-1 numerics-3 numerics-6 train-10
    there: Any, tmp_path: Path, size: dict[str, Any], options: dict[str, Any]
):
    write_tiny_model(tmp_path, TinyModel(layers=2, **size))
    differing, tokens, preempted, in_parts = there(one_model, tmp_path, options)
    assert differing == [0] * 2 * len(PACKINGS)
    assert tokens > 1000
    assert preempted > 0
    assert (in_parts > 5) == ("step_tokens" in options)


def test_prompts_that_are_computed_in_parts_change_no_bit_of_what_is_sampled(there: Any, tmp_path: Path):  # generate-7
    write_tiny_model(tmp_path, TinyModel(layers=2, experts=6, experts_per_token=3, hidden_dim=64))
    (whole, *others), (none, *in_parts) = there(in_steps, tmp_path, "bfloat16", (4096, 25))
    assert none == 0
    assert min(in_parts) > 5
    for other in others:
        for one, same in zip(whole, other, strict=True):
            assert all(column.equal(same[name]) for name, column in one.items())


@pytest.fixture
def sample(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file of what a generator samples, over an update of the weights. It must have had prefixes in its cache,
    and must have preempted requests and computed prompts in parts."""

    def sample(model: ModelSettings, **ranks: int) -> Path:
        file = tmp_path / "sequences"
        asked = mixed_requests(REQUESTS, vocabulary=VOCABULARY, longest=LONGEST)
        generator = limits(model, 48, **ranks)
        counts = sample_in_ranks(Sampler(model=model, generator=generator, asked=asked, updates=True), file)
        assert counts.prefix_hits > REQUESTS // SHARED
        assert counts.preemptions > 0
        assert counts.prompts_in_parts > 0
        versions = [one["sampler_versions"].unique().tolist() for one in torch.load(file)]
        assert [-1, 0, 1] in versions
        return file

    return sample


def test_ranks_that_divide_the_model_recompute_its_bits(
    tmp_path: Path, sample: Callable[..., Path]
):  # numerics-2, numerics-6
    model = ModelSettings(path=str(write_random_llama(tmp_path / "model")), dtype="bfloat16", numerics="bitwise")
    file = sample(model, tp=2)
    for degrees in ({"fsdp": 2}, {"tp": 2}):  # `bench.parity` has all combinations
        recomputer = Recomputer(model=model, trainer=TrainerSettings(**degrees), sequences=file, packings=PACKINGS[1:])
        (found,) = recompute_in_ranks([recomputer])
        assert [one.differing for one in found] == [0] * 2
        assert found[0].tokens > 1000


def test_ranks_that_exchange_tokens_recompute_the_bits_of_ranks_that_have_all_and_some_experts(  # numerics-8
    tmp_path: Path, sample: Callable[..., Path]
):
    size = TinyModel(layers=2, experts=6, experts_per_token=3, hidden_dim=64)
    model = ModelSettings(path=str(write_tiny_model(tmp_path / "model", size)), dtype="bfloat16", numerics="bitwise")
    file = sample(model, tp=2, ep=2)
    trainer = TrainerSettings(ep=2, fsdp=2)
    (found,) = recompute_in_ranks([Recomputer(model=model, trainer=trainer, sequences=file, packings=PACKINGS[1:])])
    assert [one.differing for one in found] == [0] * 2
    assert found[0].tokens > 1000


def test_fast_numerics_do_not(there: Any, tmp_path: Path):
    write_tiny_model(tmp_path, TinyModel(layers=2))
    differing, tokens, *_ = there(one_model, tmp_path, {"numerics": "fast"})
    assert min(differing) > tokens / 10


WITH_EXPERTS = partial(write_random_model, experts=8)


@pytest.mark.parametrize(
    ("write", "dtype", "replays", "step_tokens"),
    [(write_random_model, "float32", False, 32), (WITH_EXPERTS, "bfloat16", True, 4096)],
    ids=["dense-in-parts", "replayed-experts"],
)
def test_an_update_in_the_middle_of_answers_leaves_the_bits_of_each_versions_tokens_but_for_replayed_experts(
    there: Any, tmp_path: Path, write: Callable[..., Path], dtype: str, replays: bool, step_tokens: int
):
    """The sampler computes what is before the update again, with other experts than it recorded."""
    folders = [write(tmp_path / str(seed), seed=seed) for seed in range(2)]
    differing, in_parts = there(over_an_update, *folders, dtype, replays, step_tokens)
    before, after = torch.tensor(differing).chunk(2)
    assert (in_parts > 5) == (step_tokens == 32)
    assert before.tolist() == [0] * 2 * len(PACKINGS)
    assert bool((after > 0).all()) if replays else after.tolist() == before.tolist()
