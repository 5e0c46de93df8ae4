"""The tiny coding tasks: held-out words, solutions that solve them, and demonstrations as the tools would answer."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from apps.coding.tiny import TEST, copying, demonstration, write_task
from apps.coding.tiny_module import HELD_OUT_FRACTION, Module, module
from goaly.coding.command_blocks import command_blocks
from goaly.coding.grading import grade
from goaly.coding.settings import CodingSettings
from goaly.coding.task_files import TaskFile, TaskSettings, load, read_prompts
from goaly.coding.tools import Tools
from goaly.coding.workspace import Workspaces
from goaly.prompts.prompt import Split, split_of


def words_of(made: Module) -> set[str]:
    """The names and the pairs of arguments of a module."""
    return {word for one in made.functions for word in (one.name, "".join(one.arguments)) if len(word) > 1}


@pytest.fixture
def tasks(tmp_path: Path) -> TaskFile:
    random = Random("tasks")
    for split in Split:
        for number in range(3):
            write_task(tmp_path / f"{split}-{number}", module(random, split), random)
    return load(tmp_path, TaskSettings(root="/"))


def test_held_out_modules_have_no_word_of_a_trained_one():
    trained = set().union(*(words_of(module(Random(seed), Split.TRAIN)) for seed in range(400)))
    held_out = set().union(*(words_of(module(Random(seed), Split.HELD_OUT)) for seed in range(400)))
    assert len(held_out) > 20
    assert not trained & held_out


def test_the_split_of_a_prompt_is_that_of_its_words(tasks: TaskFile, tmp_path: Path):
    for prompt in read_prompts(str(tmp_path)):
        assert prompt.id.startswith(split_of(prompt, HELD_OUT_FRACTION))


@pytest.mark.parametrize("seed", range(20))
def test_each_wrong_sign_fails_a_visible_call_and_a_hidden_one(seed: int):
    made = module(Random(seed), Split.TRAIN)
    for one, visible in zip(made.functions, made.visible, strict=True):
        for calls in (visible, one.calls(Random(seed))):
            assert all(one.failing(sign, calls) for sign in one.other_signs(one.right_sign))


async def test_a_solution_solves_its_task_and_no_change_does_not(tasks: TaskFile, workspaces: Workspaces):
    for task in tasks:
        assert (await grade(workspaces, task, "")).score == 0.0
        sandbox = await workspaces.start(task)
        assert task.solution is not None
        assert (await sandbox.run(task.solution)).exit_code == 0
        patch = await workspaces.patch(task, sandbox)
        assert (await grade(workspaces, task, patch)).score == 1.0
        await sandbox.stop()


def demonstrated() -> Iterator[tuple[Module, list[tuple[str, str]]]]:
    """Modules and what is done on them: the commands, and what they are said to print."""
    for seed in range(5):
        said = demonstration(Random(seed))["messages"]
        made = module(Random(seed), Split.TRAIN)
        commands = [command_blocks(message["content"])[0] for message in said[1::2]]
        yield made, list(zip(commands, [message["content"] for message in said[2::2]], strict=False))


async def test_demonstrated_commands_print_what_the_demonstration_says(workspaces: Workspaces, tmp_path: Path):
    for number, (made, steps) in enumerate(demonstrated()):
        write_task(tmp_path / f"task-{number}", made, Random(0))
        task = load(tmp_path / f"task-{number}", TaskSettings(root="/"))[0]
        sandbox = await workspaces.start(task)
        assert steps[0][0].strip() == TEST
        async with Tools(sandbox, task.workdir, CodingSettings()) as tools:
            for command, output in steps:
                assert await tools.bash(command) == output
        await sandbox.stop()


def test_an_answer_repeats_the_end_of_the_message_before_it():
    said = [message["content"] for message in copying(Random(0))["messages"]]
    assert all(text.endswith(answer) for text, answer in zip(said[::2], said[1::2], strict=True))
