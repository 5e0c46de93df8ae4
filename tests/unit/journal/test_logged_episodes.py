"""The journal says of each episode what became of it, as the run's own queue knows it."""

import shutil
from pathlib import Path

import pytest
from logged_run import FAILURE, HOSTILE, LoggedRun

from goaly.backlog.ledger import State
from goaly.base.errors import ConfigError, CorruptLog
from goaly.journal import logged_episodes as episodes
from goaly.journal.logged_episodes import LoggedEpisode, read_log
from goaly.journal.run_folder import RunFolder
from goaly.journal.run_log import delete_before


def by_id(run: LoggedRun, **more: bool) -> dict[str, LoggedEpisode]:
    return {one.id: one for one in read_log(RunFolder.of(run.folder), **more).episodes}


def test_every_ticket_of_the_log_is_there_with_its_state_and_its_reason(logged: LoggedRun) -> None:
    found = by_id(logged)
    assert list(found) == ["0.0", "0.1", "1.0", "1.1", "2", "3.0", "3.1", "4.0", "4.1", "5.0", "5.1", "6", "7"]
    states = {State.TRAINED: "0.0 4.1", State.QUEUED: "5.0 5.1", State.FAILED: "2", State.RUNNING: "6 7"}
    for state, ids in states.items():
        assert {found[one].state for one in ids.split()} == {state}
    assert (found["2"].why, found["2"].prompt_id, found["2"].reward) == (FAILURE, "p2", None)


def test_an_episode_has_the_facts_of_its_tokens_and_of_the_step_that_trained_it(logged: LoggedRun) -> None:
    found = by_id(logged)
    two = found["3.0"]  # sampled by versions 0 and 1, trained by version 1
    assert (two.step, two.versions, two.staleness) == (2, (0, 1), (0, 1))
    assert (two.reward, two.turns, two.trajectories, two.calls) == (1.0, 2, 1, 0)
    assert (two.tokens, two.trained) == (16 + len("firstsecond") + 2, len("firstsecond") + 2)
    assert (two.advantage, found["3.1"].advantage) == (pytest.approx(1.0, abs=1e-4), pytest.approx(-1.0, abs=1e-4))
    branched = found["4.0"]
    assert (branched.trajectories, branched.turns, branched.calls, branched.reward) == (3, 4, 1, 0.5)
    late = found["5.1"]  # in no batch yet
    assert (late.step, late.staleness, late.advantage, late.versions) == (None, None, None, (2, 2))


def test_the_tokens_of_an_episode_come_with_its_advantages_and_its_prompt(logged: LoggedRun) -> None:
    found = read_log(RunFolder.of(logged.folder), {4})
    assert [one.facts.id for one in found.read] == ["4.0", "4.1"]
    branched, hostile = found.read
    assert [set(columns) for columns in branched.columns] == [{"advantages", "reference_logprobs"}] * 3
    assert all(
        len(columns["advantages"]) == len(one)
        for one, columns in zip(branched.trajectories, branched.columns, strict=True)
    )
    assert hostile.prompt is not None
    assert hostile.prompt.id == "p4"
    assert HOSTILE in logged.chat.decode(hostile.trajectories[0].tokens["tokens"].tolist())


def test_an_episode_under_way_is_read_from_its_session_up_to_the_last_whole_record(logged: LoggedRun) -> None:
    before = {path: path.read_bytes() for path in logged.folder.rglob("*") if path.is_file()}
    found = by_id(logged, sessions=True)
    assert {"6.1", "7"} <= set(found)
    assert (found["6.1"].state, found["6.1"].turns, found["6.1"].reward) == (State.RUNNING, 1, None)
    assert {path: path.read_bytes() for path in logged.folder.rglob("*") if path.is_file()} == before


def test_an_episode_of_a_failed_group_has_what_it_sampled_and_how_it_ended(logged: LoggedRun) -> None:
    failed = by_id(logged, sessions=True)["2.1"]
    assert (failed.state, failed.why, failed.turns, failed.trained) == (State.FAILED, FAILURE, 1, len("oops") + 1)
    assert failed.outcome == f"abandoned, {FAILURE}"
    (read,) = read_log(RunFolder.of(logged.folder), {2}, sessions=True).read
    assert "oops" in logged.chat.decode(read.trajectories[0].tokens["tokens"].tolist())
    assert read.prompt is not None


def test_a_log_without_its_beginning_tells_what_is_left_and_counts_the_rest(
    logged: LoggedRun, pruned: LoggedRun
) -> None:
    found = read_log(RunFolder.of(pruned.folder))
    assert (found.begins, found.before) == (1, {"trained": 2})
    whole = {name: one for name, one in by_id(logged).items() if one.ticket > 1}
    assert {one.id: one for one in found.episodes} == whole
    (kept, _) = read_log(RunFolder.of(pruned.folder), {3}).read
    assert kept.facts == whole["3.0"]
    assert kept.prompt is not None  # ticket 3 ran then


def test_a_log_whose_beginning_is_deleted_meanwhile_is_read_again(
    tmp_path: Path, logged: LoggedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(logged.folder, tmp_path / "run")
    read = episodes.records

    def pruned_meanwhile(log: Path) -> object:
        monkeypatch.setattr(episodes, "records", read)
        delete_before(log, 1)
        raise FileNotFoundError(log / "000000.log")

    monkeypatch.setattr(episodes, "records", pruned_meanwhile)
    assert read_log(RunFolder.of(folder)).begins == 1


def test_damage_in_the_log_is_an_error(tmp_path: Path, logged: LoggedRun) -> None:
    folder = shutil.copytree(logged.folder, tmp_path / "run")
    segment = folder / "log" / "000000.log"
    damaged = bytearray(segment.read_bytes())
    damaged[200] ^= 1
    segment.write_bytes(damaged)
    with pytest.raises(CorruptLog, match=r"000000\.log, offset"):
        read_log(RunFolder.of(folder))


def test_advantages_of_a_function_that_is_not_here_are_unknown(tmp_path: Path, logged: LoggedRun) -> None:
    folder = shutil.copytree(logged.folder, tmp_path / "run")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("name: group", "name: nowhere.to:find"))
    found = read_log(RunFolder.of(folder))
    assert not found.knows_advantages
    assert {one.advantage for one in found.episodes} == {None}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "it has no config.yaml"),
        ("a: [", "config.yaml: "),
        ("model: tiny", "must be the config of an RL run"),
        ("model: {path: x}\nbacklog: {group_size: no}", "backlog.group_size"),
    ],
)
def test_a_folder_that_is_none_of_a_run_is_refused(tmp_path: Path, content: str | None, problem: str) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "durable").touch()
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ConfigError, match=problem):
        read_log(RunFolder.of(tmp_path))


def test_the_tokenizer_of_a_deleted_model_is_that_of_a_saved_policy(tmp_path: Path, logged: LoggedRun) -> None:
    folder = shutil.copytree(logged.folder, tmp_path / "run")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace(str(logged.folder.parent / "model"), str(tmp_path / "gone")))
    with pytest.raises(ConfigError, match=r"gone: has no tokenizer\.json"):
        RunFolder.of(folder).tokenizer()
    shutil.copytree(logged.folder.parent / "model", folder / "policy")
    assert RunFolder.of(folder).tokenizer().decode([5]) == logged.chat.decode([5])
