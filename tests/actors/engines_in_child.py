"""vLLM's engines in a child process, and what tests have it do with them.

The key-value cache is small, and prompts span several of its blocks, so that preemption and prefix caching happen.
"""

import atexit
import gc
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from random_model import native_tensors

from goaly.generate.request import Sample, Sampling
from goaly.generate.scheduling_counter import SchedulingCounts
from goaly.generate.settings import NEUTRAL, GeneratorSettings
from goaly.models.settings import ModelSettings

PROMPTS = [[(7 * i + 3 * j) % 30 + 2 for j in range(70 + i)] for i in range(6)]
NO_ARGS: Mapping[str, Any] = {}
GREEDY = Sampling(max_tokens=40, temperature=0.0)


@dataclass(slots=True)
class Engines:
    """The child process's engines, and the weights of two folders under torchtitan's names."""

    torchtitan: Any
    native: Any
    settings: GeneratorSettings
    weights: list[dict[str, torch.Tensor]]
    bfloat16: Any = None

    def load(self, which: int, version: int) -> int:
        """What a subscriber's `apply` does."""
        live = self.torchtitan.named_tensors()
        assert live.keys() == self.weights[which].keys()
        for name, tensor in live.items():
            tensor.copy_(self.weights[which][name])
        return version

    def load_scaled(self, version: int) -> int:
        """The same with weights whose logits are those of folder 0, multiplied by `scale_of` the version."""
        self.load(0, version)
        self.torchtitan.named_tensors()["lm_head.weight"].mul_(scale_of(version))
        return version


def scale_of(version: Any) -> Any:
    """What the logits of this version are multiplied by; another number for 16 versions in turn."""
    return 1 + version % 16 / 8


engines: Engines


@contextmanager
def in_child(start: Callable[..., None], folders: list[Path]) -> Iterator[Callable[..., Any]]:
    """Call functions of a test's module in a child process, in which `start(folders)` has been called."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context, initializer=start, initargs=(folders,)) as child:

        def run(function: Callable[..., Any], *arguments: Any) -> Any:
            return child.submit(function, *arguments).result(timeout=150)

        yield run


def start_engines(folders: list[Path], **changes: Any) -> None:
    """Start them; `changes` are settings of the one with torchtitan's definition."""
    global engines
    from goaly.generate.vllm_engine import VllmEngine
    from goaly.models.definition import model_spec

    settings = GeneratorSettings(max_running=32, max_context=512, kv_cache_gib=0.005, max_step_tokens=512, **changes)
    model = ModelSettings(path=str(folders[0]))
    engines = Engines(
        torchtitan=VllmEngine(settings, model),
        native=VllmEngine(GeneratorSettings(engine="native", max_running=8, max_context=512, kv_cache_gib=0.01), model),
        settings=settings,
        weights=[native_tensors(model_spec(folder), folder) for folder in folders],
    )


def steps(engine: Any, count: int | None = None) -> dict[str, Sample]:
    """The samples that ended within `count` steps, or until nothing is under way."""
    ended: dict[str, Sample] = {}
    while engine.running and count != 0:
        ended |= dict(engine.step())
        count = None if count is None else count - 1
    return ended


def sample_all(which: str, prompts: list[list[int]], *samplings: Sampling) -> list[Sample]:
    """A sample of each prompt, each by its own sampling if there are several."""
    engine = getattr(engines, which)
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, samplings[number % len(samplings)])
    samples = steps(engine)
    return [samples[str(number)] for number in range(len(prompts))]


@contextmanager
def short_steps(engine: Any, tokens: int) -> Iterator[Any]:
    """Let steps compute at most so many tokens, from an empty prefix cache on; the engine's counter."""
    scheduler = engine._scheduler
    budget = scheduler.max_num_scheduled_tokens
    assert engine._vllm.reset_prefix_cache()
    scheduler.max_num_scheduled_tokens = tokens
    try:
        yield engine.counter()
    finally:
        scheduler.max_num_scheduled_tokens = budget


def sample_in_short_steps(
    tokens: int, prompts: list[list[int]], *samplings: Sampling
) -> tuple[SchedulingCounts, list[Sample]]:
    """A sample of each prompt, in steps of so many tokens, and what vLLM's scheduler did."""
    with short_steps(engines.torchtitan, tokens) as counter:
        samples = sample_all("torchtitan", prompts, *samplings)
    return counter.counts, samples


@contextmanager
def updates_in(mode: str) -> Iterator[Any]:
    """The engine under version 4, with the weights of folder 0, which new weights come to in this mode."""
    engine = engines.torchtitan
    engine._settings = replace(engines.settings, on_update=mode)
    engine.apply(partial(engines.load, 0, 4))
    yield engine
    engine._settings = engines.settings
    engine.apply(partial(engines.load, 0, 0))


def update_while_sampling(mode: str, **changes: Any) -> tuple[list[Sample], list[Sample]]:
    """Samples over which the weights of folder 1 came as version 5 after some steps, and samples begun after that."""
    sampling = replace(Sampling(max_tokens=40), **changes)
    with updates_in(mode) as engine:
        for number, prompt in enumerate(PROMPTS):
            engine.add(str(number), prompt, sampling)
        wait(engine._grammars._compiling)  # or some of the steps would be over when an answer begins
        samples = steps(engine, None if mode == "drain" else 20)
        assert engine.apply(partial(engines.load, 1, 5)) == 5
        for number, prompt in enumerate(PROMPTS):
            engine.add(f"later {number}", prompt, sampling)
        samples |= steps(engine)
    names = [str(number) for number in range(len(PROMPTS))]
    return [samples[name] for name in names], [samples[f"later {name}"] for name in names]


def update_in_the_middle_of_prompts(mode: str) -> tuple[list[str], list[str], dict[str, Sample]]:
    """Samples of the prompts, over which the weights of folder 1 came as version 5. Before them, the names of those of
    whose prompts a part was computed by then, and of those that had not begun."""
    with updates_in(mode) as engine, short_steps(engine, 100):
        for number, prompt in enumerate(PROMPTS):
            engine.add(str(number), prompt, Sampling(max_tokens=20, seed=number))
        samples = steps(engine, 3)
        begun = [one for one in engine._scheduler.running if one.num_computed_tokens < one.num_prompt_tokens]
        in_part, not_begun = (
            [engine._requests[one.request_id].name for one in several] for several in (begun, engine._scheduler.waiting)
        )
        engine.apply(partial(engines.load, 1, 5))
        samples |= steps(engine)
    return in_part, not_begun, samples


def next_turns_after_an_update(mode: str) -> tuple[list[int], dict[str, Sample]]:
    """A conversation that began under version 4, and what version 5 says next: in a turn of it, in one that waits
    while the weights come, and in a conversation that begins with the same tokens."""
    with updates_in(mode) as engine:
        engine.add("first", PROMPTS[0], GREEDY)
        said = [*PROMPTS[0], *steps(engine)["first"].tokens.tolist()]
        if mode != "drain":
            engine.add("waited", said, GREEDY, begun_at=4)
        engine.apply(partial(engines.load, 1, 5))
        engine.add("next", said, GREEDY, begun_at=4)
        engine.add("new", said, GREEDY)
        ended = steps(engine)
    return said, ended


def stream_over_an_update() -> tuple[Sample, list[Any], set[str]]:
    """A sample over which new weights came, its parts, and the requests that had parts."""
    ended, parts = {}, []
    with updates_in("recompute") as engine:
        engine.add("streamed", PROMPTS[0], Sampling(max_tokens=20, seed=1), streams=True)
        engine.add("beside it", PROMPTS[1], Sampling(max_tokens=30))
        while engine.running:
            ended |= dict(engine.step())
            parts += engine.parts()
            if len(parts) == 10:
                engine.apply(partial(engines.load, 1, 5))
    return ended["streamed"], [part for _, part in parts], {name for name, _ in parts}


def sample_rest(begun: list[int], sampling: Sampling) -> Sample:
    """The rest of an answer that another replica began."""
    engine = engines.torchtitan
    engine.add("rest", PROMPTS[0] + begun, sampling, written=len(begun))
    return steps(engine)["rest"]


def update_at_steps(mode: str, steps_between: Sequence[int] = (1,)) -> list[Sample]:
    """Samples, begun one after the other, during which weights of `load_scaled` came after so many steps in turn; in
    mode `drain`, whenever nothing was under way."""
    to_begin = list(enumerate(PROMPTS))
    samples: dict[str, Sample] = {}
    with updates_in(mode) as engine:
        engine.apply(partial(engines.load_scaled, 1))
        for count in islice(cycle(steps_between), 100):
            for number, prompt in to_begin[:2]:
                engine.add(str(number), prompt, Sampling(max_tokens=10 + 3 * number, seed=number))
            del to_begin[:2]
            samples |= steps(engine, None if mode == "drain" else count)
            engine.apply(partial(engines.load_scaled, engine.version + 1))
            if not engine.running and not to_begin:
                break
        else:
            raise AssertionError(f"after 100 updates {engine.running} requests are still running")
    return [samples[str(number)] for number in range(len(PROMPTS))]


def parameters_of(sampling: Sampling) -> dict[str, Any]:
    """What vLLM is asked for."""
    engine = engines.torchtitan
    inputs, asked = engine._vllm.input_processor, []
    process = inputs.process_inputs
    inputs.process_inputs = lambda name, prompt, parameters, **rest: (
        asked.append(parameters) or process(name, prompt, parameters, **rest)
    )
    engine.add("one", PROMPTS[0], sampling)
    inputs.process_inputs = process
    engine.cancel(["one"])
    keys = [*NEUTRAL, "max_tokens", "stop_token_ids", "seed", "ignore_eos"]
    return {key: getattr(asked[0], key) for key in keys}


def refusal_of(sampling: Sampling, folder: Path | None = None) -> str:
    """Why the engine refuses such a request; `folder` is where it looks for a tokenizer."""
    engine = engines.torchtitan
    whole, engine._model_folder = engine._model_folder, folder or engine._model_folder
    try:
        engine.add("one", PROMPTS[0], sampling)
    except ValueError as error:
        return str(error)
    finally:
        engine._model_folder = whole
    return "not refused"


def cancel_midway() -> tuple[list[tuple[str, Sample]], list[str], bool]:
    engine = engines.torchtitan
    for name in ("a", "b", "c"):
        engine.add(name, PROMPTS[0], Sampling(max_tokens=100))
    steps(engine, 10)
    cancelled = engine.cancel(["a", "c", "unknown"])
    rest = steps(engine)
    return cancelled, list(rest), bool(engine.running)


def count_preemptions(requests: int, *samplings: Sampling) -> tuple[int, list[Sample]]:
    counter = engines.torchtitan.counter()
    samples = sample_all("torchtitan", [PROMPTS[n % 6] for n in range(requests)], *samplings)
    return counter.counts.preemptions, samples


@contextmanager
def grammars_of(folder: Path, parser: str | None = None, args: Mapping[str, Any] = NO_ARGS) -> Iterator[None]:
    """Grammars of this folder's tokenizer, after the reasoning that this parser finds with these arguments."""
    from goaly.generate.grammars import Grammars
    from goaly.prompts.settings import ChatSettings

    chat = ChatSettings(reasoning_parser=parser, template_args=dict(args))

    engine = engines.torchtitan
    manager = engine._core.engine_core.structured_output_manager
    whole, engine._grammars = engine._grammars, Grammars(engine._core, folder, chat)
    kept = {name: getattr(manager, name, None) for name in ("backend", "reasoner_cls", "tokenizer")}
    manager.backend = None
    try:
        yield
    finally:
        engine._grammars = whole
        vars(manager).update(kept)


def refusal_by_grammars_of(folder: Path, sampling: Sampling, reasoning_parser: str | None = None) -> str:
    """Why the engine refuses such a request with such a tokenizer."""
    with grammars_of(folder, reasoning_parser):
        return refusal_of(sampling)


def sample_after_reasoning(
    folder: Path, prompts: list[list[int]], sampling: Sampling, parser: str = "qwen3", args: Mapping[str, Any] = NO_ARGS
) -> list[Sample]:
    """A sample of each prompt, where a form begins after reasoning."""
    with grammars_of(folder, parser, args):
        return sample_all("torchtitan", prompts, sampling)


def refuse_twice_the_same_name() -> str:
    engine = engines.torchtitan
    engine.add("same", [3, 4], GREEDY)
    try:
        engine.add("same", [3, 4], GREEDY)
    except ValueError as error:
        return str(error)
    finally:
        steps(engine)
    return "not refused"


def sampled_in_another_thread(folder: Path, threads: int) -> tuple[list[int], list[int]]:
    """A greedy answer of an engine of so many threads, which one thread has built and this one steps, and with how many
    each of them computes."""
    from goaly.generate.vllm_engine import VllmEngine

    settings = GeneratorSettings(max_running=8, max_context=512, kv_cache_gib=0.005, threads=threads)
    with ThreadPoolExecutor(1) as builder:
        engine = builder.submit(VllmEngine, settings, ModelSettings(path=str(folder))).result()
        counts = [builder.submit(torch.get_num_threads).result()]
    engine.enter_thread()
    counts.append(torch.get_num_threads())
    engine.add("one", PROMPTS[0], GREEDY)
    sample = steps(engine)["one"]
    engine.close()
    return sample.tokens.tolist(), counts


def frozen_around_the_end(folder: Path) -> list[int]:
    """How many objects the collector leaves alone beside an engine, after the handlers of this process's exit, and
    after the engine is closed."""
    from goaly.generate.vllm_engine import VllmEngine

    engine = VllmEngine(
        GeneratorSettings(max_running=8, max_context=512, kv_cache_gib=0.005), ModelSettings(path=str(folder))
    )
    counts = [gc.get_freeze_count()]
    atexit._run_exitfuncs()
    counts.append(gc.get_freeze_count())
    engine.close()
    return [*counts, gc.get_freeze_count()]


def native_updates() -> str:
    try:
        engines.native.named_tensors()
    except ValueError as error:
        return str(error)
    return "not refused"


def native_with(which: int) -> list[Sample]:
    """Samples of vLLM's own model, which another folder's weights were put in, as a subscriber puts them."""
    from goaly.weights.dtensor_layout import layout_of
    from goaly.weights.fetched_weights import FetchedWeights
    from goaly.weights.layout import region, view
    from goaly.weights.reshard_plan import plan

    engine, published = engines.native, engines.weights[which]
    destination = FetchedWeights(engine.named_tensors(), engine.live_tensors(), engine.naming())
    destination.allocate(published)
    targets, layout = destination.targets(), layout_of(published)
    for copy in plan([layout], destination.layout):
        source = region(view(published, layout[copy.source_shard]), copy.source_offset, copy.shape)
        region(targets[copy.shard], copy.offset, copy.shape).copy_(source)

    def fill() -> int:
        destination.apply()
        return 3

    engine.apply(fill)
    return sample_all("native", PROMPTS, GREEDY)
