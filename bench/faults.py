"""Kills or stops each kind of process of a run, raises in it or gets it stuck, at every stage, and checks the end.

    python -m bench.faults [--only TEXT] [--missing] [--json FILE] [--markdown FILE]

Each case is a run of its own, as a user starts it, with one fault (`saboteur.py`). It has to end as it should within
its limit: the part is replaced and the run goes on, or the run fails with an error that names it. In either case every
admitted group is accounted for, and no process and no shared memory is left. A server (`apps.serve`) has to answer
again. Takes about 80 minutes on two quiet cores.
Each finished case is written to the JSON file at once; `--missing` runs only those that are not in it. The exit code is
1 if one of those asked for did not end as it should.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from pathlib import Path

import httpx

from bench.report import exit_on_terminate
from bench.saboteur import NOT_PLANTED, PLANTED, Fault
from tests.loop.launched import ROOT, LaunchedRun, alive, as_users_have, gone_within, orphaned_memory, orphaned_within
from tests.program import Program

SILENT_SECONDS = 10
STUCK_SECONDS = 15
START_SECONDS = 400
"""Within this time a run starts and reaches the moment of its fault."""
LIMIT_SECONDS = 60
"""Within this time after the fault a run has failed, or works again."""
LEFT_SECONDS = 5
INTERRUPTED = 130

REPLACED, FAILS, GOES_ON = "is replaced", "the run fails", "the run goes on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fault in one run, and how that has to end."""

    part: str
    fault: Fault
    ends: str
    says: str = ""
    """Text that the run's output must contain."""
    app: str = "grpo"
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The case in words: the part, the kind of fault, and the moment."""
        return f"{self.part}; {self.fault.kind}; {self.fault.when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a case ended."""

    name: str
    ends: str
    seconds: float
    """From the fault to the end of the run, or to its working again."""
    error: str
    """The run's last words, where it failed."""
    problems: list[str] = field(default_factory=list)

    @property
    def then(self) -> str:
        """The end in words: as it should be, or the problems with the run's last words."""
        return "; ".join([*self.problems, self.error]) if self.problems else self.ends


KINDS = ("killed", "stopped", "stuck", "raising")
PARTS: dict[str, tuple[str, int, str, tuple[str, ...]]] = {
    "hub": ("hub", 0, "grpo", ()),
    "trainer": ("trainer", 0, "grpo", ()),
    "trainer, rank 1 of 2": ("trainer", 1, "grpo", ("trainer.fsdp=2",)),
    "reference": ("reference", 0, "grpo", ("loss.kl_coef=0.01",)),
    "reference, rank 1 of 2": ("reference", 1, "grpo", ("loss.kl_coef=0.01", "reference.fsdp=2")),
    "critic": ("critic", 0, "ppo", ()),
    "critic, rank 1 of 2": ("critic", 1, "ppo", ("critic.fsdp=2",)),
    "generator": ("generator-0", 0, "grpo", ()),
    "generator, rank 0 of 2": ("generator-0", 0, "grpo", ("generator.tp=2",)),
    "generator, rank 1 of 2": ("generator-0", 1, "grpo", ("generator.tp=2",)),
    "rollout worker": ("rollout-0", 0, "grpo", ("rollout.blocked_seconds=8",)),
    "verifier": ("verifier", 0, "grpo", ()),
    "fork server": ("fork server", 0, "grpo", ()),
    "generator of a server": ("generator-0", 0, "serve", ()),
}
"""Process, rank, app and settings by what is to break."""

UPDATING = {"hub": "commit", "trainer": "stage", "generator": "pull"}
RAISING = {
    "hub": ("accept a group", "commit", "write the log", "thread run log"),
    "trainer": ("train", "stage", "write a checkpoint"),
    "reference": ("annotate",),
    "critic": ("learn values",),
    "generator": ("decode", "pull", "apply", "task weight follower"),
    "rollout worker": (
        "episode",
        "judge",
        "task verifier",
        "task connection: samples",
        "task connection: open",
        "thread loop watchdog",
        "task agents' endpoint",
    ),
    "generator of a server": ("decode",),
}
"""Endpoints, tasks and threads by process; the engine's thread runs `decode` and `apply`."""
STUCK = {
    "hub": ("write the log",),
    "trainer": ("train", "stage", "write a checkpoint"),
    "reference": ("annotate",),
    "critic": ("learn values",),
    "generator": ("decode", "pull", "apply"),
    "generator of a server": ("decode",),
}
"""Work that may never end, by process."""
OVERRIDES = {"write a checkpoint": ("checkpoint.every=1",), "task agents' endpoint": ("rollout.endpoint={}",)}
"""Settings without which a moment never comes."""
NOT_STARTING = ("verifier", "fork server")
"""A pool starts a verifier anew then, as it does later; and what a fork server has not started starts without it."""
OF_TWO_RANKS = {"generator": ("agree",)}
"""And those that only a process of several ranks has."""
ENDPOINTS = {
    "train": "trainer.step",
    "stage": "trainer.publish",
    "commit": "trainer.publish",  # whose call it was
    "annotate": "reference.annotate",
    "learn values": "critic.step",
    "write a checkpoint": "trainer.write",
}
"""The call of the controller that an exception at a point ends."""
GOES_ON_AFTER = {"episode", "judge", "accept a group", "task verifier", "task connection: open"}
"""Where an exception fails what is in hand there and nothing else."""


def cases() -> Iterator[Case]:
    """The whole matrix."""
    for part in PARTS:
        role, _, several = part.partition(", rank")
        for kind in KINDS[:2]:
            whens = ["starting", "idle", "working", *([UPDATING[role]] if role in UPDATING else [])]
            for when in whens if PARTS[part][2] != "serve" else ["decode"]:
                if not (when == "starting" and role in NOT_STARTING):
                    yield case(part, kind, when)
        for when in STUCK.get(role, ()):
            yield case(part, "stuck", when)
        for when in (*RAISING.get(role, ()), *(OF_TWO_RANKS.get(role, ()) if several else ())):
            yield case(part, "raising", when)


def case(part: str, kind: str, when: str) -> Case:
    """One case of the matrix."""
    process, rank, app, overrides = PARTS[part]
    role = part.partition(", rank")[0]
    fault = Fault(process=process, rank=rank, kind=kind, when=when)
    ends, says = FAILS, f"{process} died"
    if process == "generator-0" and when != "starting":  # only a replica that has served is replaced
        ends, says = REPLACED, "generator 0 serves again"
    elif role == "verifier" or when in GOES_ON_AFTER or (role, kind) == ("fork server", "stopped"):
        ends, says = GOES_ON, ""
    elif role == "fork server":
        says = " died: process "  # each that it has started
    elif (kind, when) == ("raising", "write the log"):
        says = "the run's log cannot be written"
    elif when in ENDPOINTS and kind == "raising":
        says = f"{ENDPOINTS[when]} failed: "
    stuck = (f"hosts.stuck_seconds={STUCK_SECONDS}",) if kind == "stuck" else ()
    return Case(
        part=part, fault=fault, ends=ends, says=says, app=app, overrides=(*overrides, *stuck, *OVERRIDES.get(when, ()))
    )


class LaunchedServer(LaunchedRun):
    """`python -m apps.serve.main`, as a run whose steps are answers."""

    answered = 0

    def __init__(self, folder: Path, model: Path, *settings: str, fault: Sequence[str]):
        self.folder, self.output = folder, folder.with_suffix(".out")
        small = ("port=0", "generator.max_context=128", "generator.max_running=16", "generator.kv_cache_gib=0.05")
        arguments = (*fault, f"path={model}", f"folder={folder}", *small, *settings)
        variables = as_users_have(os.environ)
        self.process = Program("bench.saboteur", *arguments, output=self.output, variables=variables, folder=ROOT)
        self.wait_for_text(" at http://", START_SECONDS)

    def steps(self) -> int:
        """How many requests were answered."""
        return self.answered

    def wait_for_steps(self, count: int, seconds: float = LIMIT_SECONDS) -> None:
        """Ask until this many requests are answered."""
        url = self.text().partition(" at ")[2].split()[0]
        while self.answered < count:
            asked = httpx.post(f"{url}/completions", json={"model": "any", "prompt": "1+2="}, timeout=seconds)
            assert asked.status_code == HTTPStatus.OK, asked.text
            self.answered += 1

    def summary(self) -> dict[str, int]:
        """A server admits no groups."""
        return dict.fromkeys(("admitted", "trained", "rejected", "failed"), 0)


def launched(case: Case, folder: Path, model: Path) -> LaunchedRun:
    """The app of a case, with its fault."""
    settings = (f"hosts.silent_seconds={SILENT_SECONDS}", *case.overrides)
    fault = (case.app, json.dumps(asdict(case.fault)))
    if case.app == "serve":
        return LaunchedServer(folder, model, *settings, fault=fault)
    settings += ("steps=10000", "checkpoint.restarts=0")
    return LaunchedRun(folder, model, *settings, app=case.app, module="bench.saboteur", arguments=fault)


def run_case(case: Case, folder: Path, model: Path) -> Result:
    """Run it, and look at what it leaves behind."""
    memory = orphaned_memory()
    run = launched(case, folder, model)
    problems, seconds, judged = [], 0.0, False
    children: list[int] = []
    try:
        run.wait_for_text(PLANTED, START_SECONDS)
        planted = time.monotonic()
        children = run.processes()
        problems += _fails(run, case) if case.ends == FAILS else _goes_on(run, case)
        seconds = time.monotonic() - planted
        problems += _stops(run, case)
        judged = True
    except AssertionError as error:
        problems.append(str(error).splitlines()[0])
    finally:
        for pid in [*run.processes(), run.process.pid]:
            if alive(pid) and not judged:
                os.kill(pid, signal.SIGKILL)
        run.process.wait()
    if NOT_PLANTED in run.text():
        problems.append("the fault was not planted")
    problems += [f"process {pid} is left" for pid in gone_within(children, LEFT_SECONDS)]
    problems += [f"/dev/shm/{name} is left" for name in orphaned_within(memory, LEFT_SECONDS)]
    error = next((line for line in run.text().splitlines() if line.startswith("error:")), "")
    return Result(name=case.name, ends=case.ends, seconds=round(seconds, 1), error=error, problems=problems)


def _fails(run: LaunchedRun, case: Case) -> list[str]:
    code, text = run.wait(LIMIT_SECONDS), run.text()
    problems = [] if code == 1 else [f"exit code {code}"]
    reason = {"raising": "sabotage", "stuck": "hosts.stuck_seconds"}.get(case.fault.kind, "")
    if not any(case.says in said and reason in said for said in text.splitlines()):
        problems.append(f"no {case.says!r} with {reason!r} in the output")
    if "Traceback" in text:
        problems.append("a traceback in the output")
    return problems


def _goes_on(run: LaunchedRun, case: Case) -> list[str]:
    if case.app == "serve":
        run.wait_for_steps(1)  # the first request breaks it, and is answered by the replacement
    if case.says:
        run.wait_for_text(case.says, LIMIT_SECONDS)
    run.wait_for_steps(run.steps() + 3, LIMIT_SECONDS)
    return []


def _stops(run: LaunchedRun, case: Case) -> list[str]:
    problems = []
    if case.ends != FAILS:
        run.process.send_signal(signal.SIGINT)
        code = run.wait(LIMIT_SECONDS)
        problems += [] if code == (0 if case.app == "serve" else INTERRUPTED) else [f"exit code {code} after Ctrl-C"]
    summary = run.summary()
    if summary["admitted"] != summary["trained"] + summary["rejected"] + summary["failed"]:
        problems.append(f"the accounting is open: {summary}")
    return problems


def line(result: Result) -> str:
    """The result as a line of text."""
    return f"{result.name}: {result.then}, {result.seconds:.0f} s"


def table(results: Sequence[Result]) -> str:
    """The results as a table in Markdown: a row for each part, with the seconds from each fault to its end."""
    by_part: dict[str, dict[str, dict[str, list[str]]]] = {}
    for result in results:
        part, kind, when = result.name.split("; ")
        ends = f"**{result.then}**" if result.problems else result.then
        ended = by_part.setdefault(part, {}).setdefault(kind, {}).setdefault(ends, [])
        ended.append(f"{when.removeprefix('task ').removeprefix('thread ')} {result.seconds:.0f} s")
    lines = [f"| what breaks | {' | '.join(KINDS)} |", "|---" * (1 + len(KINDS)) + "|"]
    for part, by_kind in by_part.items():
        cells = [
            "; ".join(f"{how}: {', '.join(times)}" for how, times in by_kind.get(kind, {}).items()) for kind in KINDS
        ]
        lines.append(f"| {' | '.join([part, *cells])} |")
    return "\n".join(lines)


def main() -> int:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this in it")
    parser.add_argument("--missing", action="store_true", help="only cases that the JSON file has no good result of")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    exit_on_terminate()
    known = {}
    if chosen.json is not None and chosen.json.exists():
        known = {one["name"]: Result(**one) for one in json.loads(chosen.json.read_text())}
    everything = list(cases())
    asked = [one for one in everything if chosen.only in one.name]
    if chosen.missing:
        asked = [one for one in asked if one.name not in known or known[one.name].problems]
    from goaly.models.tiny_model import TinyModel, write_tiny_model

    with tempfile.TemporaryDirectory() as scratch:
        model = write_tiny_model(Path(scratch) / "model", TinyModel())
        for number, one in enumerate(asked):
            known[one.name] = run_case(one, Path(scratch) / f"run{number}", model)
            print(line(known[one.name]), flush=True)
            results = [known[each.name] for each in everything if each.name in known]
            if chosen.json is not None:
                chosen.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
            if chosen.markdown is not None:
                chosen.markdown.write_text(table(results) + "\n")
    return int(any(known[one.name].problems for one in asked))


if __name__ == "__main__":
    sys.exit(main())
