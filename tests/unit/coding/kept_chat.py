"""A worker with a policy whose answers are known: what is said, noted and marked is in a file, as in a session's.

    python -m tests.unit.coding.kept_chat FILE 'JSON of what it does'

dies by SIGKILL as soon as it reads DIE in an output, or when it would grade.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from goaly.coding import episode as module
from goaly.coding.episode import CodingEpisode
from goaly.coding.settings import CodingSettings
from goaly.coding.task_files import read_prompts
from goaly.prompts.prompt import Message
from goaly.sandboxes.command import Stream
from goaly.sandboxes.settings import SandboxSettings
from tests.unit.coding.scripted_chat import ScriptedChat


class KeptChat(ScriptedChat):
    """Goes on from its file."""

    was_exhausted = False

    def __init__(self, file: Path, answers: list[Any]):
        super().__init__(*(Message(role="assistant", tool_calls=calls) for calls in answers))
        self._file = file
        self.marks: dict[str, Any] = {}
        self.notes: list[Any] = []
        self.reward: float | None = None
        for line in file.read_text().splitlines() if file.exists() else ():
            kind, name, value = json.loads(line)
            if kind == "note":
                self.notes.append(value)
            else:
                self.marks[name] = value

    def _keep(self, *record: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def note(self, note: Any) -> None:
        self.notes.append({**note, "after": len(self.shown)})
        self._keep("note", "", self.notes[-1])

    def mark(self, name: str, value: Any) -> None:
        self.marks[name] = value
        self._keep("mark", name, value)

    def rewarded(self, reward: float) -> None:
        self.reward = reward

    def finish(self) -> list[Any]:
        return []


async def attempted(file: Path, task: str, run: str, answers: list[Any], settings: Any, port: int = 1) -> KeptChat:
    """An attempt at the task by the worker of a run."""
    (prompt,) = read_prompts(task)
    chosen = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    episode = CodingEpisode(CodingSettings(**chosen), SandboxSettings(seconds_unowned=20))
    episode.run = run
    chat = KeptChat(file, answers)
    url = f"http://127.0.0.1:{port}"
    endpoint = SimpleNamespace(base_url=f"{url}/v1", root_url=url, api_key="key")
    context: Any = SimpleNamespace(chat=chat, sample_index=0, endpoint=endpoint)
    try:
        await episode(prompt, context)
    finally:
        await episode.close()
    return chat


def die(*_: Any) -> Any:
    """End this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def dying(feed: Any) -> Any:
    return lambda stream, data: die() if b"DIE" in data else feed(stream, data)


if __name__ == "__main__":
    Stream.feed = dying(Stream.feed)
    module.grade = die
    asyncio.run(attempted(Path(sys.argv[1]), **json.loads(sys.argv[2])))
