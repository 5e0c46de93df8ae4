"""A run whose episodes are an agent that reaches the policy by HTTP only."""

from collections.abc import Callable
from pathlib import Path

import pytest
from launched import REWARDED, START_SECONDS, LaunchedRun

from goaly.journal.__main__ import main as journal

pytestmark = pytest.mark.timeout(900)


TEMPLATE = "{% for message in messages %}{{ message['content'] + eos_token }}{% endfor %}"


def test_an_agent_of_openais_api_is_trained_on_what_it_sampled(
    launch: Callable[..., LaunchedRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    overrides = ["steps=8", "rollout.endpoint={}", "generator.max_context=128", "backlog.max_staleness=2", REWARDED]
    overrides += ["checkpoint.every=5", "checkpoint.restarts=3", f"chat.template_file={tmp_path}/chat.jinja"]
    run = launch(*overrides, module="tests.loop.agent_over_http")
    run.wait_for_steps(2)
    assert journal(["list", str(run.folder)]) == journal(["show", str(run.folder)]) == 0  # while it goes on
    run.kill("rollout-0")  # in the middle of answers
    assert run.wait(START_SECONDS) == 0, run.text()
    summary = run.summary()
    assert "rollout-0-1 serves in its place" in run.text()
    assert summary["policy_version"] == 8
    assert (summary["rejected"], summary["failed"], summary["reasons"]) == (0, 0, {})
    capsys.readouterr()
    assert journal(["list", str(run.folder), "--limit", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "64 episodes; policy version 8; prompts: 16 trained"
    assert journal(["show", str(run.folder), "--html", str(tmp_path / "one.html")]) == 0
    assert journal(["export", str(run.folder)]) == 0
    rollouts = run.lines("rollouts.jsonl")
    assert len(rollouts) == 8 * 2 * 4  # every episode is one trajectory: its second request continues the first
    for one in rollouts:
        assert [author for author, *_ in one["turns"]] == ["prompt", "policy", "environment", "policy"]
        policy = sum(stop - start for author, start, stop in one["turns"] if author == "policy")
        assert one["trained"] == policy
    assert not (run.folder / "sessions").exists()
    assert len({one["reward"] for one in rollouts}) > 1
