"""Does a run survive `kill -9` of any of its processes at any moment, without losing anything?

    python -m bench.chaos [--kills N] [--seed S] [--steps N] [--json FILE] [key=value ...]

A run of `configs/grpo/tiny.yaml` is disturbed: again and again, after a random time, a random process of it is killed,
the controller included. The time of every other kill is counted from the run's next step, so that a slow machine is not
always killed while it starts. A run whose controller was killed, or that ended after too many deaths, is resumed by
`--resume`. After the last kill it goes on to its end. Then its log and its folder are examined:

    lost, doubled      prompts of the mixture's order that no ticket has, or that more than one has
    failed             groups that did not end as trained
    unaccounted        tickets without an end, beyond those that the end of the run stopped
    digests            versions whose weights `python -m goaly.replay --check` made again bit for bit
    processes, memory  processes, and names in shared memory, that are left after the run
    reward             mean reward of the last steps, and of the same run undisturbed

The exit code is 1 if anything was lost, doubled, failed, unaccounted or left, or if the replay found a difference.
"""

import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.durable import Launched
from bench.report import Machine, exit_on_terminate, options, write
from tests.loop.launched import spawned

LAST_STEPS = 20
LONGEST_PAUSE = 25.0
"""Seconds before a kill."""
DEADLINE_SECONDS = 900.0


def disturbed(run_dir: Path, settings: list[str], kills: int, chance: random.Random) -> tuple[Counter[str], int]:
    """Run to the end with N kills. Returns the kills by process, and the number of resumes by hand."""
    killed: Counter[str] = Counter()
    run, resumed = Launched(run_dir, *settings), 0
    try:
        while killed.total() < kills:
            if killed.total() % 2:
                _wait_for_step(run, run_dir / "metrics.jsonl")
            try:
                code = run.process.wait(chance.uniform(0.0, LONGEST_PAUSE))
            except subprocess.TimeoutExpired:
                code = None
            if code == 0:
                return killed, resumed
            if code is None:
                names = {run.process.pid: "controller", **spawned(run_dir)}
                pid = chance.choice(sorted(names))
                os.kill(pid, signal.SIGKILL)
                killed[re.split(r"[-.]", names[pid])[0]] += 1
                if pid != run.process.pid:
                    continue
                run.process.wait()
            run, resumed = Launched(run_dir, *_resumption(run_dir, settings)), resumed + 1
        while run.process.wait(DEADLINE_SECONDS) != 0:
            run, resumed = Launched(run_dir, *_resumption(run_dir, settings)), resumed + 1
        return killed, resumed
    finally:
        run.end()


def _wait_for_step(run: Launched, metrics: Path) -> None:
    """Return once the run has done another step, or has ended."""
    size = metrics.stat().st_size if metrics.exists() else 0
    until = time.monotonic() + DEADLINE_SECONDS
    while run.process.poll() is None and (not metrics.exists() or metrics.stat().st_size <= size):
        if time.monotonic() > until:
            raise TimeoutError(f"{metrics}: no step within {DEADLINE_SECONDS:.0f} s")
        time.sleep(0.5)


def _resumption(run_dir: Path, settings: list[str]) -> list[str]:
    """The arguments that go on with the run, or start it if it was killed before it had a folder."""
    return ["--resume", str(run_dir)] if (run_dir / "config.yaml").exists() else settings


def accounts(run_dir: Path) -> dict[str, int]:
    """The counts of prompts and tickets, from the log."""
    from goaly.backlog.events import Dropped, Ticket, Trained
    from goaly.journal.records import Drawn
    from goaly.journal.run_log import records
    from goaly.plan.run_config import config_of
    from goaly.prompts.mixture import prompt_mixture
    from goaly.trajectory import Group

    drawn: dict[int, str] = {}
    admitted, trained, dropped, complete = set(), set(), set(), set()
    for record in records(run_dir / "log"):
        match record:
            case Ticket():
                admitted.add(record.index)
            case Drawn():
                drawn[record.ticket] = record.prompt.id
            case Group():
                complete.add(record.ticket)
            case Dropped():
                dropped.add(record.ticket)
            case Trained():
                trained |= set(record.tickets)
    config = config_of(run_dir)
    mixture = prompt_mixture(config.prompts)
    expected = Counter(mixture.next().id for _ in drawn)
    found = Counter(drawn.values())
    needed = config.steps * config.backlog.groups_per_step
    return {
        "tickets": len(admitted),
        "trained": len(trained),
        "lost": (expected - found).total(),
        "doubled": (found - expected).total(),
        "failed": len(dropped),
        "unaccounted": len(admitted - trained - dropped - complete) - max(0, len(admitted) - needed),
    }


def reward(run_dir: Path) -> float:
    """The mean reward of the last steps."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return statistics.fmean(line["reward/mean"] for line in lines[-LAST_STEPS:])


def runs_of(folder: Path) -> list[int]:
    """The processes whose command line names this folder, but for this one."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in command and int(entry) != os.getpid():
            found.append(int(entry))
    return found


def main() -> int:
    """Disturb, examine, print, and write the numbers where asked."""
    parser = options(__doc__, "json", kills=100, seed=0, steps=400)
    parser.add_argument("overrides", nargs="*", help="key=value settings of the run")
    arguments = parser.parse_args()
    exit_on_terminate()
    machine, memory = Machine.now(), set(os.listdir("/dev/shm"))
    folder = Path(tempfile.mkdtemp(prefix="bench-chaos-"))
    settings = ["--config", "configs/grpo/tiny.yaml", f"steps={arguments.steps}", "telemetry.progress=off"]
    settings += ["checkpoint.every=10", "evaluation.prompts=8", *arguments.overrides]
    run_dir, undisturbed = folder / "run", folder / "undisturbed"
    try:
        Launched(undisturbed, *settings, f"run_dir={undisturbed}").process.wait()
        begun = time.monotonic()
        chance = random.Random(arguments.seed)
        killed, resumed = disturbed(run_dir, [*settings, f"run_dir={run_dir}"], arguments.kills, chance)
        seconds = time.monotonic() - begun
        replayed = subprocess.run(
            [sys.executable, "-m", "goaly.replay", str(run_dir), "--check"], capture_output=True, text=True, check=False
        )
        equal = re.search(r"(\d+) digests are as recorded", replayed.stdout)
        found: dict[str, Any] = {
            "kills": killed.total(),
            "killed": dict(killed),
            "resumed_by_hand": resumed,
            "seconds": seconds,
            **accounts(run_dir),
            "digests": int(equal[1]) if equal else 0,
            "processes": len(runs_of(folder)),
            "memory": sorted(set(os.listdir("/dev/shm")) - memory),
            "reward": reward(run_dir),
            "reward_undisturbed": reward(undisturbed),
        }
    finally:
        shutil.rmtree(folder)
    print(machine)
    print(json.dumps(found, indent=1))
    if not equal:
        print(replayed.stdout, replayed.stderr)
    write(arguments.json, {"machine": machine.record(), **found})
    bad = [key for key in ("lost", "doubled", "failed", "unaccounted", "processes", "memory") if found[key]]
    return 1 if bad or not equal else 0


if __name__ == "__main__":
    sys.exit(main())
