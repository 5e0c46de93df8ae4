"""The experts that vLLM's engine records for each token are those that the trainer's own pass chooses.

A child process holds the engines. Their cache is small, and prompts span several of its blocks, so that preemption and
prefix caching happen.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_model import VOCABULARY, native_tensors, write_random_deepseek, write_random_model

from goaly.generate.request import Finish, Sampling
from goaly.generate.settings import GeneratorSettings
from goaly.models.settings import ModelSettings
from goaly.trajectory import EXPERT_CHOICES
from tests.actors import engines_in_child
from tests.actors.engines_in_child import (
    PROMPTS,
    Engines,
    cancel_midway,
    count_preemptions,
    in_child,
    sample_all,
    sample_in_short_steps,
    update_in_the_middle_of_prompts,
    update_while_sampling,
)
from tests.actors.own_choices import OwnChoices, as_row

pytestmark = pytest.mark.timeout(240)

LONG = Sampling(max_tokens=60)
MANY = [Sampling(max_tokens=150, seed=number) for number in range(32)]


def start_recording_engines(folders: list[Path]) -> None:
    from goaly.generate.vllm_engine import VllmEngine
    from goaly.models.definition import model_spec

    settings = GeneratorSettings(max_running=32, max_context=512, kv_cache_gib=0.005, max_step_tokens=512)
    models = (ModelSettings(path=str(folders[0]), dtype=dtype) for dtype in ("float32", "bfloat16"))
    float32, bfloat16 = (VllmEngine(settings, model, records_choices=True) for model in models)
    weights = [native_tensors(model_spec(folder), folder) for folder in folders]
    engines_in_child.engines = Engines(float32, None, settings, weights, bfloat16)


def recorded() -> list[str]:
    """The requests that the engine records choices of."""
    return list(engines_in_child.engines.torchtitan._recorder._recorded)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [write_random_model(tmp_path_factory.mktemp(f"experts{seed}"), seed=seed, experts=8) for seed in range(2)]


@pytest.fixture(scope="module")
def there(folders: list[Path]) -> Iterator[Callable[..., Any]]:
    """Runs one of this module's functions where the engines are."""
    with in_child(start_recording_engines, folders) as run:
        yield run


@pytest.fixture(scope="module")
def own(folders: list[Path]) -> list[OwnChoices]:
    return [OwnChoices(folder) for folder in folders]


def test_choices_are_the_trainers_own_also_after_preemption_and_prefix_reuse(
    there: Any, own: list[OwnChoices]
) -> None:  # generate-7
    preemptions, samples = there(count_preemptions, len(MANY), *MANY)
    assert preemptions > 3
    for number, one in enumerate(samples):
        own[0].assert_recorded(PROMPTS[number % len(PROMPTS)], one)


def test_choices_of_prompts_that_are_computed_in_parts_are_the_trainers_own(there: Any, own: list[OwnChoices]) -> None:
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(MANY))]
    counts, samples = there(sample_in_short_steps, 40, prompts, *MANY)
    assert counts.prompts_in_parts >= len(PROMPTS)
    assert counts.preemptions > 3
    for number, one in enumerate(samples):
        own[0].assert_recorded(PROMPTS[number % len(PROMPTS)], one)


def test_parts_of_prompts_that_an_update_computes_again_have_the_choices_of_its_version(  # generate-7
    there: Any, own: list[OwnChoices]
) -> None:
    in_part, _, samples = there(update_in_the_middle_of_prompts, "recompute")
    assert in_part
    for name in in_part:
        assert samples[name].versions.unique().tolist() == [5]
        own[1].assert_recorded(PROMPTS[int(name)], samples[name])


def test_tokens_computed_again_under_new_weights_keep_the_choices_that_they_were_sampled_with(  # generate-7
    there: Any, own: list[OwnChoices]
) -> None:
    samples, later = there(update_while_sampling, "recompute")
    for prompt, one in zip(PROMPTS, samples, strict=True):
        assert one.versions.unique().tolist() == [4, 5]
        first = len(prompt) - 1 + int((one.versions == 4).sum())
        own[0].assert_recorded(prompt, one, last=first)
        own[1].assert_recorded(prompt, one, first=first)
    for prompt, one in zip(PROMPTS, later, strict=True):
        own[1].assert_recorded(prompt, one)


@pytest.mark.parametrize("mode", ["keep", "drain"])
def test_choices_are_those_of_the_version_that_computed_a_token(
    there: Any, own: list[OwnChoices], mode: str
) -> None:  # generate-7
    samples, later = there(update_while_sampling, mode)
    for prompt, one in zip(PROMPTS, samples, strict=True):
        own[0].assert_recorded(prompt, one, last=len(prompt) - 1 + int((one.versions == 4).sum()))
    for prompt, one in zip(PROMPTS, later, strict=True):
        own[1].assert_recorded(prompt, one)


def test_answers_that_a_stop_string_or_a_cancel_ended_have_their_choices(there: Any, own: list[OwnChoices]) -> None:
    (whole,) = there(sample_all, "torchtitan", PROMPTS[:1], replace(LONG, seed=0))
    stop = "".join(VOCABULARY[token] for token in whole.tokens[10:12].tolist())
    (stopped,) = there(sample_all, "torchtitan", PROMPTS[:1], replace(LONG, seed=0, stop=[stop]))
    assert stopped.finish is Finish.STOP
    own[0].assert_recorded(PROMPTS[0], stopped)
    cancelled, *_ = there(cancel_midway)
    for _, one in cancelled:
        own[0].assert_recorded(PROMPTS[0], one)
    assert there(recorded) == []


def test_in_bfloat16_some_choices_differ_and_replay_brings_the_log_probs_together(
    there: Any, folders: list[Path]
) -> None:  # train-3
    from goaly.losses.objective import PolicyObjective
    from goaly.losses.settings import LossSettings
    from goaly.train.settings import OptimizerSettings, TrainerSettings
    from goaly.train.train_engine import TrainEngine
    from goaly.trajectory import EXPERT_CHOICES, PackedRows

    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(24)]
    samples = there(sample_all, "bfloat16", prompts, *(replace(LONG, seed=number) for number in range(24)))
    sequences = []
    for number, one in enumerate(samples):
        prompt = prompts[number]
        unsampled, length = torch.zeros(len(prompt)), len(prompt) + len(one.tokens)
        trained = torch.arange(length) >= len(prompt)
        sequences.append(
            {
                "tokens": torch.cat([torch.tensor(prompt), one.tokens]),
                "trained": trained,
                "sampler_logprobs": torch.cat([unsampled, one.logprobs]),
                "sampler_versions": torch.where(trained, 0, -1).int(),
                "advantages": trained.float(),
                EXPERT_CHOICES: torch.cat([one.choices, one.choices[-1:]]),
            }
        )
    rows, found = as_row(sequences), {}
    tiny = TrainerSettings(optimizer=OptimizerSettings(lr=1e-9))
    try:
        for routing in ("own", "replay"):
            engine = TrainEngine(ModelSettings(path=str(folders[0]), dtype="bfloat16"), tiny)
            given = rows if routing == "replay" else rows.exclude(EXPERT_CHOICES)
            trained = given["trained"]
            error = (engine.logprobs(given) - given["sampler_logprobs"])[trained].abs().max().item()
            batch = PackedRows(rows=given, batch_trained_tokens=int(trained.sum()), batch_sequences=len(sequences))
            found[routing] = error, engine.train_step(batch, PolicyObjective(LossSettings()))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    (unlike, before), (replayed, after) = found["own"], found["replay"]
    assert 0.001 < after["experts/rerouted"] < 0.05
    assert unlike > 0.2
    assert replayed < 0.1
    assert after["sampler_kl"] < before["sampler_kl"] / 2


def test_choices_replace_those_of_a_router_with_biases_and_groups(tmp_path: Path) -> None:  # train-3
    own = OwnChoices(write_random_deepseek(tmp_path))
    tokens = torch.arange(60) * 7 % 30 + 2
    sequence = {"tokens": tokens, "trained": torch.arange(60) > 0}
    choices = own.of(tokens.tolist())
    recorded = {EXPERT_CHOICES: torch.cat([choices, torch.zeros_like(choices[:1])]).to(torch.uint8)}
    before = own.logprobs(sequence)
    own.change_biases()
    assert (own.logprobs(sequence) - before).abs().max() > 0.1
    torch.testing.assert_close(own.logprobs(sequence | recorded), before, atol=1e-5, rtol=0)
