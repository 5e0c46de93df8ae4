"""Hundreds of coding agents at once, while sandboxes, workers, their server and a generator are killed.

    python -m bench.coding [--sessions N] [--kills N] [--steps N] [--seed S] [--backend NAME] [--json FILE]
                           [key=value ...]

The agents are scripts in real sandboxes, and their patches are graded (`bench/coding_session.py`); the policy is random
and small. A run without kills, and the same with them: after random times, over about as long as the first one took,
one of these gets SIGKILL: the first process of a sandbox, a rollout worker, a generator, and with `--backend remote`
the server of sandboxes, which starts again. Then the run's log, the host's processes, mounts and control groups are
counted:

    trained, rejected, failed  how prompts ended, and the reasons of failures
    unaccounted                tickets without an end in the log, but for those that the end of the run stopped
    doubled                    prompts that more than one ticket has, and commands of an agent that ran twice
    orphans                    sandboxes, processes, mounts and control groups that are left
    utilization                busy time of the generator's engine over the time of the run, with kills and without

The exit code is 1 if anything is unaccounted, doubled or left.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.chaos import accounts, runs_of
from bench.durable import Launched
from bench.report import Machine, exit_on_terminate, options, write
from goaly.backlog.group_queue import RUN_ENDED
from goaly.backlog.ledger import State
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.sandboxes.control_groups import PREFIX, hierarchies
from goaly.sandboxes.reaper import live_sandboxes
from tests.loop.launched import spawned

ERRORS = 5
GROUP_SIZE = 4
TASKS = 64
PAUSE = 2.0
"""Least mean time between two kills."""
KINDS = ("sandbox", "sandbox", "sandbox", "rollout", "generator")
LIVED = 5.0
"""Seconds after which a replaced process is killed again."""
PORT = 8731
KEY = "bench-coding"
TASK = """
[task]
problem = "{number}?"
fail_to_pass = ["tests/test_hidden.py::test_sums"]
safe_to_repeat = true
"""
FILES = {
    "repository/adder.py": "def add(a, b):\n    return a * b\n",
    "hidden_tests/tests/test_hidden.py": "from adder import add\n\n\ndef test_sums():\n    assert add(2, 3) == 5\n",
}
MODEL = TinyModel(dim=32, layers=1, heads=1, kv_heads=1, hidden_dim=64)


def write_tasks(folder: Path) -> Path:
    """Small tasks, which are alike; their names begin with the folder's."""
    for number in range(TASKS):
        for name, text in {"task.toml": TASK.format(number=number), **FILES}.items():
            file = folder / "tasks" / f"{folder.name}-{number}" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return folder / "tasks"


def sandboxes_of(folder: Path) -> list[int]:
    """The first processes of sandboxes with tasks of this folder."""
    return [one.pid for one in live_sandboxes() if one.labels.get("task", "").startswith(folder.name)]


def settings(folder: Path, sessions: int, steps: int) -> list[str]:
    """The settings of both runs."""
    groups, model = sessions // GROUP_SIZE, write_tiny_model(folder / "model", MODEL)
    return [
        *(f"model.path={model}", f"steps={steps}", "telemetry.progress=off", "prompts.task=null"),
        *(
            f"prompts.files=[{write_tasks(folder)}]",
            "generator.max_context=512",
            "generator.max_running=128",
            "generator.kv_cache_gib=0.25",
        ),
        *("backlog.row_length=1024", "trainer.microbatch_rows=8", "trainer.optimizer.lr=1.0e-4"),
        *("prompts.reader=goaly.coding.task_files:read_prompts", "coding.agent=text", "coding.changes=false"),
        *(f"backlog.group_size={GROUP_SIZE}", f"backlog.groups_per_step={groups // 3}", "backlog.max_staleness=4"),
        *(f"backlog.window={groups}", "sampling.max_tokens=16", "rollout.workers=2", "rollout.episode_retries=3"),
        *(f"sandbox.pool.most={sessions}", "sandbox.limits.memory_mib=256", "sandbox.limits.disk_mib=64"),
        *("evaluation.prompts=1", "checkpoint.restarts=1000", "checkpoint.every=2", "generator.replicas=2"),
        "coding.snapshot_every=2",
    ]


class Victims:
    """The processes of a run that may be killed, and its server of sandboxes."""

    def __init__(self, run: Launched, server: "Server | None", chance: random.Random) -> None:
        self._run = run
        self._server = server
        self._chance = chance
        self.killed: Counter[str] = Counter()

    def kill_one(self) -> None:
        """Kill one that lives, of a kind that is drawn."""
        kind = self._chance.choice([*KINDS, *(["server"] if self._server else [])])
        if kind == "server":
            assert self._server
            self._server.restart()
        else:
            pids = sandboxes_of(self._run.run_dir.parent) if kind == "sandbox" else self._old(kind)
            if not pids:
                return
            try:
                os.kill(self._chance.choice(sorted(pids)), signal.SIGKILL)
            except ProcessLookupError:
                return
        self.killed[kind] += 1

    def _old(self, name: str) -> list[int]:
        """The processes of a role that have worked for a while: two deaths in a row say nothing of recovery."""
        found = spawned(self._run.run_dir, name)
        return [pid for pid in found if time.time() - Path(f"/proc/{pid}").stat().st_ctime > LIVED]


class Server:
    """A server of sandboxes on this host, for the backend `remote`."""

    def __init__(self, sessions: int) -> None:
        self._words = ["apps.sandboxes.main", f"port={PORT}", f"sandboxes={2 * sessions}"]
        self._start()

    def _start(self) -> None:
        variables = {**os.environ, "GOALY_SANDBOX_TOKENS": KEY}
        self._process = subprocess.Popen(
            [sys.executable, "-m", *self._words], env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._process.stdout
        self._process.stdout.readline()

    def restart(self) -> None:
        """Kill it, and start another in its place."""
        self.end()
        self._start()

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.communicate()


def measured(
    run_dir: Path, words: list[str], sessions: int, backend: str, kills: int, seed: int, pause: float = PAUSE
) -> dict[str, Any]:
    """One run with kills at this mean distance in seconds, and what is left after it."""
    before = left()
    server = Server(sessions) if backend == "remote" else None
    if server:
        os.environ["GOALY_SANDBOX_KEY"] = KEY
        words = [*words, "sandbox.backend=remote", f"sandbox.remote.servers=[http://127.0.0.1:{PORT}]"]
    began = time.monotonic()
    run = Launched(run_dir, *words, f"run_dir={run_dir}", module="bench.coding_session")
    chance = random.Random(seed)
    victims = Victims(run, server, chance)
    most = 0
    try:
        run.wait(run.steps)
        while run.process.poll() is None:
            most = max(most, len(sandboxes_of(run_dir.parent)))
            try:
                run.process.wait(chance.uniform(0.0, 2 * pause))
            except subprocess.TimeoutExpired:
                if victims.killed.total() < kills:
                    victims.kill_one()
    finally:
        run.end()
        if server:
            server.end()
    seconds = time.monotonic() - began
    summary = json.loads((run_dir / "summary.json").read_text()) if (run_dir / "summary.json").exists() else {}
    steps = run.steps()
    found, after = accounts(run_dir), left_at_last(before)
    return {
        "exit_code": run.process.returncode,
        **({"errors": errors(run_dir)} if run.process.returncode else {}),
        "seconds": round(seconds, 1),
        "step_seconds": round(steps[-1]["run/seconds"] - steps[0]["run/seconds"], 1) if steps else 0.0,
        "killed": dict(victims.killed),
        "most_sandboxes": most,
        "tickets": found["tickets"],
        **{name: summary.get(name) for name in ("trained", "rejected", "failed", "reasons")},
        "retries": sum(step.get("rollout/episode_retries", 0) for step in steps),
        "unaccounted": unaccounted(found, summary.get("reasons") or {}) + found["lost"],
        "doubled": found["doubled"] + int(sum(step.get("bench/repeated_commands", 0) for step in steps)),
        "orphans": len(runs_of(run_dir)) + sum(max(0, after[name] - count) for name, count in before.items()),
        "utilization": utilization(steps),
    }


def unaccounted(found: Mapping[str, int], reasons: Mapping[str, int]) -> int:
    """Tickets of the log without an end, or with one too many, that the run has not stopped when it ended."""
    stopped = reasons.get(f"{State.REJECTED}: {RUN_ENDED}", 0)
    return abs(found["tickets"] - found["trained"] - found["failed"] - stopped)


def errors(run_dir: Path) -> list[str]:
    """The errors in the controller's log."""
    log = run_dir / "logs" / "controller.log"
    lines = log.read_text().splitlines() if log.exists() else []
    return [line for line in lines if " ERROR " in line][:ERRORS]


def utilization(steps: list[dict[str, Any]]) -> float | None:
    """Busy seconds of engines over the seconds between the first and the last step."""
    if len(steps) < 2:
        return None
    values = [step["generator/busy_seconds"] for step in steps]  # they begin again with a new process
    busy = sum(max(0.0, now - then) for then, now in pairwise(values))
    return round(busy / (steps[-1]["run/seconds"] - steps[0]["run/seconds"]), 4)


def left() -> Mapping[str, int]:
    """Numbers of things on this host that sandboxes are made of."""
    return {
        "sandboxes": len(live_sandboxes()),
        "groups": sum(len(list(tree.root.glob(f"{PREFIX}*"))) for tree in hierarchies()),
        "mounts": len(Path("/proc/mounts").read_text().splitlines()),
    }


def left_at_last(before: Mapping[str, int]) -> Mapping[str, int]:
    """The numbers once sandboxes without an owner have had their time to end."""
    until, now = time.monotonic() + 150.0, left()
    while any(now[name] > count for name, count in before.items()) and time.monotonic() < until:
        time.sleep(1.0)
        now = left()
    return now


def main() -> int:
    """Run both, print, and write the numbers where asked."""
    parser = options(__doc__, "json", sessions=300, kills=40, steps=12, seed=0, backend="namespaces")
    parser.add_argument("overrides", nargs="*", help="key=value settings of the run")
    given = parser.parse_args()
    exit_on_terminate()
    machine, folder = Machine.now(), Path(tempfile.mkdtemp(prefix="bench-coding-"))
    try:
        words = [*settings(folder, given.sessions, given.steps), *given.overrides]
        fixed = words, given.sessions, given.backend
        undisturbed = measured(folder / "undisturbed", *fixed, 0, given.seed)
        pause = max(PAUSE, undisturbed["step_seconds"] / (given.kills + 1))
        disturbed = measured(folder / "disturbed", *fixed, given.kills, given.seed, pause)
        arms = {"undisturbed": undisturbed, "disturbed": disturbed}
    finally:
        shutil.rmtree(folder)
    found = {"sessions": given.sessions, "backend": given.backend, **arms}
    print(machine)
    print(json.dumps(found, indent=1))
    write(given.json, {"machine": machine.record(), **found})
    bad = [arm for arm in arms.values() if arm["exit_code"] or arm["unaccounted"] or arm["doubled"] or arm["orphans"]]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
