"""vLLM's engine with torchtitan's definition inside, against plain transformers. A child process holds the engines."""

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from random_model import VOCABULARY, write_tiny_tokenizer

from goaly.generate.request import Finish, InvalidRequest, Sample, Sampling
from goaly.generate.settings import NEUTRAL
from goaly.generate.versioned_tokens import VersionedTokens
from tests.actors.async_on_cpu import start_async_engines
from tests.actors.engines_in_child import (
    GREEDY,
    PROMPTS,
    cancel_midway,
    count_preemptions,
    frozen_around_the_end,
    in_child,
    native_updates,
    native_with,
    next_turns_after_an_update,
    parameters_of,
    refusal_by_grammars_of,
    refusal_of,
    refuse_twice_the_same_name,
    sample_after_reasoning,
    sample_all,
    sample_rest,
    sampled_in_another_thread,
    start_engines,
    stream_over_an_update,
    update_at_steps,
    update_while_sampling,
)
from tests.actors.expected import NOISE, versions_of

pytestmark = pytest.mark.timeout(180)


def text_of(tokens: list[int]) -> str:
    """What tokens of the character tokenizer say."""
    return "".join(VOCABULARY[token] for token in tokens)


def length_with(tokens: list[int], stop: str) -> int | None:
    """How many of the tokens say this for the first time."""
    return next((count for count in range(len(tokens) + 1) if stop in text_of(tokens[:count])), None)


@pytest.fixture(scope="module", params=["step-by-step", pytest.param("async", marks=pytest.mark.slow)])
def there(request, folders):
    """Runs one of this module's functions where the engines are."""
    with in_child(start_engines if request.param == "step-by-step" else start_async_engines, folders) as run:
        yield run


def test_greedy_decoding_is_that_of_transformers(there, expected):
    samples = there(sample_all, "torchtitan", PROMPTS, GREEDY)
    assert [sample.tokens.tolist() for sample in samples] == [expected.greedy(prompt) for prompt in PROMPTS]
    assert {sample.finish for sample in samples} == {Finish.LENGTH}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_distribution_that_was_sampled(there, expected, temperature):
    samples = there(sample_all, "torchtitan", PROMPTS, Sampling(max_tokens=40, temperature=temperature))
    assert len({tuple(sample.tokens.tolist()) for sample in samples}) == len(PROMPTS)
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        reference = expected.logprobs(prompt, sample, temperature=temperature)
        torch.testing.assert_close(sample.logprobs, reference, atol=NOISE, rtol=0)


def test_top_k_logprobs_are_normalised_over_what_may_be_sampled(there):
    (sample,) = there(sample_all, "torchtitan", PROMPTS[:1], Sampling(max_tokens=20, top_k=1))
    assert sample.logprobs.tolist() == [0.0] * 20


def test_a_seed_makes_a_sample_repeatable_whatever_is_sampled_beside_it(there):
    seeded, other = Sampling(max_tokens=20, seed=11), Sampling(max_tokens=20)
    alone = there(sample_all, "torchtitan", PROMPTS[::2], seeded)
    beside = there(sample_all, "torchtitan", PROMPTS, seeded, other)
    assert [s.tokens.tolist() for s in alone] == [s.tokens.tolist() for s in beside[::2]]


def test_only_named_stop_tokens_end_an_answer_and_they_are_part_of_it(there):
    sampling = Sampling(max_tokens=200, stop_token_ids=(5, 6))
    samples = there(sample_all, "torchtitan", PROMPTS, sampling)
    for sample in samples:
        assert sample.finish is Finish.STOP
        assert int(sample.tokens[-1]) in (5, 6)
        assert not set(sample.tokens[:-1].tolist()) & {5, 6}


def test_a_streamed_answer_has_all_its_tokens_in_parts_but_those_of_the_last_step_also_over_an_update(there):
    sample, parts, streamed = there(stream_over_an_update)
    assert streamed == {"streamed"}
    whole = VersionedTokens()
    for part in parts:
        whole.extend(part)
    assert len(parts) >= 18  # with async scheduling an update reads a token, too
    assert whole.tokens == sample.tokens[:-1].tolist()
    assert torch.tensor(whole.logprobs).equal(sample.logprobs[:-1])
    assert whole.versions == sample.versions[:-1].tolist()
    assert sample.versions.unique_consecutive().tolist() == [4, 5]


def test_an_answer_that_goes_on_after_its_beginning_is_the_same_and_ends_at_the_same_stop_string(there):  # generate-12
    (whole,) = there(sample_all, "torchtitan", PROMPTS[:1], GREEDY)
    tokens = whole.tokens.tolist()
    stop = text_of(tokens[8:12])
    length = length_with(tokens, stop)
    assert length is not None
    rest = there(sample_rest, tokens[: length - 2], replace(GREEDY, stop=stop))
    assert (rest.tokens.tolist(), rest.stop) == (tokens[length - 2 : length], stop)


FORMS = [
    ({"regex": "a[bc]{2,4}="}, "a[bc]{2,4}="),
    ({"choice": ["cab", "bad face"]}, "cab|bad face"),
    ({"json": {"type": "integer"}}, "-?(0|[1-9][0-9]*)"),
    ({"grammar": 'root ::= "b" root | "c"'}, "b*c"),
]


def test_answers_follow_their_forms_beside_others_that_have_none(there):
    free = Sampling(max_tokens=60, seed=3)
    alone = there(sample_all, "torchtitan", PROMPTS, free)
    for form, pattern in FORMS:
        formed = Sampling(max_tokens=60, structured_outputs=form, stop_token_ids=(6,))
        samples = there(sample_all, "torchtitan", PROMPTS, formed, free)
        for sample in samples[::2]:
            *written, last = sample.tokens.tolist()
            if sample.finish is Finish.STOP:  # the form decides when, and the request which token
                assert last == 6
                assert re.fullmatch(pattern, text_of(written)), form
            assert len(sample.logprobs) == len(sample.tokens)
        assert any(sample.finish is Finish.STOP for sample in samples[::2]), form
        assert [one.tokens.tolist() for one in samples[1::2]] == [one.tokens.tolist() for one in alone[1::2]]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_an_answer_with_a_form_has_the_log_probs_without_it_and_what_the_form_makes_of_them(
    there, expected, temperature
):
    sampling = Sampling(max_tokens=60, stop_token_ids=(6,), temperature=temperature)
    formed = replace(sampling, structured_outputs={"regex": "(a[bc]){5}"})
    samples = there(sample_all, "torchtitan", PROMPTS, formed, sampling)
    for prompt, sample in zip(PROMPTS[::2], samples[::2], strict=True):
        assert re.fullmatch("(a[bc]){5}", text_of(sample.tokens.tolist()[:-1]))
        probs_NV = (expected.logits(prompt, sample) / temperature).softmax(-1)
        allowed = [*["a", "bc"] * 5, VOCABULARY[6:7]]
        allowed_of = [[VOCABULARY.index(text) for text in texts] for texts in allowed]
        weights = torch.stack([row_V[ids].sum() for row_V, ids in zip(probs_NV, allowed_of, strict=True)])
        torch.testing.assert_close(sample.form_weights, weights, atol=NOISE, rtol=1e-3)
        reference = expected.logprobs(prompt, sample, temperature=temperature)
        torch.testing.assert_close(sample.logprobs, reference, atol=NOISE, rtol=0)
    assert {one.form_weights for one in samples[1::2]} == {None}


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_a_form_goes_on_over_an_update(there, expected, mode):
    form = {"structured_outputs": {"regex": "(a[bc]){20}"}, "stop_token_ids": (6,)}
    samples, later = there(partial(update_while_sampling, mode, **form))
    for sample in (*samples, *later):
        assert re.fullmatch("(a[bc]){20}", text_of(sample.tokens.tolist()))
    if mode == "recompute":
        expected.check(samples, 1, 5)
    assert all({4, 5} == set(sample.versions.tolist()) for sample in samples)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"regex": "("}, "regex"),
        ({"json": "no schema"}, "JSON"),
        ({"grammar": "root ::= unknown"}, "grammar"),
        ({"shape": "round"}, "shape"),
        ({"regex": "a", "choice": ["b"]}, "one kind"),
        ({"choice": []}, "empty"),
        ({"json_object": False}, "True"),
    ],
)
def test_a_form_that_cannot_be_followed_is_refused(there, form, why):
    refusal = there(refusal_of, Sampling(structured_outputs=form, stop_token_ids=(6,)))
    assert "structured_outputs=" in refusal
    assert why in refusal


DEAD_ENDS = [{"regex": "[^\\s\\S]"}, {"grammar": 'root ::= root "a"'}, {"json": {"$ref": "#"}}]


def test_a_form_that_leaves_no_token_fails_alone(there):
    free = Sampling(max_tokens=20, seed=3)
    for form in DEAD_ENDS:
        dead = Sampling(max_tokens=20, structured_outputs=form, stop_token_ids=(6,))
        failed, sample = there(sample_all, "torchtitan", PROMPTS[:2], dead, free)
        assert isinstance(failed, InvalidRequest), form
        assert "no token can be drawn" in str(failed)
        assert len(sample.tokens) == 20


def test_a_form_is_taken_or_refused_whatever_was_asked_before(there, tiny_model_folder):
    multiple = Sampling(
        max_tokens=20, structured_outputs={"json": {"type": "integer", "multipleOf": 3}}, stop_token_ids=(6,)
    )
    assert "structured_outputs=" in there(refusal_by_grammars_of, tiny_model_folder, multiple)
    assert "structured_outputs=" in there(refusal_of, multiple)


def test_a_form_without_a_tokenizer_or_the_tokens_of_reasoning_or_a_stop_token_is_refused(there, tiny_model_folder):
    formed = Sampling(structured_outputs={"json_object": True}, stop_token_ids=(6,))
    assert "nowhere" in there(refusal_by_grammars_of, Path("/nowhere"), formed)
    assert "think" in there(refusal_by_grammars_of, tiny_model_folder, formed, "deepseek_r1")
    assert "to end the answer" in there(refusal_of, replace(formed, stop_token_ids=()))


def test_a_form_begins_after_the_reasoning(there, tmp_path):
    thinks, thought = len(VOCABULARY) - 2, len(VOCABULARY) - 1
    write_tiny_tokenizer(tmp_path, [*VOCABULARY[2:-2], "<think>", "</think>"])
    sampling = Sampling(max_tokens=300, structured_outputs={"regex": "abc"}, stop_token_ids=(6,), seed=3)
    samples = there(sample_after_reasoning, tmp_path, [[*prompt, thinks] for prompt in PROMPTS], sampling)
    ended = [tokens for sample in samples if thought in (tokens := sample.tokens.tolist())]
    assert ended
    for tokens in ended:
        answer = tokens[tokens.index(thought) + 1 :]
        assert text_of(answer)[:3] == "abc"[: len(answer)]
    (at_once,) = there(sample_after_reasoning, tmp_path, [[*PROMPTS[0], thinks, thought]], sampling)
    assert text_of(at_once.tokens.tolist()[:-1]) == "abc"


def test_the_templates_arguments_and_the_request_say_where_a_form_begins(there, tmp_path):
    thinks, thought = len(VOCABULARY) - 2, len(VOCABULARY) - 1
    write_tiny_tokenizer(tmp_path, [*VOCABULARY[2:-2], "<think>", "</think>"])
    form = {"regex": "abc"}
    sampling = Sampling(max_tokens=30, structured_outputs=form, stop_token_ids=(6,), seed=3)
    quick = replace(sampling, structured_outputs={**form, "template_args": {"enable_thinking": False}})
    begin = partial(there, sample_after_reasoning, tmp_path)
    asked = [begin(PROMPTS[:1], quick), begin(PROMPTS[:1], sampling, "qwen3", {"enable_thinking": False})]
    assert [text_of(sample.tokens.tolist()[:-1]) for (sample,) in asked] == ["abc", "abc"]
    earlier = [3, 4, thinks, thought, 3, 4, 5]
    later = replace(sampling, structured_outputs={**form, "at_once": False})
    ((taken,), (kept,)) = begin([earlier], sampling, "deepseek_r1"), begin([earlier], later, "deepseek_r1")
    assert text_of(taken.tokens.tolist()[:-1]) == "abc"
    assert text_of(kept.tokens.tolist())[:3] != "abc"
    wrong = replace(sampling, structured_outputs={**form, "template_args": {"enable_thinking": [1]}})
    assert "unhashable" in there(refusal_by_grammars_of, tmp_path, wrong, "qwen3")


def test_a_stop_string_ends_an_answer_with_the_token_that_completes_it_and_changes_nothing_before(there, expected):
    wholes = [sample.tokens.tolist() for sample in there(sample_all, "torchtitan", PROMPTS, GREEDY)]
    stop = text_of(wholes[0][10:12])
    sampling = Sampling(max_tokens=40, temperature=0.0, stop=["never said", stop])
    stopped = there(sample_all, "torchtitan", PROMPTS, sampling)
    assert (stopped[0].finish, stopped[0].stop) == (Finish.STOP, stop)
    for prompt, sample, whole in zip(PROMPTS, stopped, wholes, strict=True):
        ends = length_with(whole, stop)
        assert sample.tokens.tolist() == whole[:ends]
        assert len(sample.logprobs) == len(sample.versions) == len(sample.tokens)
        assert (sample.finish, sample.stop) == ((Finish.STOP, stop) if ends else (Finish.LENGTH, None))
        torch.testing.assert_close(sample.logprobs, expected.logprobs(prompt, sample), atol=NOISE, rtol=0)


def test_a_stop_string_wins_over_the_token_limit_and_a_stop_token_over_a_stop_string(there):
    (sample,) = there(sample_all, "torchtitan", PROMPTS[:1], GREEDY)
    whole = sample.tokens.tolist()
    stop = text_of(whole[10:12])
    limit = length_with(whole, stop)
    (limited,) = there(sample_all, "torchtitan", PROMPTS[:1], replace(GREEDY, max_tokens=limit, stop=stop))
    assert (limited.finish, limited.stop, limited.tokens.tolist()) == (Finish.STOP, stop, whole[:limit])
    both = replace(GREEDY, stop=text_of(whole[5:6]), stop_token_ids=whole[5:6])
    (by_token,) = there(sample_all, "torchtitan", PROMPTS[:1], both)
    first = whole.index(whole[5]) + 1
    assert (by_token.finish, by_token.stop, by_token.tokens.tolist()) == (Finish.STOP, None, whole[:first])


def test_a_request_that_cannot_be_served_is_refused_alone(there, tmp_path):
    assert "has no tokenizer.json" in there(refusal_of, Sampling(stop="a"), tmp_path)
    hot: Any = "hot"
    for wrong in (Sampling(temperature=hot), Sampling(top_p=3.0), Sampling(allowed_token_ids=[99])):
        assert there(refusal_of, wrong) != "not refused"
    assert len(there(sample_all, "torchtitan", PROMPTS, GREEDY)) == len(PROMPTS)


def test_vllm_is_asked_for_every_parameter_and_for_nothing_where_none_is_set(there):
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "min_tokens": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {3: -100.0},
        "allowed_token_ids": (3, 4, 5),
        "max_tokens": 9,
        "stop_token_ids": (5,),
        "seed": 4,
    }
    asked = there(parameters_of, Sampling(**given))
    lists = {"allowed_token_ids": [3, 4, 5], "stop_token_ids": [5]}
    assert asked == {**given, **lists, "structured_outputs": None, "ignore_eos": True}
    unset = there(parameters_of, Sampling(max_tokens=9))
    assert unset == {**NEUTRAL, "max_tokens": 9, "stop_token_ids": [], "seed": None, "ignore_eos": True}


def test_parameters_of_an_evaluation_do_what_they_say(there):
    def sampled(**parameters) -> Sample:
        (sample,) = there(sample_all, "torchtitan", PROMPTS[:1], Sampling(max_tokens=20, seed=3, **parameters))
        return sample

    plain = sampled().tokens.tolist()
    assert set(sampled(allowed_token_ids=(4, 9)).tokens.tolist()) <= {4, 9}
    assert plain[0] not in sampled(logit_bias={plain[0]: -100.0}).tokens.tolist()
    assert sampled(min_p=1.0).logprobs.tolist() == [0.0] * 20
    stops = tuple(plain[:3])
    late = sampled(min_tokens=10, stop_token_ids=stops).tokens.tolist()
    assert not set(late[:10]) & set(stops)
    for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 2.0}):
        assert sampled(**penalty).tokens.tolist() != plain


def test_vllms_own_model_gives_the_same_distribution(there, expected):
    ours, native = (there(sample_all, which, PROMPTS, GREEDY) for which in ("torchtitan", "native"))
    for prompt, one, other in zip(PROMPTS, ours, native, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=NOISE, rtol=0)
        torch.testing.assert_close(other.logprobs, expected.logprobs(prompt, other), atol=NOISE, rtol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it takes them")
def test_vllms_own_model_refuses_weight_updates_on_cpu_with_the_reason(there):
    assert "prepack" in there(native_updates)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM's own models can't take weights on CPU")
def test_vllms_own_model_takes_the_trainers_weights_on_a_gpu(there, expected):
    expected.check(there(native_with, 1), which=1, version=3)


def test_recompute_goes_on_under_the_new_weights_over_the_whole_prefix(there, expected):
    samples, later = there(update_while_sampling, "recompute")
    assert all(len(sample.tokens) == 40 for sample in samples)  # generate-5
    (split,) = versions_of(samples[:2])
    assert [version for version, _ in split] == [4, 5]  # generate-3
    assert all(sample.versions.diff().min() >= 0 for sample in samples)
    expected.check(samples, 0, 4)
    expected.check(samples, 1, 5)
    assert versions_of(later) == {((5, 40),)}
    expected.check(later, 1, 5)  # generate-4


def test_keep_goes_on_with_the_old_cache_and_lets_no_new_request_have_it(there, expected):
    samples, later = there(update_while_sampling, "keep")
    assert all(len(sample.tokens) == 40 for sample in samples)
    expected.check(samples, 0, 4)
    expected.check(samples[:1], 1, 5, close=False)
    assert versions_of(later) == {((5, 40),)}
    expected.check(later, 1, 5)  # generate-4


@pytest.mark.parametrize("mode", ["keep", "recompute", "drain"])
def test_only_with_keep_a_conversation_goes_on_with_the_cache_of_its_earlier_turns(there, expected, mode):  # generate-4
    said, ended = there(next_turns_after_an_update, mode)
    assert set(versions_of(list(ended.values()))) == {((5, 40),)}  # generate-3
    fresh = {
        name: bool((sample.logprobs - expected.logprobs(said, sample, 1)).abs().max() < NOISE)
        for name, sample in ended.items()
    }
    assert fresh.pop("new")
    assert set(fresh.values()) == {mode != "keep"}
    assert ("waited" in fresh) == (mode != "drain")


def test_drain_ends_what_is_under_way_under_the_old_weights(there, expected):
    samples, later = there(update_while_sampling, "drain")
    assert versions_of(samples) == {((4, 40),)}
    expected.check(samples, 0, 4)
    assert versions_of(later) == {((5, 40),)}
    expected.check(later, 1, 5)


@pytest.mark.parametrize("mode", ["recompute", "keep", "drain"])
def test_every_token_has_the_version_that_drew_it_where_each_step_has_another(there, expected, mode):  # generate-3
    samples = there(update_at_steps, mode)
    expected.check_each_stamp(samples)
    assert [len(sample.tokens) for sample in samples] == [10, 13, 16, 19, 22, 25]
    if mode != "drain":
        assert all((sample.versions.diff() == 1).all() for sample in samples)


def test_preempted_requests_lose_and_repeat_nothing(there, expected):
    preempted, samples = there(count_preemptions, 24, Sampling(max_tokens=120, seed=3))
    assert preempted > 0
    assert all(len(sample.tokens) == 120 for sample in samples)
    for number, sample in enumerate(samples):
        torch.testing.assert_close(sample.logprobs, expected.logprobs(PROMPTS[number % 6], sample), atol=NOISE, rtol=0)


def test_cancelling_gives_what_was_sampled_and_leaves_the_others_alone(there):
    cancelled, rest, busy = there(cancel_midway)
    assert [name for name, _ in cancelled] == ["a", "c"]
    for _, sample in cancelled:
        assert sample.finish is Finish.CANCELLED
        assert 0 < len(sample.tokens) == len(sample.logprobs) == len(sample.versions) <= 10
    assert rest == ["b"]
    assert not busy


def test_a_name_that_is_under_way_is_refused(there):
    assert "request_id='same'" in there(refuse_twice_the_same_name)


def test_each_thread_of_an_engine_computes_with_the_threads_of_its_settings(folders):
    """The tests' processes have OMP_NUM_THREADS=1."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as child:
        one, two = (child.submit(sampled_in_another_thread, folders[0], n).result(timeout=150) for n in (1, 2))
    assert one[0] == two[0]
    assert (one[1], two[1]) == ([1, 1], [2, 2])


def test_the_end_of_an_engine_lets_no_collection_scan_the_imported_modules(folders):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as child:
        before, *after = child.submit(frozen_around_the_end, folders[0]).result(timeout=150)
    assert before > 500_000
    assert min(after) > 0.99 * before
