"""The mutation lane's bookkeeping: how a mutant is named, counted and justified."""

import json
from pathlib import Path

import pytest

import bench.mutants
from bench.mutants import Survivor, asked_for, scores, survivors_table, table, verdicts

ONE = Survivor(module="goaly.losses.kl", function="divergence", removed="a < b", added="a <= b")


def test_a_module_without_mutants_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "src" / "goaly" / "losses"
    folder.mkdir(parents=True)
    (folder / "kl.py.meta").write_text(json.dumps({"exit_code_by_key": {"one": 1, "two": 0}}))
    (folder / "segments.py.meta").write_text(json.dumps({"exit_code_by_key": {}}))
    monkeypatch.setattr(bench.mutants, "MUTANTS", tmp_path)
    assert verdicts() == {"goaly.losses.kl": {"one": 1, "two": 0}}


def test_only_a_test_that_fails_or_hangs_kills_a_mutant() -> None:
    codes = {
        "failed": 1,
        "hung": 36,
        "survived": 0,
        "no test reaches it": 33,
        "suspicious": 35,
        "segfault": -11,
        "not run": None,
    }
    found = scores({"goaly.losses.kl": codes})
    assert found == {"goaly.losses.kl": (2, 7)}
    assert "| losses.kl | 7 | 2 | 0.29 |" in table(found)


def test_only_the_mutants_that_were_asked_for_are_judged() -> None:
    found = {
        "goaly.losses.kl": {"goaly.losses.kl.one": 1, "goaly.losses.kl.two": None},
        "goaly.registry": {"goaly.registry.x": 0},
    }
    assert asked_for(found, []) == found
    assert asked_for(found, ["goaly.losses.kl.t*"]) == {
        "goaly.losses.kl": {"goaly.losses.kl.two": None},
        "goaly.registry": {},
    }


def test_a_survivors_reason_is_found_by_its_function_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "| divergence | `a < b` | `a <= b` |  |" in survivors_table([ONE])
    monkeypatch.setattr(bench.mutants, "JUSTIFIED", {"goaly.losses.kl.divergence: a <= b": "equal is measure zero"})
    assert "| equal is measure zero |" in survivors_table([ONE])
