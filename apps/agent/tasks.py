"""The tasks of the agents here: `python -m apps.agent.tasks FOLDER` writes their prompts and demonstrations.

    calculator.jsonl     demonstrations: a tool adds two numbers, and the answer is its result
    guessing.jsonl       demonstrations: guesses at a number, with the game's hints
    guessing_game.jsonl  prompts: a game for each number; guessing_evaluation.jsonl has the same

The teachers know the form and nothing else. The one with the calculator gives up at half of its decisions: instead of
calling the tool, and instead of copying its result. The one that plays guesses at random. RL has to teach the rest.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from random import Random
from subprocess import run
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from goaly.prompts.prompt import Prompt

GIVE_UP_RATE = 0.5
GIVEN_UP = "0"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
LARGEST = 7
GUESSES = 3
"""Enough for every number, if each guess halves what is left."""


def exact(prompt: "Prompt", response: str) -> float:
    """1 if the response is exactly the answer, else 0."""
    return float(response == prompt.answer)


def done(prompt: "Prompt", response: str) -> float:
    """1 if the command in the prompt's answer ends with 0 in the folder of the agent's program, else 0."""
    assert prompt.answer is not None, "the command that judges the task"
    return float(run(prompt.answer, shell=True, cwd=prompt.metadata["episode_folder"], check=False).returncode == 0)


def additions(count: int, random: Random) -> Iterator[Mapping[str, Any]]:
    """Chats of a teacher with a calculator."""
    for _ in range(count):
        numbers = [random.randrange(10 ** (digits - 1), 10**digits) for digits in [random.choice((2, 3))] * 2]
        said: list[Mapping[str, Any]] = [{"role": "user", "content": f"{numbers[0]}+{numbers[1]}="}]
        result = GIVEN_UP
        if random.random() >= GIVE_UP_RATE:
            call = {"name": "add", "arguments": dict(zip("ab", numbers, strict=True))}
            said.append({"role": "assistant", "tool_calls": [{"type": "function", "function": call}]})
            said.append({"role": "tool", "content": str(sum(numbers))})
            if random.random() >= GIVE_UP_RATE:
                result = str(sum(numbers))
        said.append({"role": "assistant", "content": result})
        yield {"messages": said, "tools": [ADD]}


def games(count: int, random: Random) -> Iterator[Mapping[str, Any]]:
    """Chats of a teacher who guesses."""
    for _ in range(count):
        number = random.randint(1, LARGEST)
        said = [{"role": "user", "content": f"1-{LARGEST}?"}]
        for _ in range(GUESSES):
            guess = random.randint(1, LARGEST)
            said.append({"role": "assistant", "content": str(guess)})
            if guess == number:
                break
            said.append({"role": "user", "content": ">" if number > guess else "<"})
        yield {"messages": said if said[-1]["role"] == "assistant" else said[:-1]}


def main(folder: Path) -> None:
    """Write the files."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "calculator.jsonl", additions(20_000, Random("calculator")))
    _write(folder / "guessing.jsonl", games(5_000, Random("guessing")))
    prompts = [{"id": f"game-{n}", "prompt": f"1-{LARGEST}?", "answer": str(n)} for n in range(1, LARGEST + 1)]
    _write(folder / "guessing_game.jsonl", prompts)
    _write(folder / "guessing_evaluation.jsonl", prompts)


def _write(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
