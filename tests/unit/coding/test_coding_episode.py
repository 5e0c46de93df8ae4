"""An attempt at a task from its sandbox to its reward, with a policy whose answers are known."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_chat import SUBMIT, ScriptedChat, bash, calls

from goaly.agents.gateway import Endpoint
from goaly.coding import episode as module
from goaly.coding.episode import CodingEpisode, WorkLeft
from goaly.coding.settings import CodingSettings
from goaly.coding.task_files import read_prompts
from goaly.coding.workspace import Workspaces
from goaly.environments.protocol import EnvironmentFailed
from goaly.grading.task import CodingTask, Grade, GradingFailed
from goaly.prompts.prompt import Prompt
from goaly.rollout.running_episodes import EpisodeTimeout
from goaly.sandboxes.contract import SandboxDied, SandboxUnavailable
from goaly.sandboxes.settings import SandboxSettings

TOML = """
[task]
problem = "add(2, 3) is 6."
fail_to_pass = ["tests/test_hidden.py::test_sums"]
[seconds]
agent = 120
"""
FILES = {
    "task.toml": TOML,
    "repository/adder.py": "def add(a, b):\n    return a * b\n",
    "hidden_tests/tests/test_hidden.py": "from adder import add\n\n\ndef test_sums():\n    assert add(2, 3) == 5\n",
}
REPAIR = calls(("edit", {"path": "adder.py", "old": "a * b", "new": "a + b"}))
EDITED = {"adder.py": "+1 -1"}


@pytest.fixture
def prompt(tmp_path: Path) -> Prompt:
    for name, text in FILES.items():
        (tmp_path / "adding" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "adding" / name).write_text(text)
    (found,) = read_prompts(str(tmp_path / "adding"))
    return found


class EpisodeChat(ScriptedChat):
    """Keeps what the episode notes, and its reward."""

    def __init__(self, *answers: Any):
        super().__init__(*answers)
        self.notes: list[Mapping[str, Any]] = []
        self.marks: dict[str, Any] = {}
        self.reward: float | None = None

    def note(self, note: Mapping[str, Any]) -> None:
        self.notes.append(note)

    def mark(self, name: str, value: Any) -> None:
        self.marks[name] = value

    def rewarded(self, reward: float) -> None:
        self.reward = reward

    def finish(self) -> list[Any]:
        return []


@pytest.fixture
async def attempt(prompt: Prompt) -> AsyncIterator[Any]:
    """Runs the episode of these settings with these answers; its chat."""
    opened: list[CodingEpisode] = []

    async def attempted(*answers: Any, kind: type[CodingEpisode] = CodingEpisode, **settings: Any) -> EpisodeChat:
        episode = kind(CodingSettings(**settings), SandboxSettings())
        opened.append(episode)
        chat = EpisodeChat(*answers)
        endpoint = Endpoint(base_url="http://127.0.0.1:9/v1", api_key="key", session_id="1")
        context: Any = SimpleNamespace(chat=chat, sample_index=0, endpoint=endpoint)
        await episode(prompt, context)
        return chat

    yield attempted
    for one in opened:
        await one.close()


async def test_a_repaired_repository_passes_and_all_is_noted(attempt):
    chat = await attempt(bash("cat adder.py"), REPAIR, SUBMIT)
    assert chat.reward == 1.0
    look, edit, submit, end, patch, grade = chat.notes
    assert (look["output"], look["exit_code"]) == ("def add(a, b):\n    return a * b\n", 0)
    assert (edit["tool"], edit["changes"]) == ("edit", EDITED)
    assert (submit["tool"], end["how"]) == ("submit", "submitted")
    assert "+    return a + b\n" in patch["patch"]
    assert (grade["score"], grade["resolved"]) == (1.0, True)
    assert grade["outcomes"] == {"tests/test_hidden.py::test_sums": "passed"}


async def test_a_subclass_gives_its_own_grade(attempt):
    class Halved(CodingEpisode):
        async def grade(self, workspaces: Workspaces, task: CodingTask, left: WorkLeft) -> Grade:
            return replace(await super().grade(workspaces, task, left), score=0.5)

    chat = await attempt(REPAIR, SUBMIT, kind=Halved)
    assert (chat.reward, chat.notes[-1]["score"], chat.notes[-1]["resolved"]) == (0.5, 0.5, True)


async def test_a_program_of_this_hosts_files_works_and_its_change_is_graded(attempt, tmp_path: Path):
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/change").write_text("s/a [*] b/a + b/")
    (tmp_path / "run.sh").write_text("cat > /dev/null; sed -i -f /opt/agent/change adder.py; echo done")
    files = {"/opt/agent": str(tmp_path / "agent"), "/opt/run.sh": str(tmp_path / "run.sh")}
    chat = await attempt(agent="program", command=("sh", "/opt/run.sh"), files=files)
    program, *_, grade = chat.notes
    assert (program["output"], program["exit_code"], chat.reward, grade["resolved"]) == ("done\n", 0, 1.0, True)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"agent": "/usr"},
            "coding.files: agent must be an absolute path in the sandbox, without '..' and '/' at its end",
        ),
        ({"/opt/../etc": "/usr"}, "coding.files: /opt/../etc must be an absolute path"),
        ({"/opt/agent": "/absent"}, "coding.files./opt/agent=/absent: does not exist here"),
    ],
)
def test_files_that_cannot_be_in_a_sandbox_are_told(files: dict[str, str], said: str):
    (line,) = CodingSettings(files=files).problems("coding.")
    assert line.startswith(said)


async def test_hidden_tests_and_the_solution_are_not_in_the_agents_sandbox(attempt):
    chat = await attempt(bash("find . -name 'test_hidden*'; grep -r 'add(2, 3)' . /tmp || true"), SUBMIT)
    assert chat.notes[0]["output"] == ""
    assert chat.reward == 0.0


@pytest.mark.parametrize(
    ("answers", "settings", "how"),
    [
        ([REPAIR, bash("true")], {"turns": 2}, "turns"),
        ([REPAIR, bash("sleep 60")], {"agent_seconds": 1.0}, "seconds"),
    ],
)
async def test_an_attempt_that_a_limit_ends_is_graded_as_it_stands_or_has_the_reward_of_the_setting(
    attempt, answers: list[Any], settings: Any, how: str
):
    chat = await attempt(*answers, **settings)
    assert (chat.reward, [one["how"] for one in chat.notes if one.get("kind") == "end"]) == (1.0, [how])
    with pytest.raises(EpisodeTimeout, match=how):
        await attempt(*answers, **settings, cut_off="reward")


async def test_a_patch_that_is_too_large_scores_nothing(attempt):
    chat = await attempt(bash("head -c 3000000 /dev/urandom > big"), SUBMIT)
    assert chat.reward == 0.0
    assert "bytes" in chat.notes[-1]["refused"]


async def test_a_patch_that_could_not_be_graded_ends_the_episode_without_a_reward(
    attempt, monkeypatch: pytest.MonkeyPatch
):
    async def fails(*_: Any) -> Any:
        raise GradingFailed("its sandbox died")

    monkeypatch.setattr(module, "grade", fails)
    with pytest.raises(EnvironmentFailed, match="its sandbox died"):
        await attempt(SUBMIT)


async def test_a_sandbox_that_died_ends_the_episode_without_a_reward(attempt, monkeypatch: pytest.MonkeyPatch):
    start, started = Workspaces.start, []

    async def kept(*given: Any) -> Any:
        started.append(await start(*given))
        return started[-1]

    async def say(self: Any, messages: Any, tools: Any = ()) -> Any:
        await started[-1].stop()
        return bash("true")

    monkeypatch.setattr(Workspaces, "start", kept)
    monkeypatch.setattr(EpisodeChat, "say", say)
    with pytest.raises(SandboxDied):
        await attempt()


async def test_a_host_of_sandboxes_that_does_not_open_ends_the_episode_and_the_next_one_tries_again(
    attempt, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
):
    opened = module.open_host

    async def fails(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(module, "open_host", opened)
        raise SandboxUnavailable("no user namespaces")

    monkeypatch.setattr(module, "open_host", fails)
    episode, chat = CodingEpisode(CodingSettings(), SandboxSettings()), EpisodeChat(SUBMIT)
    context: Any = SimpleNamespace(chat=chat, sample_index=0)
    with pytest.raises(EnvironmentFailed, match="no user namespaces"):
        await episode(prompt, context)
    await episode(prompt, context)
    assert chat.reward == 0.0
    await episode.close()
