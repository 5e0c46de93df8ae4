"""The verifier pool with real child processes on a plain event loop."""

import asyncio
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from goaly.base import process
from goaly.prompts.prompt import Message, Prompt
from goaly.reward import verifier_process
from goaly.reward.failures import ERRORS_IN_A_ROW, RewardTimeout, Unscored
from goaly.reward.settings import JudgeSettings, RewardSettings
from goaly.reward.verifier_pool import VerifierPool
from goaly.reward.verifier_process import VerifierError, VerifierProcess
from goaly.reward.verifier_trial import trial

PROMPT = Prompt(id="q7", source="test", messages=(Message(role="user", content="1+1"),), answer="2")
BY_WORD = "verifiers_under_test:by_word"


@asynccontextmanager
async def pool_of(verifier: str = BY_WORD, **changes) -> AsyncIterator[VerifierPool]:
    pool = VerifierPool(RewardSettings(verifier=verifier, **{"time_limit_seconds": 20.0, **changes}))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def exists(pid: float) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


def processes_with(mark: str) -> list[int]:
    return [int(pid) for pid in subprocess.run(["pgrep", "-f", mark], capture_output=True, check=False).stdout.split()]


def ended_within(pid: int, seconds: float) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


async def test_each_of_many_responses_gets_its_own_score():
    async with pool_of("verifiers_under_test:length") as pool:
        scores = await asyncio.gather(*(pool.score(PROMPT, "x" * at) for at in range(4000)))
    assert scores == [float(at) for at in range(4000)]


async def test_a_response_that_hangs_costs_its_limit_and_nobody_elses_score():
    async with pool_of(time_limit_seconds=0.5) as pool:
        pid = await pool.score(PROMPT, "pid")
        scores = await asyncio.gather(*(pool.score(PROMPT, word) for word in ["fine", "hang", "fine", "fine"]))
        assert scores == [1.0, 0.0, 1.0, 1.0]
        assert await pool.score(PROMPT, "pid") != pid
        assert not exists(pid)
        assert (pool.stats().timeouts, pool.stats().replaced) == (1, 1)


async def test_a_reply_that_came_in_time_counts_though_this_loop_was_busy_past_the_limit():
    async with pool_of(time_limit_seconds=0.3) as pool:
        await pool.score(PROMPT, "fine")
        score = asyncio.create_task(pool.score(PROMPT, "fine"))
        for _ in range(10):
            await asyncio.sleep(0)  # the request is on its way, and its clock runs
        time.sleep(0.6)  # noqa: ASYNC251 - the point of this test
        assert await score == 1.0
        assert pool.stats().timeouts == 0


async def test_running_out_of_time_can_be_made_a_failure():
    async with pool_of(time_limit_seconds=0.3, on_time_limit="fail") as pool:
        with pytest.raises(RewardTimeout, match=r"prompt q7: the verifier exceeded reward.time_limit_seconds=0.3"):
            await pool.score(PROMPT, "hang")


async def test_what_a_verifier_started_is_killed_with_it():
    mark = f"left over by {os.getpid()}"
    prompt = Prompt(id="q8", source="test", messages=(), answer=mark)
    async with pool_of(time_limit_seconds=1.0) as pool:
        assert await pool.score(prompt, "spawn and hang") == 0.0
    assert all(ended_within(pid, 20.0) for pid in processes_with(mark))  # it was sent a signal, which takes its time


async def test_errors_name_the_prompt_and_the_cause_and_the_process_goes_on():
    async with pool_of() as pool:
        pid = await pool.score(PROMPT, "pid")
        with pytest.raises(VerifierError, match=r"prompt q7: .*LookupError: no such answer \(verifiers_under_test.py:"):
            await pool.score(PROMPT, "raise")
        with pytest.raises(VerifierError, match=r"prompt q7: .*it returned nan, must be a finite number"):
            await pool.score(PROMPT, "nan")
        assert await pool.score(PROMPT, "print") == 1.0
        assert await pool.score(PROMPT, "pid") == pid


async def test_errors_can_be_made_a_reward_of_zero():
    async with pool_of(on_error="zero") as pool:
        words = ["fine", "raise", "nan", "die", "fine"]
        assert await asyncio.gather(*(pool.score(PROMPT, word) for word in words)) == [1.0, 0.0, 0.0, 0.0, 1.0]
        assert pool.stats().errors == 3


@pytest.mark.parametrize(("word", "cause"), [("raise", "error"), ("nan", "error"), ("hang", "timeout")])
async def test_a_zero_in_place_of_a_score_says_its_cause_and_is_told_from_a_wrong_answers(word: str, cause: str):
    async with pool_of(on_error="zero", time_limit_seconds=0.3) as pool:
        zero = await pool.score(PROMPT, word)
        assert not isinstance(await pool.score(PROMPT, "fine"), Unscored)
    assert isinstance(zero, Unscored)
    assert (zero, zero.cause) == (0.0, cause)
    copy = pickle.loads(pickle.dumps(zero))
    assert (type(copy), copy, copy.cause) == (Unscored, 0.0, cause)


async def test_a_verifier_of_which_only_errors_come_is_broken_whatever_errors_are_made():
    async with pool_of(on_error="zero") as pool:
        for _ in range(2):
            zeros = await asyncio.gather(*(pool.score(PROMPT, "raise") for _ in range(ERRORS_IN_A_ROW)))
            assert zeros == [0.0] * ERRORS_IN_A_ROW
            assert await pool.score(PROMPT, "fine") == 1.0  # ends the row
        await asyncio.gather(*(pool.score(PROMPT, "raise") for _ in range(ERRORS_IN_A_ROW)))
        with pytest.raises(
            VerifierError, match=r"prompt q7: .*LookupError.*65 errors in a row: too many for reward.on_"
        ):
            await pool.score(PROMPT, "raise")


async def test_a_process_that_works_for_a_caller_that_has_gone_is_freed_long_before_the_time_limit():
    async with pool_of(time_limit_seconds=1000.0) as pool:
        pid = await pool.score(PROMPT, "pid")
        gone = asyncio.create_task(pool.score(PROMPT, "hang"))
        for _ in range(10):
            await asyncio.sleep(0)  # the process hangs
        waiting = asyncio.create_task(pool.score(PROMPT, "pid"))
        gone.cancel()
        assert await asyncio.wait_for(waiting, 30) != pid
        assert (pool.stats().timeouts, pool.stats().errors, pool.stats().replaced) == (0, 0, 1)


async def test_a_process_finishes_what_takes_no_time_though_its_caller_has_gone():
    async with pool_of(time_limit_seconds=1000.0) as pool:
        pid = await pool.score(PROMPT, "pid")
        gone = [asyncio.create_task(pool.score(PROMPT, "fine")) for _ in range(8)]
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        assert await pool.score(PROMPT, "pid") == pid


async def test_a_verifier_that_dies_is_tried_twice_and_takes_no_other_score_along():  # reward-1
    async with pool_of() as pool:
        answers = await asyncio.gather(
            *(pool.score(PROMPT, word) for word in ["fine", "die", "fine"]), return_exceptions=True
        )
        assert answers[0] == answers[2] == 1.0
        assert "ended with signal SIGSEGV, 2 times" in str(answers[1])
        assert pool.stats().replaced == 2


async def test_whatever_breaks_in_the_pool_fails_only_what_a_process_had_in_hand(monkeypatch: pytest.MonkeyPatch):
    judge, broken = VerifierPool._judge, []

    async def breaks_once(pool: VerifierPool, *args) -> bool:
        if not broken:
            broken.append(True)
            raise RuntimeError("sabotage")
        return await judge(pool, *args)

    async with pool_of(on_error="zero") as pool:
        pid = await pool.score(PROMPT, "pid")
        monkeypatch.setattr(VerifierPool, "_judge", breaks_once)
        with pytest.raises(VerifierError, match="prompt q7: the reward pool failed: RuntimeError: sabotage"):
            await pool.score(PROMPT, "fine")
        assert await pool.score(PROMPT, "pid") != pid
        assert (pool.stats().errors, pool.stats().replaced) == (1, 1)


async def test_a_system_that_has_no_process_left_fails_the_response_at_hand_and_the_pool_goes_on(
    monkeypatch: pytest.MonkeyPatch,
):
    start, refused = VerifierProcess.start, []

    async def none_left(verifier: str) -> VerifierProcess:
        if len(refused) < 2:
            refused.append(verifier)
            raise BlockingIOError("Resource temporarily unavailable")
        return await start(verifier)

    async with pool_of() as pool:
        monkeypatch.setattr(VerifierProcess, "start", none_left)
        with pytest.raises(VerifierError, match="prompt q7: no process for its verifier: Resource temporarily"):
            await pool.score(PROMPT, "die")
        assert await pool.score(PROMPT, "fine") == 1.0


async def test_a_pools_task_that_ends_all_the_same_ends_the_pools_process(monkeypatch: pytest.MonkeyPatch):
    ended = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(process, "give_up", lambda why, error: ended.set_result(f"{why}: {error}"))

    async def breaks(pool: VerifierPool) -> None:
        raise RuntimeError("sabotage")

    monkeypatch.setattr(VerifierPool, "_take", breaks)
    async with pool_of():
        assert await asyncio.wait_for(ended, 30) == "task verifier failed: sabotage"


async def test_a_verifiers_process_imports_nothing_that_the_verifier_does_not():
    async with pool_of() as pool:
        assert await pool.score(PROMPT, "heavy") == 0.0


@pytest.mark.parametrize(
    ("verifier", "why"),
    [
        ("no.such.module:f", "ModuleNotFoundError: No module named 'no'"),
        ("verifiers_under_test:missing", "module verifiers_under_test has no function 'missing'"),
        ("verifiers_under_test:NOT_A_FUNCTION", "module verifiers_under_test has no function 'NOT_A_FUNCTION'"),
        ("verifiers_under_test:asks_elsewhere", "it is a coroutine function"),
        ("verifiers_under_test:of_response", "too many positional arguments"),
    ],
)
async def test_a_verifier_that_cannot_be_imported_stops_the_start(verifier, why):
    with pytest.raises(VerifierError, match=f"verifier {verifier} can't be used: .*{why}"):
        await VerifierPool(RewardSettings(verifier=verifier)).start()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("length", None),
        ("raises", None),
        ("asks_elsewhere", "can't be used: TypeError: it is a coroutine function"),
        ("of_response", "can't be used: TypeError: too many positional arguments"),
        ("missing", "can't be used: ValueError: module verifiers_under_test has no function 'missing'"),
        ("returns", "it returned a value of type NoneType: "),
        ("returns_text", "it returned a value of type str: could not convert string to float: 'right'"),
        ("exits", "the verifier's process ended with exit code 3 when it scored an answer"),
        ("hangs", "its first score took longer than reward.time_limit_seconds=0.3"),
    ],
)
def test_a_verifier_that_can_score_no_answer_is_found_before_a_run(name: str, why: str | None) -> None:
    limit = 0.3 if name == "hangs" else 60.0
    settings = RewardSettings(verifier=f"verifiers_under_test:{name}", time_limit_seconds=limit)
    found = trial(settings, {"own": settings.verifier, "other": "verifiers_under_test:length"}).result()
    start = f"={settings.verifier}: must be a function of a Prompt and a response's text that returns a number: {why}"
    assert [one[: len(key) + len(start)] for one, key in zip(found, ("reward.verifier", "own"), strict=False)] == (
        [] if why is None else [f"reward.verifier{start}", f"own{start}"]
    )


def test_a_verifier_that_a_judge_replaces_is_not_tried() -> None:
    judge = JudgeSettings(url="http://127.0.0.1:1/v1", model="m")
    assert trial(RewardSettings(judge=judge), {}).result() == []


def test_a_verifier_that_takes_long_to_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_process, "START_LIMIT_SECONDS", 0.0)
    (problem,) = trial(RewardSettings(verifier=BY_WORD), {}).result()
    assert problem.endswith("can't be used: importing it took over 0 s")


async def test_close_ends_whoever_waits_and_kills_the_processes():
    async with pool_of() as pool:
        pid = await pool.score(PROMPT, "pid")
        waiting = [asyncio.create_task(pool.score(PROMPT, "hang")) for _ in range(3)]
        await asyncio.sleep(0)
        await pool.close()
        assert {str(error) for error in await asyncio.gather(*waiting, return_exceptions=True)} == {
            "the reward pool was closed"
        }
        assert not exists(pid)
        with pytest.raises(VerifierError, match="was closed"):
            await pool.score(PROMPT, "fine")


async def test_a_verifier_outlives_the_sigterm_of_a_scheduler():
    async with pool_of() as pool:
        pid = await pool.score(PROMPT, "pid")
        os.kill(int(pid), signal.SIGTERM)
        assert await pool.score(PROMPT, "pid") == pid


def test_a_busy_verifier_dies_with_its_parent():
    program = f"""
import asyncio, os, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from goaly.prompts.prompt import Prompt
from goaly.reward.settings import RewardSettings
from goaly.reward.verifier_pool import VerifierPool

async def main():
    pool = VerifierPool(RewardSettings(verifier={BY_WORD!r}, time_limit_seconds=1000.0))
    await pool.start()
    prompt = Prompt(id="p", source="test", messages=())
    print(int(await pool.score(prompt, "pid")), flush=True)
    await asyncio.wait([asyncio.create_task(pool.score(prompt, "hang"))], timeout=0.3)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == -9, run.stderr
    assert ended_within(int(run.stdout), 10.0)  # reward-2
