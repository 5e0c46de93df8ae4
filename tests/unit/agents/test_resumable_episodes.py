"""Episodes that go on in another worker when theirs has died: nothing is sampled or done twice."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from agent_sessions import TOOLS
from test_session_ends import PROMPT, TICKET, Runs
from test_session_retries import kept_in

from goaly.agents.session_files import SessionFiles
from goaly.backlog.events import Dropped
from goaly.prompts.prompt import Message, Prompt
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.rollout.episode import EpisodeContext, resumable
from goaly.trajectory import Group


@pytest.fixture
def runs(chats: dict[str, ChatTokenizer]) -> Runs:
    return Runs(chats["chatml"])


async def as_a_dead_worker_leaves_it(runs: Runs, episode: Any, folder: Path, until: asyncio.Event) -> None:
    """Run a group until the event, and put back its sessions' files as they were then."""
    dead = asyncio.create_task(runs.runner(episode, files=SessionFiles(folder)).run(TICKET, PROMPT))
    await until.wait()
    kept = kept_in(folder)
    dead.cancel()
    await asyncio.wait([dead])
    for name, content in kept.items():
        (folder / name).write_bytes(content)


async def test_the_next_worker_says_and_does_only_what_is_new(runs: Runs, tmp_path: Path) -> None:
    """agents-7."""
    stopped, over = asyncio.Event(), asyncio.Event()
    did: list[tuple[int, int]] = []

    @resumable
    async def works(prompt: Prompt, context: EpisodeContext) -> Any:
        said, chat, sample = list(prompt.messages), context.chat, context.sample_index
        for turn in range(3):
            said.append(await chat.say(said, TOOLS))
            if turn >= chat.marks.get("did", 0):
                did.append((sample, turn))
                chat.note({"kind": "work", "turn": turn})
                chat.mark("did", turn + 1)
            said.append(Message(role="user", content=f"seen {turn}"))
            if turn == 1 and not over.is_set():
                if len(did) == 4:
                    stopped.set()
                await over.wait()
        return chat.finish(float(sample))

    await as_a_dead_worker_leaves_it(runs, works, tmp_path, stopped)
    before = len(runs.sampler.prompts)
    over.set()
    group = await runs.group(works, files=SessionFiles(tmp_path))
    assert isinstance(group, Group), group
    assert before == 4
    assert len(runs.sampler.prompts) == 2, "the third turn of each"
    assert sorted(did) == [(sample, turn) for sample in range(2) for turn in range(3)]
    for one in group.samples:
        assert [note["turn"] for note in one.notes] == [0, 1, 2]
        assert sum(turn.author == "policy" for turn in one.turns) == 3
    assert kept_in(tmp_path) == {}


async def test_an_episode_that_says_something_else_than_before_fails(runs: Runs, tmp_path: Path) -> None:
    stopped, over = asyncio.Event(), asyncio.Event()

    @resumable
    async def works(prompt: Prompt, context: EpisodeContext) -> Any:
        await context.chat.say([Message(role="user", content=f"now {over.is_set()}")])
        if context.sample_index == 1:
            stopped.set()
        await over.wait()
        return context.chat.finish(1.0)

    await as_a_dead_worker_leaves_it(runs, works, tmp_path, stopped)
    over.set()
    end = await runs.group(works, files=SessionFiles(tmp_path))
    assert isinstance(end, Dropped)
    assert "sent other messages than before" in end.why
    assert "now False" in end.why


async def test_an_episode_of_another_kind_says_everything_again(runs: Runs, tmp_path: Path) -> None:
    """agents-7."""
    stopped, over = asyncio.Event(), asyncio.Event()
    marks: list[Any] = []

    async def works(prompt: Prompt, context: EpisodeContext) -> Any:
        marks.append(dict(context.chat.marks))
        await context.chat.say(prompt.messages)
        context.chat.mark("did", 1)
        if context.sample_index == 1:
            stopped.set()
        await over.wait()
        return context.chat.finish(1.0)

    await as_a_dead_worker_leaves_it(runs, works, tmp_path, stopped)
    over.set()
    group = await runs.group(works, files=SessionFiles(tmp_path))
    assert isinstance(group, Group), group
    assert len(runs.sampler.prompts) == 2
    assert marks == [{}] * 4
