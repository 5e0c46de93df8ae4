"""The policy as an episode sees it: what a call names is changed, the rest is the run's; what is trained may not be
drawn from another distribution."""

import pytest
import torch

from goaly.base.errors import EpisodeError
from goaly.generate.policy import ContextFull, Policy
from goaly.generate.request import Finish, Sample, Sampling
from goaly.generate.settings import NEUTRAL, SamplingSettings
from goaly.prompts.prompt import Prompt
from goaly.rollout.episode import Episode

RUN = Sampling.of(SamplingSettings(temperature=0.7, max_tokens=20, stop=["\n\n"]), [1, 2])
CHANGES = {
    "temperature": 0.0,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "min_tokens": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {7: -100.0},
    "allowed_token_ids": (3, 4),
    "structured_outputs": {"regex": "a+"},
}
"""Every parameter that changes the distribution, with a value that does."""


class Recorder:
    """Answers "ok" and keeps what it was asked."""

    def __init__(self, stop: str | None = None):
        self.asked: list[Sampling] = []
        self.begun_at: list[int | None] = []
        self.version = 0
        self._stop = stop

    async def generate(
        self, request_id, tokens, sampling, min_version=0, session=None, on_part=None, begun_at=None
    ) -> Sample:
        self.asked.append(sampling)
        self.begun_at.append(begun_at)
        return Sample(
            tokens=torch.tensor([ord("o"), ord("k")]),
            logprobs=torch.zeros(2),
            versions=torch.tensor([self.version, self.version + 1], dtype=torch.int32),
            finish=Finish.STOP,
            stop=self._stop,
        )


def policy(sampler: Recorder, **changes) -> Policy:
    arguments = {"name": "4.0", "session": "4", "sampling": RUN, "min_version": 0, "max_context": 16}
    return Policy(sampler=sampler, decode=lambda tokens: "".join(map(chr, tokens)), **{**arguments, **changes})


@pytest.mark.parametrize("as_record", [False, True])
async def test_a_call_changes_only_what_it_names(as_record):
    sampler = Recorder()
    changes = {"max_tokens": 8, "seed": 5}
    if as_record:
        await policy(sampler).sample([9], Sampling(**changes))
    else:
        await policy(sampler).sample([9], **changes)
    (asked,) = sampler.asked
    assert asked == RUN.changed(Sampling(max_tokens=8, seed=5))
    assert (asked.temperature, asked.stop_token_ids, asked.stop) == (0.7, (1, 2), ("\n\n",))


async def test_an_episode_that_goes_on_in_another_process_has_other_requests_and_a_full_context_there():
    sampler = Recorder()
    one, other = policy(sampler, seeds="s"), policy(sampler, seeds="s")
    for _ in range(3):
        await one.sample([9])
    other.go_on_after(2)
    await other.sample([9])
    assert sampler.asked[3].seed == sampler.asked[2].seed != sampler.asked[0].seed
    with pytest.raises(ContextFull) as full:
        await other.sample([9] * 16)
    assert type(full.value) is ContextFull


async def test_all_requests_of_an_episode_go_on_with_the_cache_of_its_first_token():  # generate-4
    sampler = Recorder()
    one = policy(sampler)
    for sampler.version in (3, 5, 7):
        await one.sample([9])
    await policy(sampler).sample([9])
    assert sampler.begun_at == [None, 3, 3, None]


async def test_stop_tokens_and_stop_strings_are_replaced_where_they_are_named():
    sampler = Recorder()
    await policy(sampler).sample([9], stop_token_ids=[5], stop="|")
    await policy(sampler).sample([9], stop_token_ids=(), stop=())
    assert [(asked.stop_token_ids, asked.stop) for asked in sampler.asked] == [((5,), ("|",)), ((), ())]


async def test_without_a_token_limit_the_context_is_the_limit():
    sampler = Recorder()
    await policy(sampler, sampling=Sampling()).sample([9] * 6)
    await policy(sampler, sampling=Sampling()).sample([9] * 6, max_tokens=4)
    assert [asked.max_tokens for asked in sampler.asked] == [10, 4]  # 16 - 6


async def test_where_the_context_has_less_room_the_fewest_tokens_are_no_more_than_the_most():
    sampler = Recorder()
    for changes in ({"min_tokens": 12, "max_tokens": 15}, {"min_tokens": 12}, {"min_tokens": 3}):
        await policy(sampler, sampling=Sampling(), evaluation=True).sample([9] * 6, **changes)
    assert [(asked.min_tokens, asked.max_tokens) for asked in sampler.asked] == [(10, 10), (10, 10), (3, 10)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": 0.001}, r"temperature=0\.001: must be 0 \(greedy\), or at least 0\.01 and at most 2\.0"),
        ({"temperature": 3.0}, r"temperature=3\.0: must be 0"),
        ({"top_p": 0.0}, r"top_p=0\.0: must be above 0 and at most 1"),
        ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9: must be at most max_tokens=8"),
        ({"top_k": 0, "min_p": 2.0}, "top_k=0: must be .*; min_p=2.0: must be between 0 and 1"),
    ],
)
async def test_a_value_that_the_settings_would_refuse_is_refused_from_an_episode_too(changes, said):
    sampler = Recorder()
    for how in ({"evaluation": True}, {"evaluation": False}):
        with pytest.raises(EpisodeError, match=f"^{said}"):
            await policy(sampler, **how).sample([9], **changes, trained=how["evaluation"])
    assert sampler.asked == []


def test_every_parameter_that_changes_the_distribution_is_tried():
    assert CHANGES.keys() == NEUTRAL.keys()


@pytest.mark.parametrize(("key", "value"), [one for one in CHANGES.items() if one[0] != "structured_outputs"])
async def test_a_changed_distribution_is_refused_where_it_would_be_trained_and_fine_in_an_evaluation(key, value):
    sampler = Recorder()
    must_be = {"temperature": 0.7}.get(key, NEUTRAL[key])
    with pytest.raises(EpisodeError) as error:
        await policy(sampler).sample([9], **{key: value})
    assert str(error.value).startswith(f"{key}={value}: must be {must_be}, as in the run's sampling: ")  # generate-16
    assert "context.evaluation" in str(error.value)
    assert sampler.asked == []
    completion = await policy(sampler, evaluation=True).sample([9], **{key: value})
    assert completion.trained
    assert getattr(sampler.asked[0], key) == value


async def test_a_form_is_allowed_where_it_is_trained():  # generate-16
    sampler = Recorder()
    assert (await policy(sampler).sample([9], structured_outputs={"regex": "a+"})).trained
    assert sampler.asked[0].structured_outputs == {"regex": "a+"}


async def test_naming_the_runs_own_distribution_is_no_change():
    named, unnamed = Recorder(), Recorder()
    own = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "logit_bias": {}, "allowed_token_ids": ()}
    assert (await policy(named).sample([9], **own)).trained
    await policy(unnamed).sample([9])
    assert named.asked[0].distribution == unnamed.asked[0].distribution


async def test_what_nobody_trains_may_be_sampled_in_any_way_and_is_observed_not_written():
    prompt = Prompt(id="q1", source="test", messages=())
    opponent = await policy(Recorder()).sample([9], temperature=0.0, trained=False)
    with pytest.raises(EpisodeError, match=r"prompt q1: the completion was sampled with trained=False; .*observed"):
        Episode(prompt, [9]).wrote(opponent)
    whole = Episode(prompt, [9]).observed(opponent.tokens.tolist()).finish(0.0)
    assert whole.trained_tokens == 0


async def test_a_completion_tells_which_stop_string_ended_it_and_its_text_has_it():
    completion = await policy(Recorder(stop="k")).sample([9], stop=["k"])
    assert (completion.text, completion.stop) == ("ok", "k")


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("max_token", "no such parameter; known are allowed_token_ids, frequency_penalty, "),
        ("include_stop_str_in_output", "the answer always includes the stop string"),
        ("ignore_eos", "only `stop_token_ids` end an answer"),
        ("bad_words", "forbid tokens with `logit_bias"),
        ("n", "call `sample` once for each completion"),
        ("logprobs", "every completion has the log-probability"),
    ],
)
async def test_an_unknown_parameter_is_refused_with_what_to_use_instead(key, why):
    with pytest.raises(EpisodeError) as error:
        await policy(Recorder()).sample([9], **{key: 1})
    assert str(error.value).startswith(f"{key}=1: {why}")


async def test_a_value_of_a_wrong_type_is_refused_also_after_an_equal_one_that_is_right():
    one = policy(Recorder())
    await one.sample([9], max_tokens=8, stop_token_ids=())
    with pytest.raises(EpisodeError, match=r"max_tokens=8\.0: must be an integer"):
        await one.sample([9], max_tokens=8.0, stop_token_ids=())
    await one.sample([9], max_tokens=8, stop_token_ids=())
