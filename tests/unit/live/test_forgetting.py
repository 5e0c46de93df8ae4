"""Which versions saw a conversation, and the command that removes it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from trajectories import grouped, sampled

from apps.live import forget
from goaly.backlog.group_queue import GroupQueue
from goaly.backlog.settings import BacklogSettings
from goaly.base.config import to_yaml
from goaly.journal.__main__ import main as journal
from goaly.journal.attribution import Attribution
from goaly.journal.run_log import RunLog
from goaly.reward.settings import AdvantageSettings

GATE = [
    {"kind": "Opened", "version": 0},
    {"kind": "Decided", "candidate": 2, "served": 0, "decision": "promoted"},
    {"kind": "Decided", "candidate": 4, "served": 2, "decision": "refused"},
    {"kind": "RolledBack", "served": 2, "newest": 5},
    {"kind": "Decided", "candidate": 7, "served": 2, "decision": "promoted"},
]
"""Versions 3 to 5 are discarded."""
TICKETS = [("ann", "A"), ("bob", "B"), ("ann", "A"), ("cid", "C"), ("bob", "B"), ("cid", "C"), ("dan", "A")]
"""The conversation and the user of each ticket; ticket t makes version t + 1."""


def lines(file: Path, records: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(one) + "\n" for one in records))


async def trained(log: Path) -> None:
    file = RunLog(log)
    settings = BacklogSettings(groups_per_step=1, group_size=1, max_staleness=9, window=1, row_length=64)
    queue = GroupQueue(settings, AdvantageSettings(), dp_ranks=1, pad_token=0, record=file.record)
    for ticket, (session, _) in enumerate(TICKETS):
        await queue.admit()
        queue.report(grouped(ticket, [sampled(4, reward=1.0, prompt_id=session)]))
        batch = await queue.next_batch()
        assert batch is not None
        queue.trained(batch.id, batch.id + 1)
    file.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A live run that was stopped. One of A's conversations has not ended."""
    folder = tmp_path / "run"
    asyncio.run(trained(folder / "log"))
    (folder / "config.yaml").write_text(to_yaml({"model": {"path": "none"}}))
    lines(folder / "gate.jsonl", GATE)
    ends = [
        {"kind": "end", "session": session, "turn": f"{session}.{ticket}", "how": "trained", "key": "app"}
        | {"user": user, "ticket": ticket, "version": None, "n": ticket}
        for ticket, (session, user) in enumerate(TICKETS)
    ]
    ends.append({"kind": "end", "session": "eve", "turn": "eve.0", "how": "no_outcome", "key": "web", "user": "A"})
    lines(folder / "live/ends.jsonl", ends)
    first = {"kind": "session", "session": "fay", "key": "app", "user": "A"}
    lines(folder / "live/sessions/fay.jsonl", [first, {"kind": "turn", "session": "fay", "content": "secret"}])
    return folder


def test_a_version_has_seen_the_steps_that_led_to_it_without_those_that_were_discarded(run: Path):
    found = Attribution(run)
    assert found.served == [0, 2, 7]
    seen = {version: sorted(one.session for one in found.seen_by(version)) for version in found.served}
    assert seen == {0: [], 2: ["ann", "bob"], 7: ["ann", "bob", "cid", "dan"]}
    assert found.is_ancestor(4, 5)
    assert not found.is_ancestor(4, 7)
    assert [found.versions_that_saw(name) for name in ("ann", "cid", "eve")] == [[2, 7], [7], []]


def test_the_version_in_the_record_of_a_turn_counts_before_the_log(run: Path):
    records = [json.loads(line) for line in (run / "live/ends.jsonl").read_text().splitlines()]
    lines(run / "live/ends.jsonl", [one | {"version": 6} if one["session"] == "dan" else one for one in records])
    assert {one.session: one.versions for one in Attribution(run).conversations}["dan"] == {6}


def test_the_journal_names_the_conversations_of_a_version(run: Path, capsys: pytest.CaptureFixture[str]):
    assert journal(["versions", str(run)]) == 0
    assert capsys.readouterr().out == (
        "version 0: 0 conversations\nversion 2: 2 conversations\nversion 7: 4 conversations\n"
    )
    assert journal(["versions", str(run), "--version", "2"]) == 0
    assert capsys.readouterr().out == "ann  key app  user A  steps 1, 3\nbob  key app  user B  steps 2, 5\n"


def test_a_user_is_removed_from_log_queue_and_records(run: Path, capsys: pytest.CaptureFixture[str]):
    assert forget.main([str(run), "--user", "A"]) == 0
    assert capsys.readouterr().out == (
        "4 conversations\nversion 2 was trained on 1 of them\nversion 7 was trained on 2 of them\n"
        "removed 3 trajectories from the log, and 1 conversations that had not ended\n"
    )
    content = b"".join(path.read_bytes() for path in (run / "log").glob("*.log"))
    assert b"ann" not in content
    assert b"bob" in content
    assert not (run / "live/sessions/fay.jsonl").exists()
    ends = [json.loads(line) for line in (run / "live/ends.jsonl").read_text().splitlines()]
    assert {one["user"] for one in ends} == {None, "B", "C"}
    assert [one["ticket"] for one in ends[:-1]] == list(range(7))
    assert len(Attribution(run).seen_by(7)) == 4
    assert forget.main([str(run), "--user", "A"]) == 2
    assert "has no conversation of this user or session" in capsys.readouterr().err


def test_a_dry_run_only_says_what_would_be_removed(run: Path, capsys: pytest.CaptureFixture[str]):
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    assert forget.main([str(run), "--session", "cid", "--dry-run"]) == 0
    assert capsys.readouterr().out == "1 conversations\nversion 7 was trained on 1 of them\n"
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize(("key", "found"), [("web", {"eve"}), ("app", {"ann", "dan", "fay"})])
def test_a_key_narrows_the_conversations_of_a_user(run: Path, key: str, found: set[str]):
    from goaly.live.forgetting import LiveRecords

    assert LiveRecords(run).chosen(user="A", key=key) == found


def test_a_run_under_way_is_refused_and_loses_nothing(run: Path, capsys: pytest.CaptureFixture[str]):
    running = RunLog(run / "log")
    assert forget.main([str(run), "--user", "A"]) == 1
    assert "another process still writes this log" in capsys.readouterr().err
    running.close()
    assert (run / "live/sessions/fay.jsonl").exists()


def test_a_folder_of_another_kind_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert forget.main([str(tmp_path), "--user", "A"]) == 2
    assert "must be the folder of a live run" in capsys.readouterr().err
