"""What goaly relies on in vLLM's engine, and what a change there would mean for `generate/`."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from goaly.generate.request import Sampling
from goaly.generate.settings import GeneratorSettings
from goaly.models.settings import ModelSettings

PROMPT = [(3 * j) % 30 + 2 for j in range(70)]

pytestmark = pytest.mark.timeout(150)

engine: Any


def start_engine(folder: Path) -> None:
    global engine
    from goaly.generate.engine import Engine

    settings = GeneratorSettings(engine="native", max_running=8, max_context=256, kv_cache_gib=0.01)
    engine = Engine(settings, ModelSettings(path=str(folder)))


def shapes_of_linear_weights() -> set[tuple[int, ...]]:
    parameters = engine._model().named_parameters()
    return {tuple(tensor.shape) for name, tensor in parameters if name.endswith("_proj.weight")}


def reset_with_a_request_under_way() -> tuple[bool, bool]:
    vllm = engine._vllm
    engine.add("one", PROMPT, Sampling(max_tokens=20))
    engine.step()
    refused = vllm.reset_prefix_cache()
    done = vllm.reset_prefix_cache(reset_running_requests=True)
    engine.cancel(["one"])
    return refused, done


def stamps() -> list[tuple[str, int, int]]:
    """The version spans of a request whose label changed after 4 of 10 tokens."""
    vllm = engine._vllm
    engine.add("one", PROMPT, Sampling(max_tokens=10))
    vllm.set_weight_version("8")
    for _ in range(4):
        vllm.step()
    vllm.set_weight_version("9")
    outputs = []
    while not outputs:
        outputs = vllm.step()
    engine._forget(engine._names["one"])
    vllm.set_weight_version("0")
    return [(span.version, span.start, span.end) for span in outputs[0].outputs[0].weight_versions]


def cached_prompt_tokens() -> list[int]:
    """Of the same prompt under salts a, a, b: how many tokens came from the cache."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    vllm, cached = engine._vllm, []
    vllm.reset_prefix_cache()
    for number, salt in enumerate("aab"):
        vllm.add_request(str(number), tokens_input(PROMPT, cache_salt=salt), SamplingParams(max_tokens=1))
        cached.append(vllm.step()[0].num_cached_tokens)
    return cached


@pytest.fixture(scope="module")
def there(tiny_model_folder):
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=start_engine, initargs=(tiny_model_folder,)) as child:

        def run(function: Callable[..., Any]) -> Any:
            return child.submit(function).result(timeout=140)

        yield run


def test_native_linears_are_prepacked_on_cpu(there):
    """Were they not, engine="native" could take weight updates in place on CPU."""
    assert there(shapes_of_linear_weights) == {(0,)}


def test_the_prefix_cache_is_only_reset_when_nothing_runs_or_by_preempting_what_runs(there):
    """The reason that `keep` salts the cache by version instead of resetting it."""
    assert there(reset_with_a_request_under_way) == (False, True)


def test_a_salt_separates_cached_prefixes(there):
    first, again, other = there(cached_prompt_tokens)
    assert (first, again > 0, other) == (0, True, 0)


def test_tokens_are_stamped_with_the_label_set_before_their_step(there):
    """EN-1 rests on it: a sample's versions are these spans."""
    assert there(stamps) == [("8", 0, 4), ("9", 4, 10)]


def test_cpu_generators_have_no_offset():
    """vLLM takes back the draw of a seeded, partly prefilled request by its generator's offset. Were there one on CPU,
    `Engine` could allow chunked prefill there."""
    with pytest.raises(RuntimeError, match="offset"):
        torch.Generator(device="cpu").get_offset()
