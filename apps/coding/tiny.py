"""Tiny coding tasks, and demonstrations of the work on them: `python -m apps.coding.tiny FOLDER [SEED]` writes

    tasks/NUMBER/          a module with a wrong line, its visible test, hidden tests and a solution, in Harbor's form
    copying.jsonl          random texts and their ends: a model with random weights learns to copy
    demonstrations.jsonl   chats of a teacher

The teacher knows the form of the work: it reads the module, replaces a line, runs the test, and submits. Which line is
wrong, what mends it, and whether to submit while the test fails is mostly chance; RL has to teach that. Held-out tasks
have other names, arguments and numbers than the trained and the demonstrated ones.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

from apps.coding.tiny_module import Function, Module, module
from goaly.coding.tools import SUBMIT
from goaly.prompts.prompt import SPLIT_KEY, Split

TASKS: Final = {Split.TRAIN: 1024, Split.HELD_OUT: 128}
DOCUMENTS: Final = 12_000
"""Chats of each kind."""
FIND_RATE: Final = 0.6
"""How often the teacher changes the function that the test names, and not another one."""
REPAIR_RATE: Final = 0.65
"""How often it writes the right line, if it is not there."""
GO_ON_RATE: Final = 0.6
"""How often it goes on when the test fails, instead of submitting."""
MOST_CHANGES: Final = 2
COPIED: Final = "0123456789abcdefghijklmnopqrstuvwxyz+-*/%=<>(),"
READ: Final = "cat m.py"
WORKDIR: Final = "/tmp/repository"
VISIBLE: Final = """\
#!/usr/bin/env -S python3 -BS
import m

for name, inputs, right in {calls}:
    result = getattr(m, name)(*inputs)
    if result != right:
        raise SystemExit(f"{{name}} of {{','.join(map(str, inputs))}} is {{result}}, not {{right}}")
print("ok")
"""
HIDDEN: Final = """\
# The process that runs the functions does not get to see the right results.
results=$(cd {workdir} && python3 -BSE -c {program})
[ "$results" = {right} ]
echo $((1 - $?)) > /logs/verifier/reward.txt
"""
TOML: Final = """\
schema_version = "1.4"

[environment]
workdir = "{workdir}"

[agent]
timeout_sec = 120

[verifier]
timeout_sec = 30

[metadata]
{key} = "{word}"
"""


def write_task(folder: Path, made: Module, random: Random) -> None:
    """Write the task of mending this module."""
    wrong = made.functions[made.wrong]
    pairs = list(zip(made.functions, made.visible, strict=True))
    calls = [(one.name, inputs, one.value(one.right_line, inputs)) for one, inputs in pairs]
    hidden = [(one, inputs) for one, many in zip(made.functions, made.hidden(random), strict=True) for inputs in many]
    program = f"from m import *; print({', '.join(f'{one.name}{inputs}' for one, inputs in hidden)})"
    right = " ".join(str(one.value(one.right_line, inputs)) for one, inputs in hidden)
    files = {
        "task.toml": TOML.format(workdir=WORKDIR, key=SPLIT_KEY, word=wrong.name),
        "instruction.md": problem_of(made),
        "environment/m.py": made.text(made.lines),
        "environment/t.py": VISIBLE.format(calls=calls),
        "tests/test.sh": HIDDEN.format(workdir=WORKDIR, program=shlex.quote(program), right=shlex.quote(right)),
        "solution/solve.sh": change_command(wrong, wrong.right_line) + "\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "environment/t.py").chmod(0o755)


def problem_of(made: Module) -> str:
    """The problem for the agent: a call with a wrong result."""
    wrong, inputs = made.functions[made.wrong], made.visible[made.wrong]
    return f"{wrong.call(inputs)} should be {wrong.value(wrong.right_line, inputs)}"


def change_command(one: Function, line: str) -> str:
    """Replaces a function by one with this last line, and runs the visible test."""
    return f"sed -i '/def {one.name}/,+1c {one.head}\\n {line}' m.py\n./t.py"


def test_output(made: Module, lines: list[str]) -> str:
    """The output of the visible test with these lines, as the agent sees it."""
    failing = made.failing(lines)
    if failing is None:
        return "ok\n"
    one, inputs = made.functions[failing], made.visible[failing]
    result, right = one.value(lines[failing], inputs), one.value(one.right_line, inputs)
    return f"{one.call(inputs)} is {result}, not {right}\n[exit code 1]"


def demonstration(random: Random) -> Mapping[str, Any]:
    """A chat of the teacher, with what its commands print."""
    made = module(random, Split.TRAIN)
    lines, said = list(made.lines), [_message("user", problem_of(made)), *_block(READ, made.text(made.lines))]
    for _ in range(MOST_CHANGES):
        at, lines[at] = _change(made, lines, random)
        said += _block(change_command(made.functions[at], lines[at]), test_output(made, lines))
        if made.failing(lines) is None or random.random() >= GO_ON_RATE:
            break
    return {"messages": [*said, *_block(SUBMIT, "")[:1]], SPLIT_KEY: made.functions[made.wrong].name}


def _change(made: Module, lines: list[str], random: Random) -> tuple[int, str]:
    """The function that the teacher changes while the test fails, and its new line."""
    at = failing = made.failing(lines)
    assert failing is not None
    if random.random() >= FIND_RATE:
        at = random.choice([index for index in range(len(lines)) if index != failing])
    one = made.functions[at]
    if random.random() < REPAIR_RATE and lines[at] != one.right_line:
        return at, one.right_line
    return at, random.choice([line for line in one.wrong_lines if line != lines[at]])


def copying(random: Random) -> Mapping[str, Any]:
    """A chat in which each answer repeats the end of the message before it."""
    said = []
    for _ in range(3):
        text = "".join(random.choices(COPIED, k=random.randint(12, 24)))
        said += [_message("user", text), _message("assistant", text[random.randint(0, len(text) - 8) :])]
    return {"messages": said}


def _block(commands: str, output: str) -> list[Mapping[str, str]]:
    return [_message("assistant", f"```\n{commands}\n```"), _message("user", output)]


def _message(role: str, content: str) -> Mapping[str, str]:
    return {"role": role, "content": content}


def main(folder: Path, seed: str) -> None:
    """Write the files."""
    for split, count in TASKS.items():
        random = Random(f"{seed}/{split}")
        for number in range(count):
            write_task(folder / "tasks" / f"{split}-{number:04d}", module(random, split), random)
    _write(folder / "copying.jsonl", copying, Random(f"{seed}/copying"))
    _write(folder / "demonstrations.jsonl", demonstration, Random(f"{seed}/demonstrations"))


def _write(file: Path, chat: Callable[[Random], Mapping[str, Any]], random: Random) -> None:
    file.write_text("".join(json.dumps(chat(random)) + "\n" for _ in range(DOCUMENTS)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "0")
