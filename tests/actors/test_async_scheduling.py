"""An engine that launches a step before it reads the one before, with vLLM's own scheduler and model runner.

A child process holds it, and one that schedules step by step. `test_generator_engine.py` runs its tests with it, too.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from random_model import VOCABULARY, write_random_model

from goaly.generate.request import Finish, Sample, Sampling
from goaly.generate.settings import GeneratorSettings
from goaly.models.settings import ModelSettings
from goaly.run.rendezvous import lasting_port
from tests.actors import engines_in_child
from tests.actors.async_on_cpu import start_async_engines
from tests.actors.engine_in_ranks import become_rank
from tests.actors.engines_in_child import (
    GREEDY,
    PROMPTS,
    in_child,
    sample_all,
    scale_of,
    steps,
    update_at_steps,
)
from tests.actors.expected import NOISE
from tests.actors.own_choices import OwnChoices

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]


def launched() -> int:
    """How many steps the engine has launched and not read."""
    return len(engines_in_child.engines.torchtitan._core.engine_core.batch_queue)


def launched_after_steps() -> list[int]:
    """How many steps are launched and not read: after one step, after an update, and once nothing is under way."""
    engine, load = engines_in_child.engines.torchtitan, engines_in_child.engines.load
    engine.add("one", PROMPTS[0], GREEDY)
    counts = [engine.step() == [] and launched()]
    engine.apply(partial(load, 0, 0))
    counts.append(launched())
    steps(engine)
    counts.append(launched())
    engine.apply(partial(load, 0, 0))
    return [*counts, launched()]


def end_in_an_update() -> tuple[int, int, list[str], list[tuple[str, Sample]]]:
    """Requests of which one ends in a step that only an update reads: how many are running after it, and with one
    more, the names that a cancel of all finds, and what the next step returns."""
    engine, load = engines_in_child.engines.torchtitan, engines_in_child.engines.load
    engine.add("ends", PROMPTS[0], replace(GREEDY, max_tokens=1))
    assert engine.step() == []
    engine.apply(partial(load, 0, 0))
    alone = engine.running
    engine.add("goes on", PROMPTS[0], GREEDY)
    both = engine.running
    cancelled = [name for name, _ in engine.cancel(["ends", "goes on"])]
    return alone, both, cancelled, engine.step()


def vllms_own_stamp() -> tuple[str, Sample]:
    """The version that vLLM gives to a token that was launched under version 1 and read under version 2, and the
    token."""
    engine, load_scaled = engines_in_child.engines.torchtitan, engines_in_child.engines.load_scaled
    for version in (1, 2):
        load_scaled(version)
        engine._model().weights_changed()
        engine._vllm.set_weight_version(str(version))
        if version == 1:
            engine.add("one", PROMPTS[0], GREEDY)
            assert not engine._core.get_output().outputs
    outputs = engine._core.get_output()
    (output,) = outputs.outputs
    engine.cancel(["one"])
    engine.apply(partial(engines_in_child.engines.load, 0, 0))
    logprobs = output.new_logprobs.logprobs[:, 0].tolist()
    return outputs.weight_version, Sample.of(output.new_token_ids, logprobs, [1], Finish.CANCELLED)


def sample_with_experts(folder: Path, requests: int) -> tuple[int, list[Sample]]:
    """How many preemptions there were before an update with the same weights, and samples that end by a stop string, by
    a cancel and by length."""
    from goaly.generate.vllm_engine import VllmEngine

    engine = VllmEngine(engines_in_child.engines.settings, ModelSettings(path=str(folder)), records_choices=True)
    counter = engine.counter()
    for number in range(requests):
        stop = ["ab", "c", "1"] if number % 8 == 0 else None
        sampling = Sampling(max_tokens=150 + number, seed=number, stop=stop)
        engine.add(str(number), PROMPTS[number % len(PROMPTS)], sampling)
    ended = steps(engine, 120)
    cancelled = engine.cancel(["1", "2"])
    count = counter.counts.preemptions
    engine.apply(lambda: 1)
    ended |= steps(engine) | dict(cancelled)
    assert not engine._recorder._recorded
    return count, [ended[str(number)] for number in range(requests)]


def in_each_rank(rank: int, port: int, folder: Path, out: Path) -> None:
    """Sample while an update comes after one step and after two in turn, and write the samples to a file."""
    become_rank(rank, 2, port)
    from goaly.generate.vllm_engine import VllmEngine
    from goaly.weights.dtensor_layout import local
    from tests.actors.async_on_cpu import allow_async_scheduling

    allow_async_scheduling()
    settings = GeneratorSettings(tp=2, max_running=8, max_context=128, kv_cache_gib=0.01, async_scheduling=True)
    engine = VllmEngine(settings, ModelSettings(path=str(folder)))
    head = local(engine.named_tensors()["lm_head.weight"])
    as_loaded = head.clone()

    def fill() -> int:
        head.copy_(as_loaded * scale_of(engine.version + 1))
        return engine.version + 1

    for number, prompt in enumerate(PROMPTS):
        stop = ["b", "1"] if number % 2 else None
        engine.add(str(number), prompt, Sampling(max_tokens=20, seed=number, stop=stop))
    ended: dict[str, Sample] = {}
    while engine.running:
        ended |= steps(engine, 1 + engine.version % 2)
        engine.apply(fill)
    torch.save([ended[str(number)] for number in range(len(PROMPTS))], out / str(rank))


@pytest.fixture(scope="module")
def there(folders):
    """Runs one of this module's functions where the engines are."""
    with in_child(start_async_engines, folders) as run:
        yield run


def test_a_step_is_launched_before_the_one_before_is_read_and_an_update_reads_all(there):
    assert there(launched_after_steps) == [1, 0, 1, 0]


@pytest.mark.parametrize("mode", ["recompute", "keep", "drain"])
def test_every_token_has_the_version_that_drew_it(there, expected, mode):  # generate-3, generate-5
    samples = there(update_at_steps, mode, (1, 2, 3))
    expected.check_each_stamp(samples)
    assert [len(sample.tokens) for sample in samples] == [10, 13, 16, 19, 22, 25]


def test_vllm_stamps_a_token_with_the_version_that_it_is_read_under(there, expected):
    """The reason that an update first reads every launched step. Did vLLM stamp it with the version that it was
    launched under, the stamp would be true without."""
    stamp, sample = there(vllms_own_stamp)
    assert stamp == "2"
    expected.check_each_stamp([sample])  # as version 1


def test_parameters_of_requests_have_the_effect_that_they_have_step_by_step(there):
    whole = there(sample_all, "native", PROMPTS[:1], GREEDY)[0].tokens.tolist()
    stop = "".join(VOCABULARY[token] for token in whole[10:12])
    asked = [
        Sampling(max_tokens=40, seed=3),
        Sampling(max_tokens=40, seed=4, frequency_penalty=1.5, repetition_penalty=1.3),
        Sampling(max_tokens=40, seed=5, stop_token_ids=tuple(whole[7:9])),
        Sampling(max_tokens=40, seed=6, min_tokens=20, stop_token_ids=(5, 6, 7)),
        replace(GREEDY, stop=[stop]),
        Sampling(max_tokens=1, seed=7),
    ]
    prompts = PROMPTS[:1] * len(asked)
    samples, step_by_step = (there(sample_all, which, prompts, *asked) for which in ("torchtitan", "native"))
    assert samples[4].stop == stop
    assert {sample.finish for sample in samples} == {Finish.STOP, Finish.LENGTH}
    for one, other in zip(samples, step_by_step, strict=True):
        assert (one.tokens.tolist(), one.finish, one.stop) == (other.tokens.tolist(), other.finish, other.stop)
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=NOISE, rtol=0)
        assert len(one.versions) == len(one.tokens)


def test_a_sample_that_an_update_has_read_is_returned_by_the_next_step_once(there):
    alone, both, cancelled, ended = there(end_in_an_update)
    assert (alone, both, cancelled) == (1, 2, ["goes on"])
    ((name, sample),) = ended
    assert (name, len(sample.tokens), sample.finish) == ("ends", 1, Finish.LENGTH)


def test_choices_of_experts_are_those_of_the_tokens_that_were_read(there, tmp_path):  # generate-7
    folder = write_random_model(tmp_path, experts=8)
    preempted, samples = there(sample_with_experts, folder, 32)
    assert preempted > 0
    assert {sample.finish for sample in samples} == {Finish.STOP, Finish.LENGTH, Finish.CANCELLED}
    own = OwnChoices(folder)
    for number, sample in enumerate(samples):
        own.assert_recorded(PROMPTS[number % len(PROMPTS)], sample)


def test_ranks_of_a_replica_read_the_same_steps_before_an_update(folders, expected, tmp_path):  # generate-3
    arguments = (lasting_port(), folders[0], tmp_path)
    torch.multiprocessing.start_processes(in_each_rank, arguments, nprocs=2, start_method="forkserver")
    samples, others = (torch.load(tmp_path / str(rank), weights_only=False) for rank in range(2))
    expected.check_each_stamp(samples)
    assert {sample.finish for sample in samples} == {Finish.STOP, Finish.LENGTH}
    for one, other in zip(samples, others, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.versions, other.versions)
