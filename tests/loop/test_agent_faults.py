"""A run in which every process that an agent depends on is killed or hangs, each once."""

from collections.abc import Callable
from pathlib import Path

import pytest
from launched import REWARDED, START_SECONDS, LaunchedRun, gone_within, left_within, orphaned_memory, orphaned_within
from test_agent_run import TEMPLATE

from goaly.journal.__main__ import main as journal
from goaly.journal.run_log import records
from goaly.trajectory import Group, Trajectory

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
STEPS = 6
RESTS = "going-on/rests"
STREAMING = "streaming"


def test_whatever_dies_under_agents_every_task_ends_once_and_no_token_is_trained_twice(
    launch: Callable[..., LaunchedRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = orphaned_memory()
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    overrides = [f"steps={STEPS}", "rollout.endpoint={}", "generator.max_context=128", "backlog.max_staleness=2"]
    overrides += ["checkpoint.every=5", "checkpoint.restarts=3", f"chat.template_file={tmp_path}/chat.jinja", REWARDED]
    overrides += ["rollout.episode_retries=1"]
    run = launch(*overrides, module="tests.loop.faulty_agents")
    seen: set[int] = set()

    def not_ready() -> set[str]:
        seen.update(run.processes())
        if run.process.poll() is not None:
            return set()
        return {name for name in (STREAMING, RESTS) if not (run.folder / name).exists()}

    assert left_within(not_ready, START_SECONDS) == set(), run.text()
    assert '"kind": "turn"' not in (run.folder / "sessions/6.0.jsonl").read_text()  # its first answer has not ended
    run.kill("rollout-0")
    (run.folder / RESTS).with_name("rest").open("w").close()  # the agent asks before the next worker serves
    run.wait_for_text("rollout-0-1 serves in its place", START_SECONDS)
    seen |= set(run.processes())
    run.kill("generator")
    assert run.wait(START_SECONDS) == 0, run.text()

    summary = run.summary()
    assert summary["policy_version"] == STEPS
    assert (summary["trained"], summary["rejected"], summary["failed"]) == (2 * STEPS, 0, 2), summary["reasons"]
    for log in ("agents.log", "environment.log"):
        died = [why for why in summary["reasons"] if "EnvironmentDied" in why and "SIGKILL" in why and log in why]
        assert len(died) == 1, summary["reasons"]
    capsys.readouterr()
    assert journal(["list", str(run.folder), "--limit", "0"]) == 0
    ends = capsys.readouterr().out.splitlines()[-1]
    assert ends.endswith(f"policy version {STEPS}; prompts: 2 failed, {2 * STEPS} trained")
    for failed in ("1.0", "3.0"):
        assert journal(["show", str(run.folder), "--episode", failed]) == 0
        told = capsys.readouterr().out
        assert f"episode {failed}: failed" in told
        assert "(abandoned, EnvironmentDied" in told
        assert "| policy" in told

    episodes = {
        f"{group.ticket}.{those[0].sample_index}": those
        for group in records(run.folder / "log")
        if isinstance(group, Group)
        for those in group.episodes
    }
    faulty = [f"{ticket}.0" for ticket in range(1, 8)]
    trajectories = {name: len(those) for name, those in episodes.items() if name in faulty}
    assert trajectories == {"2.0": 2, "4.0": 1, "5.0": 1, "6.0": 1, "7.0": 1}
    # An agent that begins again begins a branch; an episode that does begins a session.
    (whole,) = episodes["5.0"]
    trained = whole.tokens["trained"].int()
    assert int((trained.diff() == 1).sum()) == 4  # the turns of an agent that lived on, two of each worker
    for those in episodes.values():
        assert_no_token_is_trained_twice(those)
    assert not (run.folder / "sessions").exists()
    assert gone_within(sorted(seen)) == []
    assert orphaned_within(before) == set()


def assert_no_token_is_trained_twice(trajectories: tuple[Trajectory, ...]) -> None:
    """Two trajectories of an episode share the tokens with which both begin, and nothing else.

    Answers of two branches may begin alike by chance: then the branches part amid an answer.
    """
    for number, one in enumerate(trajectories):
        assert one.trained_tokens > 0
        for other in trajectories[:number]:
            length = min(len(one.tokens), len(other.tokens))
            differ = one.tokens["tokens"][:length] != other.tokens["tokens"][:length]
            shared = int(differ.int().argmax()) if differ.any() else length
            trained, again = one.tokens["trained"][:length], other.tokens["trained"][:length]
            while 0 < shared < length and (trained[shared] or again[shared]):
                shared -= 1
            assert not (trained & again)[:shared].any()
