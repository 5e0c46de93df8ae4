"""What goaly relies on in vLLM's engine, and what a change there would mean for `generate/`."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from goaly.generate.request import Sampling
from goaly.generate.settings import CPU_HEAD_DIMS, GeneratorSettings
from goaly.models.settings import ModelSettings

PROMPT = [(3 * j) % 30 + 2 for j in range(70)]

pytestmark = pytest.mark.timeout(150)

engine: Any


def start_engine(folder: Path) -> None:
    global engine
    from goaly.generate.vllm_engine import VllmEngine

    settings = GeneratorSettings(engine="native", max_running=8, max_context=256, kv_cache_gib=0.01)
    engine = VllmEngine(settings, ModelSettings(path=str(folder)))


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


def core_outputs() -> list[tuple[list[int], list[int], float, str]]:
    """Step by step: the token, the token that its log-probability is of, that, and why the request ended."""
    engine.add("one", PROMPT, Sampling(max_tokens=3, temperature=0.0))
    outputs = [engine._core.get_output().outputs[0] for _ in range(3)]
    engine._forget(engine._names["one"])
    return [
        (
            output.new_token_ids,
            output.new_logprobs.logprob_token_ids[:, 0].tolist(),
            float(output.new_logprobs.logprobs[0, 0]),
            str(output.finish_reason),
        )
        for output in outputs
    ]


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


def logprobs_of_all_tokens(beside: dict[str, Any] | None = None, **parameters: Any) -> tuple[int, dict[int, float]]:
    """The token drawn after the prompt, and the log-probabilities that it was drawn with; `beside` is another request
    of the same step."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    vllm = engine._vllm
    for name, asked in (("one", parameters), ("beside", beside)):
        if asked is not None:
            vllm.add_request(name, tokens_input(PROMPT), SamplingParams(max_tokens=1, logprobs=20, **asked))
    (output,) = [output.outputs[0] for output in vllm.step() if output.request_id == "one"]
    return output.token_ids[0], {token: entry.logprob for token, entry in output.logprobs[0].items()}


def all_logprobs() -> dict[str, tuple[int, dict[int, float]]]:
    """The same step under several parameters."""
    greedy, stops = {"temperature": 0.0}, {"stop_token_ids": [3, 4, 5], "seed": 1}
    return {
        "greedy": logprobs_of_all_tokens(**greedy),
        "greedy, top_p": logprobs_of_all_tokens(**greedy, top_p=0.1, top_k=2, min_p=0.5),
        "greedy beside": logprobs_of_all_tokens({"temperature": 0.5, "seed": 2}, **greedy),
        "greedy, bias": logprobs_of_all_tokens(**greedy, logit_bias={7: 3.0}),
        "1.0": logprobs_of_all_tokens(temperature=1.0, seed=1),
        "0.5": logprobs_of_all_tokens(temperature=0.5, seed=1),
        "stops": logprobs_of_all_tokens(temperature=1.0, **stops),
        "min_tokens": logprobs_of_all_tokens(temperature=1.0, **stops, min_tokens=1),
    }


@pytest.fixture(scope="module")
def there(tiny_model_folder):
    context = multiprocessing.get_context("forkserver")
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


def test_the_core_says_in_each_step_what_it_sampled_with_which_log_probability(there):
    """`VllmEngine.step` makes samples of these, past vLLM's front end."""
    outputs = there(core_outputs)
    assert all(len(tokens) == 1 and tokens == of for tokens, of, _, _ in outputs)
    assert all(-10 < logprob < 0 for _, _, logprob, _ in outputs)
    assert [why for _, _, _, why in outputs] == ["None", "None", "length"]


def test_greedy_log_probabilities_are_those_of_the_distribution_at_temperature_1(there):
    """As `Sample.logprobs` says. Were they those of the greedy choice, they would be 0, and a trained run could not
    tell a greedy sample by the config alone."""
    measured = there(all_logprobs)
    _, at_1 = measured["1.0"]
    likeliest = max(at_1, key=at_1.__getitem__)
    for case in ("greedy", "greedy, top_p", "greedy beside"):
        token, logprobs = measured[case]
        assert token == likeliest
        assert logprobs == pytest.approx(at_1, abs=1e-5)
    assert measured["0.5"][1][likeliest] > at_1[likeliest] + 0.01
    assert measured["greedy, bias"][1] != pytest.approx(at_1, abs=0.01)  # a bias counts, before the temperature


def test_min_tokens_takes_the_stop_tokens_out_of_the_distribution(there):
    """The reason that `min_tokens` is refused where answers are trained: were stop tokens only passed over, it could be
    allowed."""
    measured = there(all_logprobs)
    (_, without), (_, masked) = measured["stops"], measured["min_tokens"]
    assert {3, 4, 5} & without.keys()
    assert not any(masked.get(token, float("-inf")) > float("-inf") for token in (3, 4, 5))
    assert all(masked[token] > logprob for token, logprob in without.items() if token in masked and token > 5)


def test_cpu_generators_have_no_offset():
    """vLLM takes back the draw of a seeded, partly prefilled request by its generator's offset. Were there one on CPU,
    `cpu_sampling` could leave vLLM's draws alone."""
    with pytest.raises(RuntimeError, match="offset"):
        torch.Generator(device="cpu").get_offset()


def test_vllm_serves_these_head_dimensions_on_cpu() -> None:
    """`CPU_HEAD_DIMS` refuses others before a run starts; a change here is to be taken over there."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == CPU_HEAD_DIMS
