"""Breaks one process of a run at a chosen moment: the controller's side and the actor in that process. For `faults.py`.

    python -m bench.saboteur APP 'JSON of a Fault' --config … key=value …

runs the app as its own command does, with one more actor in the process that is to break. The product has no hooks for
this: the actor replaces a method in its process by one that breaks once, or fails what a task of its process awaits.
"""

import asyncio
import ctypes
import gc
import inspect
import json
import logging
import os
import signal
import sys
import threading
import time
from asyncio import Task
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from monarch.actor import Actor, ActorError, endpoint

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
ANSWER_SECONDS = 10.0
"""A process that has not answered by then is broken."""
STUCK_SECONDS = 1e6
STEPS = 2
"""A run works once this many steps are recorded."""
PLANTED = "sabotage: planted"
NOT_PLANTED = "sabotage: not planted"

POINTS = {
    "accept a group": "goaly.backlog.group_queue:GroupQueue.report",
    "commit": "goaly.weights.versions:Versions.staged",
    "train": "goaly.train.train_engine:TrainEngine.train_step",
    "stage": "goaly.weights.publisher:Publisher._stage",
    "annotate": "goaly.train.train_engine:TrainEngine.logprobs",
    "learn values": "goaly.train.model_engine:ModelEngine.train_step",
    "write a checkpoint": "goaly.train.saved_state:StagedState.write",
    "write the log": "goaly.journal.log_writer:LogWriter._write",
    "decode": "goaly.generate.vllm_engine:VllmEngine.step",
    "pull": "goaly.weights.subscriber:Subscriber._pull",
    "apply": "goaly.generate.vllm_engine:VllmEngine.apply",
    "episode": "goaly.rollout.group_runner:GroupRunner._run_one",
    "judge": "goaly.reward.verifier_pool:VerifierPool._judge",
    "agree": "goaly.generate.engine_loop:RankLink.all_agree",
}
"""The method of each piece of a process's work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault: the process, the kind and the moment."""

    process: str
    """The name under which the run spawned it; "verifier" is a child of rollout-0, "fork server" the controller's."""
    rank: int = 0
    kind: str
    """killed, stopped, stuck or raising."""
    when: str
    """starting, idle or working: at once then; one of POINTS: there, once the run works; "task NAME": in what that task
    awaits; "thread NAME": wherever that thread is."""


class Sabotage(RuntimeError):
    """Raised in a thread, by its class alone."""

    def __str__(self) -> str:
        return "sabotage"


class Saboteur(Actor):
    """Lives in the process that is to break."""

    @endpoint
    def plant(self, kind: str, when: str, verifier: bool) -> str:
        """Break this process, or a verifier of it: now, or at this point of its work; what will."""
        if when in POINTS:
            _break_at(POINTS[when], kind)
            return POINTS[when]
        if when.startswith("task "):
            return _fail_task(when.removeprefix("task "))
        if when.startswith("thread "):
            return _fail_thread(when.removeprefix("thread "))
        pid = _verifier() if verifier else os.getpid()
        _break(pid, kind)
        return f"process {pid}"


def _break(pid: int, kind: str) -> None:
    if kind == "raising":
        raise RuntimeError("sabotage")
    if kind == "stuck":
        time.sleep(STUCK_SECONDS)  # releases the interpreter's lock: the process answers heartbeats
        return
    os.kill(pid, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)


def _break_at(path: str, kind: str) -> None:
    module, _, name = path.partition(":")
    owner, attribute = getattr(import_module(module), name.split(".")[0]), name.split(".")[1]
    method = getattr(owner, attribute)
    over = False

    def once() -> None:
        nonlocal over
        if not over:
            over = True
            _break(os.getpid(), kind)

    @wraps(method)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        once()
        return await method(*args, **kwargs)

    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        once()
        return method(*args, **kwargs)

    setattr(owner, attribute, awaited if inspect.iscoroutinefunction(method) else called)


def _fail_task(name: str) -> str:
    """Make what a task of this name awaits raise."""
    tasks = [one for one in gc.get_objects() if isinstance(one, Task) and not one.done() and one.get_name() == name]
    for task in tasks:
        awaited: Any = task._fut_waiter  # type: ignore[attr-defined]
        while isinstance(awaited, Task):
            awaited = awaited._fut_waiter  # type: ignore[attr-defined]
        if awaited is not None:
            task.get_loop().call_soon_threadsafe(_fail, awaited)
            return repr(task)
    raise LookupError(f"no task {name!r} waits here")


def _fail(awaited: "asyncio.Future[Any]") -> None:
    if not awaited.done():
        awaited.set_exception(RuntimeError("sabotage"))


def _fail_thread(name: str) -> str:
    """Make a thread of this name raise as soon as it runs Python."""
    (found,) = [one for one in threading.enumerate() if one.name == name]
    raised = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(found.ident or 0), ctypes.py_object(Sabotage))
    assert raised == 1, f"thread {name} did not take an exception"
    return repr(found)


def _verifier() -> int:
    children = [
        int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
    ]
    return next(pid for pid in children if b"verifier_process" in Path(f"/proc/{pid}/cmdline").read_bytes())


class Doorkeeper:
    """Keeps a run idle: its first group is not admitted before the fault."""

    def __init__(self) -> None:
        self.idle, self.open = asyncio.Event(), asyncio.Event()

    def guard(self, backlog: type[Any]) -> None:
        """Have this class of backlogs ask first."""
        admitted = backlog.tickets

        async def tickets(stage: Any) -> AsyncIterator[Any]:
            self.idle.set()
            await self.open.wait()  # unblocked by the saboteur
            async for ticket in admitted(stage):
                yield ticket

        backlog.tickets = tickets


def sabotaged(hosts: type[Any], fault: Fault, door: Doorkeeper, *, trains: bool) -> type[Any]:
    """The class of an app's hosts, but the processes of the fault get a saboteur. An app that trains works once it has
    recorded steps."""

    class Sabotaged(hosts):  # type: ignore[misc]
        def spawn(self, processes: Any, *args: Any) -> Any:
            mesh = super().spawn(processes, *args)
            name = {"verifier": "rollout-0", "fork server": "rollout-0"}.get(fault.process, fault.process)
            if processes.name == name and not hasattr(self, "sabotage"):
                self.sabotage = asyncio.create_task(self.break_one(mesh))
            return mesh

        async def break_one(self, mesh: Any) -> None:
            saboteur = mesh.spawn("saboteur", Saboteur).flatten("rank").slice(rank=fault.rank)
            metrics = self._run_dir / "metrics.jsonl"
            if fault.when == "idle":
                await door.idle.wait()  # unblocked by the script
            at_work = trains and fault.when not in ("starting", "idle")
            while at_work and not _has_steps(metrics):  # noqa: ASYNC110  (a file tells nobody)
                await asyncio.sleep(LOOK_SECONDS)
            sys.stderr.write(f"{PLANTED} {json.dumps(asdict(fault))}\n")
            sys.stderr.flush()
            if fault.process == "fork server":
                for server in self._fork_servers.values():
                    _break(server._process.pid, fault.kind)
                door.open.set()
                return
            try:
                async with asyncio.timeout(ANSWER_SECONDS):  # Monarch may report the death of a rank much later
                    await saboteur.plant.call_one(fault.kind, fault.when, fault.process == "verifier")
            except ActorError as error:
                sys.stderr.write(f"{NOT_PLANTED}: {error.exception!r}\n")
            except Exception as error:  # it broke before it could answer
                logger.info("sabotage: %r", error)
            door.open.set()

    return Sabotaged


def _has_steps(metrics: Path) -> bool:
    return metrics.exists() and len(metrics.read_text().splitlines()) >= STEPS


def main() -> None:
    """Run the app of the command line with its fault."""
    from goaly.base.config import run_cli
    from goaly.plan.run_config import RunConfig
    from goaly.run import policy_server as serve
    from goaly.run import start
    from goaly.run.backlog_stage import BacklogStage
    from goaly.run.policy_server_config import PolicyServerConfig

    app, fault = sys.argv[1], Fault(**json.loads(sys.argv[2]))
    del sys.argv[1:3]
    door = Doorkeeper()
    if fault.when == "idle":
        door.guard(BacklogStage)
    trains = app != "serve"
    starter: Any = start if trains else serve
    starter.Hosts = sabotaged(starter.Hosts, fault, door, trains=trains)
    entry: Callable[..., Any] = import_module(f"apps.{app}.main").main
    settings: type[Any] = RunConfig if trains else PolicyServerConfig
    run_cli(entry, settings, prog="python -m bench.saboteur", description="An app with a fault.")


if __name__ == "__main__":
    from bench.saboteur import main as imported  # under its own name: child processes import it so

    imported()
