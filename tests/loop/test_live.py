"""The live app as a user starts it: real clients correct a tiny policy, which learns, also while processes die."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from launched import START_SECONDS, LaunchedRun, gone_within

from goaly.live.status import status_text

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

TURNS = 8
LIVE = [
    "backlog.groups_per_step=1",
    f"backlog.group_size={TURNS}",
    "backlog.window=1",
    "backlog.max_staleness=8",
    "generator.max_context=128",
    "checkpoint.restarts=100",
    "rollout.endpoint.port=0",
    "live.batch_seconds=5",
    "live.trained_keys=[app]",
    "live.retry_reward=-1",
]
ASKED: Any = {"model": "any", "max_tokens": 8}
SECRET = "a-secret-that-is-never-written"


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOALY_KEYS", "app=app-token,other=other-token")


def address(run: LaunchedRun) -> str:
    """Where it serves, once it answers."""
    run.wait_for_text("serving at ", 2 * START_SECONDS)
    return run.text().partition("serving at ")[2].split()[0]


def score(text: str | None) -> float:
    """What a client that wants digits thinks of an answer."""
    text = text or ""
    return sum(letter.isdigit() for letter in text) / max(1, len(text))


def corrected(client: openai.OpenAI, root: str, number: int) -> str:
    """A conversation of two turns whose answers are scored afterwards; the version of the second."""
    question = {"role": "user", "content": f"{number}+1="}
    asked = client.chat.completions.with_raw_response.create(messages=[question], **ASKED)
    first = asked.parse()
    said = first.choices[0].message.content or ""
    again: Any = [question, {"role": "assistant", "content": said}, {"role": "user", "content": "no"}]
    answered = client.chat.completions.with_raw_response.create(messages=again, **ASKED)
    second = answered.parse()
    session = answered.headers["x-session-id"]
    assert session == asked.headers["x-session-id"]
    for response in (second, first):  # out of order
        body = {"response_id": response.id, "score": score(response.choices[0].message.content)}
        sent = httpx.post(f"{root}/sessions/{session}/feedback", json=body, headers=bearer(client.api_key))
        assert sent.json() == {"turns": 1}, sent.text
    assert second.system_fingerprint == f"policy-{answered.headers['x-policy-version']}"
    return answered.headers["x-policy-version"]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def until(holds: Callable[[], bool], run: LaunchedRun) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"{status_text(run.folder)}\n{run.text()}"
        time.sleep(0.1)


def trained(run: LaunchedRun) -> int:
    ends = run.folder / "live/ends.jsonl"
    lines = ends.read_text().splitlines() if ends.exists() else []
    return sum('"how": "trained"' in line for line in lines)


def test_clients_correct_a_policy_that_learns_from_them_through_the_deaths_of_its_processes(
    keys: None, launch: Callable[..., LaunchedRun]
) -> None:
    """live-21, live-22, live-25, live-26"""
    run = launch(*LIVE, "steps=100000", app="live")
    url = address(run)
    root = url.removesuffix("/v1")
    client = openai.OpenAI(base_url=url, api_key="app-token", timeout=START_SECONDS)
    other = openai.OpenAI(base_url=url, api_key="other-token", timeout=START_SECONDS)

    untrained = other.chat.completions.create(messages=[{"role": "user", "content": SECRET}], **ASKED)
    left_out: Any = {"messages": [{"role": "user", "content": SECRET}], **ASKED}
    client.chat.completions.create(**left_out, extra_headers={"x-no-training": "1"})
    client.chat.completions.create(**left_out, metadata={"no_training": "1"})
    hot = client.chat.completions.with_raw_response.create(
        messages=[{"role": "user", "content": "hot"}], temperature=0.1, **ASKED
    )
    assert hot.status_code == 200
    forbidden = httpx.post(f"{root}/sessions/own/feedback", json={"score": 1}, headers=bearer("third"))
    assert forbidden.status_code == 401
    unknown = {"score": 1, "response_id": untrained.id}
    assert httpx.post(f"{root}/sessions/own/feedback", json=unknown, headers=bearer("app-token")).status_code == 404

    versions = [corrected(client, root, number) for number in range(TURNS)]
    assert versions[0] == "0"
    run.wait_for_steps(2)
    with anthropic.Anthropic(base_url=root, api_key="app-token", timeout=START_SECONDS) as claude:
        message = claude.messages.create(model="any", max_tokens=8, messages=[{"role": "user", "content": "1+2="}])
        reward = {"reward": 1.0, "response_id": message.id}
        assert httpx.post(f"{root}/sessions/own/reward", json=reward, headers=bearer("app-token")).status_code == 200
    stream = client.chat.completions.create(messages=[{"role": "user", "content": "2+2="}], stream=True, **ASKED)
    assert [part.system_fingerprint for part in stream][-1].startswith("policy-")
    until(lambda: corrected(client, root, 50) != "0", run)  # new weights are served

    assert "key_not_trained" in status_text(run.folder)

    for name in ("rollout", "trainer", "generator"):
        steps, pids = run.steps(), run.spawned(name)
        os.kill(pids[-1], signal.SIGKILL)
        for number in range(2 * TURNS):
            corrected(client, root, number)  # no request fails
        run.wait_for_steps(steps + 1)

    ends = run.lines("live/ends.jsonl")
    assert len(ends) == len({end["turn"] for end in ends})
    assert {end["key"] for end in ends} == {"app"}
    assert trained(run) >= 4 * TURNS
    files = [file for file in run.folder.rglob("*") if file.is_file()]
    assert not [str(file) for file in files if SECRET.encode() in file.read_bytes()]
    left = run.processes()
    run.process.send_signal(signal.SIGINT)
    run.wait()
    assert gone_within(left) == []


def test_with_a_judge_that_is_offline_nothing_is_trained_and_the_status_says_why(
    keys: None, launch: Callable[..., LaunchedRun], tmp_path: Path
) -> None:
    """live-23, live-27"""
    judge = ["live.judge.kind=endpoint", "live.judge.url=http://127.0.0.1:9/v1", "live.judge.silent_seconds=3"]
    run = launch(*LIVE, *judge, "steps=100000", app="live")
    client = openai.OpenAI(base_url=address(run), api_key="app-token", timeout=START_SECONDS)
    for number in range(2 * TURNS):
        question = {"role": "user", "content": f"{number}+1="}
        said = client.chat.completions.create(messages=[question], **ASKED).choices[0].message.content or ""
        more: Any = [question, {"role": "assistant", "content": said}, {"role": "user", "content": "no, wrong"}]
        client.chat.completions.create(messages=more, **ASKED)
    until(lambda: "silent for" in status_text(run.folder), run)
    assert f"{2 * TURNS} turns wait" in status_text(run.folder)
    assert run.steps() == 0
    assert client.chat.completions.create(messages=[{"role": "user", "content": "1+2="}], **ASKED).choices
