"""The judging loop with judges that answer, fail, hang and say nothing; and the votes of a model."""

import asyncio
from pathlib import Path

import pytest
from live_traffic import ONE, answered, opened, said, user

from goaly.live.collection import CollectionLimits
from goaly.live.judges import Case, NoVerdict, VotingJudge, majority, vote_of
from goaly.live.judging import Judging
from goaly.live.settings import LiveJudgeSettings
from goaly.live.traffic import Traffic
from goaly.live.turn import Reaction, ReactionKind, TurnEnd
from goaly.prompts.prompt import Message
from goaly.prompts.tokenizer import ChatTokenizer

PATTERN = LiveJudgeSettings().pattern


class Scripted:
    """A judge that does these in order, and then gives 1."""

    def __init__(self, *does: float | Exception | None):
        self.does = list(does)
        self.cases: list[Case] = []

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def reward(self, case: Case) -> float:
        self.cases.append(case)
        answer = self.does.pop(0) if self.does else 1.0
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return answer


def heard(tokenizer: ChatTokenizer, folder: Path, turns: int) -> Traffic:
    traffic = opened(tokenizer, folder, limits=CollectionLimits(judge_tries=1))
    for number in range(turns):
        answered(traffic, ONE, [user(f"{number}+1?")], "8")
        traffic.said(traffic.place(ONE, [user(f"{number}+1?"), said("8"), user("no")], None, None, None))
    return traffic


async def judged(judging: Judging, seconds: float = 0.2) -> None:
    running = asyncio.create_task(judging.run())
    await asyncio.sleep(seconds)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def settings(**changes: object) -> LiveJudgeSettings:
    facts: dict[str, object] = {"kind": "policy", "time_limit_seconds": 0.05, "tries": 1, **changes}
    return LiveJudgeSettings(**facts)  # type: ignore[arg-type]


def test_a_turn_gets_the_reward_of_its_judge_who_sees_what_was_said(tokenizer: ChatTokenizer, tmp_path: Path):
    traffic, judge = heard(tokenizer, tmp_path, 1), Scripted(-1.0)
    asyncio.run(judged(Judging(judge, settings(), traffic)))
    (turn,) = traffic.collection.turns.values()
    assert (turn.reward, turn.by) == (-1.0, "policy")
    (case,) = judge.cases
    assert (case.messages[-1].content, case.answer, case.reactions[0].text) == ("0+1?", "8", "no")


@pytest.mark.parametrize("does", [ValueError("no"), None, float("nan")], ids=["raises", "hangs", "nan"])
def test_a_judgement_that_fails_makes_no_reward(
    tokenizer: ChatTokenizer, tmp_path: Path, does: float | Exception | None
):
    """live-27"""
    traffic = heard(tokenizer, tmp_path, 1)
    asyncio.run(judged(Judging(Scripted(does), settings(), traffic)))
    assert traffic.collection.ended == {TurnEnd.UNJUDGED: 1}
    assert traffic.collection.counts["judge_failures"] == 1


def test_while_the_judge_is_failing_turns_wait_and_are_not_left_out(tokenizer: ChatTokenizer, tmp_path: Path):
    """live-27"""
    traffic = heard(tokenizer, tmp_path, 10)
    judging = Judging(Scripted(*[ValueError("offline")] * 99), settings(parallel=1), traffic)
    asyncio.run(judged(judging))
    assert traffic.collection.ended == {TurnEnd.UNJUDGED: 2}
    assert traffic.collection.stages()["heard"] == 8
    assert "failing, 8 turns wait: ValueError: offline" in judging.state()


def test_a_judge_that_answers_nothing_is_silent_and_the_state_says_why(tokenizer: ChatTokenizer, tmp_path: Path):
    traffic, now = heard(tokenizer, tmp_path, 3), [0.0]
    judging = Judging(Scripted(), settings(silent_seconds=60), traffic, lambda: now[0])
    now[0] = 61.0
    assert judging.state() == "silent for 61 s, 3 turns wait: no answer yet"


def test_no_more_turns_are_judged_in_a_minute_than_the_budget(tokenizer: ChatTokenizer, tmp_path: Path):
    traffic, judge = heard(tokenizer, tmp_path, 5), Scripted()
    asyncio.run(judged(Judging(judge, settings(per_minute=2), traffic)))
    assert len(judge.cases) == 2
    assert traffic.collection.stages()["heard"] == 3


def test_without_a_judge_turns_with_a_reaction_wait_for_a_score(tokenizer: ChatTokenizer, tmp_path: Path):
    traffic = heard(tokenizer, tmp_path, 2)
    judging = Judging(None, LiveJudgeSettings(), traffic)
    asyncio.run(judging.run())
    assert judging.state() == "off: 2 turns have a reaction without a score"


@pytest.mark.parametrize(
    ("reply", "vote"),
    [("it is good\n+1", 1), ("-1", -1), ("so: 0", 0), ("1", 1), ("I give 10", None), ("", None), ("12, so -1.", -1)],
)
def test_a_vote_is_the_last_one_of_a_reply(reply: str, vote: int | None):
    assert vote_of(reply, PATTERN) == vote


@pytest.mark.parametrize(
    ("votes", "reward"), [([1, 1, -1], 1.0), ([1, 0, -1], 0.0), ([-1, -1, None], -1.0), ([1, -1], 0.0), ([0], 0.0)]
)
def test_the_reward_is_the_vote_of_the_majority_or_zero(votes: list[int | None], reward: float):
    assert majority(votes) == reward


@pytest.mark.parametrize("votes", [[None], [1, None, None], []])
def test_too_few_votes_are_no_reward(votes: list[int | None]):
    """live-27"""
    with pytest.raises(NoVerdict):
        majority(votes)


def test_a_model_is_asked_for_each_vote_with_the_texts_in_their_places():
    asked: list[str] = []

    async def ask(question: str) -> str:
        asked.append(question)
        if len(asked) == 1:
            raise ConnectionError
        return "-1"

    judge = VotingJudge(LiveJudgeSettings(kind="policy", question="{question}|{answer}|{kind}|{outcome}"), ask)
    reactions = [Reaction(kind=ReactionKind.TOOL_RESULT, text="exit code 1 {answer}")]
    case = Case(turn="t", messages=[Message(role="user", content="do it")], answer="done", reactions=reactions)
    assert asyncio.run(judge.reward(case)) == -1.0
    assert asked == ["do it|done|tool result|exit code 1 {answer}"] * 3
