"""A prompt is scored by the verifier that it names, in processes of that verifier's own."""

from dataclasses import replace

import pytest

from goaly.prompts.prompt import Message, Prompt
from goaly.reward.settings import RewardSettings
from goaly.reward.verifier_pool import Judge
from goaly.reward.verifier_process import VerifierError

PROMPT = Prompt(id="q7", source="test", messages=(Message(role="user", content="1+1"),), answer="2")
LENGTH, BY_WORD = "verifiers_under_test:length", "verifiers_under_test:by_word"


async def test_each_prompt_is_scored_by_the_verifier_that_it_names_and_others_by_the_runs():
    judge = Judge(RewardSettings(verifier=LENGTH), [BY_WORD, LENGTH])
    assert await judge.start() == 2
    try:
        assert await judge.score(PROMPT, "heavy") == 5.0
        assert await judge.score(replace(PROMPT, verifier=BY_WORD), "heavy") == 0.0
        with pytest.raises(VerifierError, match=f"unknown verifier other:one; processes run {LENGTH}, {BY_WORD}"):
            await judge.score(replace(PROMPT, verifier="other:one"), "x")
        assert (judge.stats().scores, judge.stats().errors) == (2, 0)
    finally:
        await judge.close()


async def test_a_verifier_that_cannot_be_imported_fails_the_start_by_name():
    judge = Judge(RewardSettings(verifier=LENGTH), ["no.such:thing"])
    with pytest.raises(VerifierError, match=r"no\.such"):
        await judge.start()
    with pytest.raises(VerifierError, match="closed"):
        await judge.score(PROMPT, "x")
