"""A prompt that vLLM computes in several steps gives the same answer as in one; a child process holds the engine."""

import re

import pytest
import torch
from random_model import VOCABULARY

from goaly.generate.request import Sampling
from tests.actors.engines_in_child import PROMPTS, sample_in_short_steps, update_in_the_middle_of_prompts
from tests.actors.expected import NOISE

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]


@pytest.mark.parametrize("changes", [{}, {"top_k": 5}, {"top_p": 0.8, "min_p": 0.01}, {"frequency_penalty": 1.0}])
def test_a_seed_gives_the_same_sample_of_a_prompt_that_is_computed_in_parts(there, changes):
    seeded, other = Sampling(max_tokens=30, seed=11, **changes), Sampling(max_tokens=30)
    whole = [there(sample_in_short_steps, 256, [prompt], seeded) for prompt in PROMPTS[::2]]
    counts, samples = there(sample_in_short_steps, 40, PROMPTS, seeded, other)
    assert counts.prompts_in_parts == len(PROMPTS)
    for (none, (alone,)), beside in zip(whole, samples[::2], strict=True):
        assert none.prompts_in_parts == 0
        assert alone.tokens.tolist() == beside.tokens.tolist()
        torch.testing.assert_close(alone.logprobs, beside.logprobs, atol=NOISE, rtol=0)


def test_a_form_begins_after_a_prompt_that_is_computed_in_parts(there):
    formed = Sampling(max_tokens=60, structured_outputs={"regex": "(a[bc]){4}="}, stop_token_ids=(6,), seed=3)
    _, (alone,) = there(sample_in_short_steps, 256, PROMPTS[:1], formed)
    counts, samples = there(sample_in_short_steps, 40, PROMPTS, formed, Sampling(max_tokens=60))
    assert counts.prompts_in_parts == len(PROMPTS)
    assert alone.tokens.tolist() == samples[0].tokens.tolist()
    for sample in samples[::2]:
        assert re.fullmatch("(a[bc]){4}=", "".join(VOCABULARY[token] for token in sample.tokens[:-1].tolist()))


def test_recompute_computes_a_part_of_a_prompt_again(there, expected):
    in_part, not_begun, samples = there(update_in_the_middle_of_prompts, "recompute")
    assert in_part
    assert not_begun
    for name, sample in samples.items():
        assert len(sample.tokens) == 20  # generate-5
        assert sample.versions.unique().tolist() == ([5] if name in in_part + not_begun else [4, 5])  # generate-3
        of_versions = [expected.logprobs(PROMPTS[int(name)], sample, which) for which in range(2)]
        reference = torch.where(sample.versions == 4, *of_versions)
        torch.testing.assert_close(sample.logprobs, reference, atol=NOISE, rtol=0)  # generate-4


def test_keep_keeps_a_part_of_a_prompt_and_only_what_has_begun_has_the_old_cache(there, expected):
    in_part, not_begun, samples = there(update_in_the_middle_of_prompts, "keep")
    assert in_part
    assert not_begun
    assert all(len(sample.tokens) == 20 for sample in samples.values())  # generate-5
    for name in in_part + not_begun:
        sample, prompt = samples[name], PROMPTS[int(name)]
        assert sample.versions.unique().tolist() == [5]  # generate-3
        fresh = bool((sample.logprobs - expected.logprobs(prompt, sample, 1)).abs().max() < NOISE)
        assert fresh is (name in not_begun)  # generate-4
