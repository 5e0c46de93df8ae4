"""The mutation lane's bookkeeping: how a mutant is named, counted and justified."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import bench.mutants
from bench.mutants import (
    STRICT,
    Judged,
    Survivor,
    asked_again,
    asked_for,
    in_module,
    known,
    left,
    not_yet,
    reason,
    scores,
    survivor,
    survivors_table,
    table,
    verdicts,
)
from bench.record import append, finished

ONE = Survivor(module="goaly.losses.kl", function="divergence", removed="a < b", added="a <= b")


def test_verdicts_are_read_from_mutmuts_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mutants" / "src" / "goaly" / "losses"
    folder.mkdir(parents=True)
    (folder / "kl.py.meta").write_text(json.dumps({"exit_code_by_key": {"one": 1, "two": 0}}))
    (folder / "__init__.py.meta").write_text(json.dumps({"exit_code_by_key": {}}))
    monkeypatch.chdir(tmp_path)
    assert verdicts() == {"goaly.losses.kl": {"one": 1, "two": 0}, "goaly.losses": {}}


def test_only_what_has_no_verdict_for_the_present_source_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("kl", "tokens", "value"):
        (tmp_path / "src" / "goaly").mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / "goaly" / f"{name}.py").write_text(name)
    monkeypatch.setattr(bench.mutants, "survivor", lambda module, name: ONE)
    codes = {"goaly.kl.x_f__mutmut_1": 1, "goaly.kl.x_f__mutmut_2": None, "goaly.kl.xǁCǁg__mutmut_1": 0}
    for module, verdicts_of in (("goaly.kl", codes), ("goaly.tokens", {"goaly.tokens.x_f__mutmut_1": 1})):
        append(tmp_path / "runs.jsonl", Judged.of(module, verdicts_of))
    (tmp_path / "src" / "goaly" / "tokens.py").write_text("edited")
    judged = known(finished(tmp_path / "runs.jsonl", Judged))
    assert judged["goaly.kl"].verdicts == codes
    assert judged["goaly.kl"].survivors == [asdict(ONE)]
    modules = ["goaly.kl", "goaly.tokens", "goaly.value"]
    assert left(modules, judged) == ["goaly.tokens.x*", "goaly.value.x*", "goaly.kl.x_f__mutmut_2"]
    assert left(modules, judged, ["goaly.[kv]*"]) == ["goaly.value.x*", "goaly.kl.x_f__mutmut_2"]
    assert left(modules, judged, ["goaly.kl.x_f__mutmut_1", "goaly.value.x_g__mutmut_4"]) == [
        "goaly.value.x_g__mutmut_4"
    ]


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
    assert "| losses/kl.py | 7 | 2 | 0.29 |" in table(found)


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


def test_survivors_without_a_reason_are_judged_again_and_mutants_that_did_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench.mutants, "survivor", lambda module, name: replace(ONE, added=name[-1]))
    monkeypatch.setattr(bench.mutants, "JUSTIFIED", {"goaly.losses.kl.divergence: 6": "equal is measure zero"})
    codes = {f"goaly.kl.x_f__mutmut_{n}": code for n, code in enumerate((1, 0, None, 36, 33, 0), 1)}
    judged = {"goaly.kl": Judged.of("goaly.kl", codes)}
    assert asked_again(judged, []) == [f"goaly.kl.x_f__mutmut_{n}" for n in (2, 3, 5)]
    assert asked_again(judged, ["*_3"]) == ["goaly.kl.x_f__mutmut_3"]


def test_only_modules_with_mutants_that_were_asked_for_are_changed() -> None:
    assert in_module("goaly.losses.*", "goaly.losses.kl")
    assert in_module("goaly.losses.kl.xǁCǁf__mutmut_2", "goaly.losses.kl")
    assert not in_module("goaly.losses.kl.x_f__mutmut_2", "goaly.losses")
    assert not in_module("goaly.losses.kl.*", "goaly.losses.tokens")


SOURCE = """
def price(count: int, unit: float = 2.0) -> float:
    if count < 0:
        raise ValueError("a negative count")
    return count * unit


class Shop:
    @property
    @cached
    def open(self) -> bool:
        return 1 < 2
"""


def test_mutants_change_code_and_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mutmut")
    from bench import mutation

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mutation, "COPIED", ("src", "pyproject.toml"))
    file = Path("src", "shop.py")
    file.parent.mkdir()
    file.write_text(SOURCE)
    Path("pyproject.toml").write_text("[tool.mutmut]\nsource_paths = ['src']\n")
    mutation.make(["shop"])
    found = verdicts()["shop"]
    assert set(found.values()) == {None}
    added = [survivor("shop", name).added for name in found]
    assert {"return count / unit", "if count <= 0:", "raise ValueError(None)"} <= set(added)
    assert "return 1 <= 2" in added
    assert not any("XX" in line or "NEGATIVE" in line for line in added)


def test_a_decorator_becomes_a_call() -> None:
    pytest.importorskip("mutmut")
    from bench.mutation import undecorated

    assert SOURCE.count("@") == 2
    assert undecorated(SOURCE).partition("class Shop:\n")[2].splitlines() == [
        "    def open(self) -> bool:",
        "        return 1 < 2",
        "    open = cached(open)",
        "    open = property(open)",
    ]
    assert undecorated("@staticmethod\ndef f(): pass") == "@staticmethod\ndef f(): pass\n"


@pytest.mark.parametrize("mutated", ["zip(a, b[1:], strict=None):", "zip(a, b[1:], ):", "zip(a, b[1:], strict=False):"])
def test_a_mutant_of_strict_alone_has_its_reason(mutated: str) -> None:
    before = "for x in zip(a, b[1:], strict=True):"
    assert reason(replace(ONE, removed=before, added=f"for x in {mutated}")) == STRICT
    assert reason(replace(ONE, removed=before, added="for x in zip(a, strict=True):")) == ""


def test_a_report_says_what_was_not_run() -> None:
    assert not_yet(0, []) == ""
    assert not_yet(3, []) == "3 mutants of these modules have not been run yet; they count as survivors."
    assert (
        not_yet(0, ["goaly.registry", "goaly.config"])
        == "Not run at all, and not counted: registry.py, config/__init__.py."
    )
