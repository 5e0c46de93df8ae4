"""Attempts whose worker or whose sandbox dies: what was done is not done again, and the attempt goes on."""

import asyncio
import json
import os
import secrets
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kept_chat import KeptChat, attempted
from scripted_chat import SUBMIT, bash, calls
from test_coding_episode import FILES

from goaly.coding import episode as module
from goaly.coding.calls import LOST_BEGINNING
from goaly.coding.episode import CodingEpisode
from goaly.coding.held_sandbox import HeldSandbox
from goaly.coding.settings import CodingSettings
from goaly.coding.task_files import read_prompts
from goaly.coding.tools import Tools
from goaly.coding.workspace import Workspaces
from goaly.environments.protocol import EnvironmentFailed
from goaly.sandboxes.contract import SandboxDied, SandboxError, SandboxSpec, SnapshotLost
from goaly.sandboxes.pool import SandboxPool
from goaly.sandboxes.server import shared_folder
from goaly.sandboxes.settings import SandboxSettings

CLEAN_LAYERS = 3
"""Of the root, of the tools, and of the task's files."""
REPAIR = calls(("edit", {"path": "adder.py", "old": "a * b", "new": "a + b"}))
STATE = bash("x=5; cd tests || mkdir -p sub && cd sub; echo one >> /tmp/log")
SEEN = bash("echo $x $(basename $PWD); cat /tmp/log")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / "adding" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "adding" / name).write_text(text)
    return tmp_path


def asked(folder: Path, *answers: Any, **settings: Any) -> dict[str, Any]:
    return {
        "task": str(folder / "adding"),
        "run": f"test-{secrets.token_hex(6)}",
        "answers": [answer.tool_calls for answer in answers],
        "settings": settings,
    }


async def killed(folder: Path, given: dict[str, Any]) -> KeptChat:
    """Run a worker until it dies, and go on in this process."""
    await worker_dies(folder, given)
    return await attempted(folder / "kept", **given)


async def worker_dies(folder: Path, given: dict[str, Any]) -> None:
    """Run a worker until it dies."""
    words = [sys.executable, "-m", "tests.unit.coding.kept_chat", str(folder / "kept"), json.dumps(given)]
    worker = await asyncio.create_subprocess_exec(*words)
    assert await asyncio.wait_for(worker.wait(), 60) == -signal.SIGKILL


def of_kind(chat: KeptChat, kind: str) -> list[Any]:
    return [one for one in chat.notes if one.get("kind") == kind]


async def test_the_next_worker_waits_for_the_command_that_was_running_and_goes_on(folder: Path):
    """coding-3."""
    running = bash("echo two >> /tmp/log; echo DIE; sleep 0.3; echo rest; (exit 3)")
    chat = await killed(folder, asked(folder, REPAIR, STATE, running, SEEN, SUBMIT))
    seen = [one[-1].content for one in chat.shown]
    assert seen[3] == f"{LOST_BEGINNING}\nrest\n[exit code 3]"
    assert seen[4] == "5 sub\none\ntwo\n"
    assert chat.reward == 1.0
    assert [one.get("tool") for one in chat.notes[:5]] == ["edit", "bash", "bash", "bash", "submit"]


async def test_what_an_earlier_worker_did_is_in_no_snapshot_of_an_earlier_state(
    folder: Path, safe: None, monkeypatch: pytest.MonkeyPatch
):
    """coding-3: nothing is repeated on top of itself, and the command that runs is not ended."""
    running = bash("echo DIE; sleep 0.3; echo $(($(wc -l < /tmp/log) + 1)) >> /tmp/log; tail -n 1 /tmp/log")
    Killing(monkeypatch, 1)  # the first call that the next worker makes
    chat = await killed(folder, asked(folder, LOG, LOG, LOG, running, LOG, SUBMIT, snapshot_every=2))
    assert [one[-1].content for one in chat.shown[1:4]] == ["1\n", "2\n", "3\n"]
    assert chat.shown[4][-1].content == f"{LOST_BEGINNING}\n4\n"
    assert chat.shown[5][-1].content == "5\n"


async def test_the_next_worker_grades_what_the_agent_left(folder: Path):
    chat = await killed(folder, asked(folder, REPAIR, SUBMIT))
    assert chat.reward == 1.0
    assert chat.shown == [], "the agent had ended"
    assert [len(of_kind(chat, kind)) for kind in ("end", "patch", "grade")] == [1, 1, 1]


async def test_a_grade_that_was_noted_is_not_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    given = asked(folder, REPAIR, SUBMIT)
    first = await attempted(folder / "kept", **given)
    monkeypatch.setattr(module, "grade", None)
    chat = await attempted(folder / "kept", **given)
    assert (chat.reward, chat.notes) == (1.0, first.notes)


async def test_a_program_is_not_started_again(folder: Path):
    works = "[ $(wc -l < /tmp/log) = 1 ] && sed -i 's/a . b/a + b/' adder.py"
    script = f"echo x >> /tmp/log; sleep 0.3; echo DIE; sleep 0.3; {works}"
    chat = await killed(folder, asked(folder, agent="program", command=["sh", "-c", script]))
    assert chat.reward == 1.0
    assert of_kind(chat, "end")[0]["how"] == "submitted"


async def test_a_program_whose_sandbox_dies_ends_its_attempt_and_the_next_one_starts_it_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """`rollout.episode_retries` makes the next one, with a chat of its own."""
    killing = Killing(monkeypatch)
    script = "echo x >> /tmp/log; [ -e /tmp/again ] || sleep 1000; sed -i 's/a . b/a + b/' adder.py"
    given = asked(folder, agent="program", command=["sh", "-c", script])
    attempt = asyncio.create_task(attempted(folder / "kept", **given))
    while "program" not in marks(folder / "kept"):  # noqa: ASYNC110  (a file tells nobody)
        await asyncio.sleep(0.01)
    os.kill(killing.held[0].sandbox.pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFailed):
        await asyncio.wait_for(attempt, 20)
    given["settings"]["command"][-1] = script.replace("sleep 1000", "true")
    chat = await attempted(folder / "again", **given)
    assert chat.reward == 1.0


def marks(file: Path) -> list[str]:
    return [json.loads(line)[1] for line in file.read_text().splitlines()] if file.exists() else []


class Slow:
    """A sandbox whose snapshot takes until it is told."""

    def __init__(self) -> None:
        self.told = asyncio.Event()

    async def snapshot(self) -> str:
        await self.told.wait()
        return "snapshot"

    async def stop(self) -> None: ...


async def test_a_snapshot_that_is_cancelled_is_forgotten_with_the_sandbox():
    forgotten = []

    async def forget(snapshot: str) -> None:
        forgotten.append(snapshot)

    workspaces: Any = SimpleNamespace(host=SimpleNamespace(forget=forget))
    chat, task = SimpleNamespace(marks={}), SimpleNamespace(id="adding")
    held = HeldSandbox(workspaces, task, chat, {})  # type: ignore[bad-argument-type]
    held._sandbox = slow = Slow()  # type: ignore[bad-assignment]
    taking = asyncio.create_task(held.keep_files())
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.sleep(0)
    slow.told.set()
    with pytest.raises(asyncio.CancelledError):
        await taking
    await held.__aexit__(None, None, None)
    assert forgotten == ["snapshot"]


class Killing:
    """Kills the attempt's sandbox before calls with these numbers, counted over all of its sandboxes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *numbers: int):
        self.held: list[Any] = []
        self.made = 0
        enter, call = HeldSandbox.__aenter__, Tools.call

        async def entered(held: HeldSandbox) -> HeldSandbox:
            self.held.append(held)
            return await enter(held)

        async def called(tools: Tools, name: str, arguments: str) -> str:
            self.made += 1
            if self.made in numbers:
                os.kill(self.held[-1].sandbox.pid, signal.SIGKILL)
            return await call(tools, name, arguments)

        monkeypatch.setattr(HeldSandbox, "__aenter__", entered)
        monkeypatch.setattr(Tools, "call", called)


LOG = bash("touch /tmp/log; echo $(($(wc -l < /tmp/log) + 1)) >> /tmp/log; tail -n 1 /tmp/log")


async def sees(folder: Path, count: int, **settings: Any) -> KeptChat:
    """An attempt that counts its calls in a file of its sandbox."""
    return await attempted(folder / "kept", **asked(folder, *[LOG] * count, SUBMIT, **settings))


@pytest.fixture
def safe(folder: Path) -> None:
    """The task allows that calls are repeated."""
    file = folder / "adding/task.toml"
    file.write_text(file.read_text().replace("[task]\n", "[task]\nsafe_to_repeat = true\n"))


@pytest.mark.parametrize(("every", "repeated"), [(None, 3), (2, 1), (1, 0)])
async def test_a_sandbox_that_dies_is_replaced_in_its_last_state_and_the_calls_since_then_are_repeated(
    folder: Path, safe: None, monkeypatch: pytest.MonkeyPatch, every: int | None, repeated: int
):
    """coding-3."""
    killing = Killing(monkeypatch, 4)
    chat = await sees(folder, 5, snapshot_every=every)
    assert [one[-1].content for one in chat.shown[1:]] == [f"{number}\n" for number in range(1, 6)]
    assert of_kind(chat, "sandbox replaced")[0]["repeated"] == repeated
    assert sum(one.get("tool") == "bash" for one in chat.notes) == 5
    assert killing.made == 6 + 1 + repeated


async def test_where_the_snapshot_is_lost_too_all_calls_are_repeated_in_the_clean_state(
    folder: Path, safe: None, monkeypatch: pytest.MonkeyPatch
):
    """coding-3."""
    Killing(monkeypatch, 4)
    start, lost = SandboxPool.start, []

    async def started(pool: SandboxPool, spec: SandboxSpec, *, origin: Any = None) -> Any:
        if spec.labels and origin is not None and len(origin.layers) > CLEAN_LAYERS:
            lost.append(origin)
            raise SnapshotLost("its server has ended")
        return await start(pool, spec, origin=origin)

    monkeypatch.setattr(SandboxPool, "start", started)
    chat = await sees(folder, 5, snapshot_every=1)
    assert [one[-1].content for one in chat.shown[1:]] == [f"{number}\n" for number in range(1, 6)]
    assert of_kind(chat, "sandbox replaced")[0]["repeated"] == 3
    assert len(lost) == 1


async def test_a_snapshot_keeps_the_shells_folder_variables_and_functions(folder: Path, safe: None):
    state = bash("mkdir -p sub; cd sub; x='a b'; export y=2; f() { echo f$x; }")
    seen = bash("basename $PWD; f; sh -c 'echo $y'; ls /absent")
    chat = await attempted(folder / "kept", **asked(folder, state, seen, SUBMIT, snapshot_every=1))
    assert chat.last.startswith("sub\nfa b\n2\nls: ")


async def test_a_shell_with_jobs_is_not_ended_for_a_snapshot(folder: Path, safe: None):
    answers = [bash("sleep 100 & :"), bash("jobs -r | wc -l"), SUBMIT]
    chat = await attempted(folder / "kept", **asked(folder, *answers, snapshot_every=1))
    assert chat.last == "1\n"


async def test_processes_that_are_no_jobs_of_the_shell_keep_files_from_being_kept(folder: Path, safe: None):
    answers = [bash("setsid sleep 100 & disown; cd /usr"), bash("pwd"), SUBMIT]
    chat = await attempted(folder / "kept", **asked(folder, *answers, snapshot_every=1))
    assert chat.last == "/usr\n"
    assert "still running" in of_kind(chat, "no snapshot")[0]["why"]


async def test_the_sandbox_of_a_task_that_is_not_safe_to_repeat_is_not_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """coding-3."""
    killing = Killing(monkeypatch, 2)
    with pytest.raises(SandboxDied):
        await sees(folder, 3)
    assert killing.made == 2


async def test_an_attempt_whose_calls_kill_its_sandbox_ends(folder: Path, safe: None, monkeypatch: pytest.MonkeyPatch):
    Killing(monkeypatch, *range(1, 99))
    with pytest.raises(SandboxDied):
        await sees(folder, 3)


async def test_when_the_server_of_sandboxes_has_died_the_next_attempt_starts_another(folder: Path):
    (prompt,) = read_prompts(str(folder / "adding"))
    episode = CodingEpisode(CodingSettings(), SandboxSettings())
    chats = [KeptChat(folder / f"kept{number}", [REPAIR.tool_calls, SUBMIT.tool_calls]) for number in range(2)]
    try:
        await episode(prompt, SimpleNamespace(chat=chats[0], sample_index=0))  # type: ignore[bad-argument-type]
        kill_server(episode.run)
        await asyncio.wait_for(host_died(episode), 20)
        await episode(prompt, SimpleNamespace(chat=chats[1], sample_index=0))  # type: ignore[bad-argument-type]
    finally:
        await episode.close()
    assert [chat.reward for chat in chats] == [1.0, 1.0]


async def host_died(episode: CodingEpisode) -> None:
    """Wait until the client of the server has noticed; it does at its next request."""
    assert episode._opening
    host = episode._opening.result().host
    while host.alive():
        with suppress(SandboxError):
            await (await host.start(SandboxSpec())).stop()


def kill_server(run: str) -> None:
    """Kill the processes of the server that this run's workers share."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if str(shared_folder(run)).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)


async def test_the_sandbox_that_died_with_its_worker_is_replaced_and_the_calls_are_repeated(folder: Path, safe: None):
    """coding-3."""
    running = bash("echo DIE; tail -n 1 /tmp/log")
    given = asked(folder, LOG, LOG, running, LOG, REPAIR, SUBMIT, snapshot_every=1)
    await worker_dies(folder, given)
    kill_server(given["run"])
    chat = await attempted(folder / "kept", **given)
    assert [one[-1].content for one in chat.shown[1:5]] == ["1\n", "2\n", "DIE\n2\n", "3\n"]
    assert (chat.reward, of_kind(chat, "sandbox replaced")[0]["repeated"]) == (1.0, 2)
    assert sum(one.get("tool") == "bash" for one in chat.notes) == 4


@pytest.mark.parametrize("is_safe", [True, False])
async def test_a_sandbox_that_is_lost_after_the_last_call_is_replaced_only_where_that_is_safe(
    folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, is_safe: bool
):
    """coding-3: the patch is never that of a sandbox without the calls."""
    if is_safe:
        request.getfixturevalue("safe")
    given = asked(folder, REPAIR, SUBMIT)
    monkeypatch.setattr(Workspaces, "patch", None)
    with pytest.raises(TypeError):
        await attempted(folder / "kept", **given)
    monkeypatch.undo()
    if not is_safe:
        with pytest.raises(SandboxError):
            await attempted(folder / "kept", **given)
        return
    assert (await attempted(folder / "kept", **given)).reward == 1.0


async def test_the_time_limit_counts_the_time_in_earlier_workers(folder: Path):
    chat = await attempted(folder / "kept", **asked(folder, REPAIR, SUBMIT))
    assert chat.marks["seconds used"] > 0
    (folder / "other").write_text('["mark", "seconds used", 121.0]\n')  # the task's limit is 120
    chat = await attempted(folder / "other", **asked(folder, REPAIR, SUBMIT))
    assert [one["how"] for one in of_kind(chat, "end")] == ["seconds"]


async def test_the_time_limit_of_a_program_counts_from_its_start(folder: Path):
    (folder / "kept").write_text(json.dumps(["mark", "program", time.time() - 121.0]) + "\n")
    chat = await attempted(folder / "kept", **asked(folder, agent="program", command=["true"]))
    assert [one["how"] for one in of_kind(chat, "end")] == ["seconds"]
