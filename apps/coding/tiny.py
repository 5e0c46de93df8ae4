"""Tiny coding tasks, and demonstrations of the work on them: `python -m apps.coding.tiny FOLDER [SEED]` writes

    tasks/NUMBER/          a module with a wrong line, its visible test, hidden tests and a solution, in Harbor's form
    copying.jsonl          random texts and their ends: a model with random weights learns to copy
    demonstrations.jsonl   chats of a teacher, and exercises of its commands

The teacher knows the form of the work: it runs the test, looks up a function, changes its line, runs the test again,
and submits. Which function fails, what mends it, and whether to submit while the test fails is mostly chance; RL has to
teach that. Held-out tasks have other names and arguments than the trained and the demonstrated ones.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from apps.coding.tiny_module import Function, Module, module
from goaly.coding.tools import SUBMIT
from goaly.prompts.prompt import SPLIT_KEY, Split

TASKS: Final = {Split.TRAIN: 1024, Split.HELD_OUT: 128}
DOCUMENTS: Final = 12_000
"""Chats of each kind."""
FIND_RATE: Final = 0.45
"""How often the teacher changes a function that the test names, and not another one."""
REPAIR_RATE: Final = 0.55
"""How often it writes the sign that the words say, and not any other."""
GO_ON_RATE: Final = 0.6
"""How often it goes on when the test fails, instead of submitting."""
MOST_CHANGES: Final = 3
COPIED: Final = "0123456789abcdefghijklmnopqrstuvwxyz+-*/%=<>(),"
TEST: Final = "./t.py"
WORKDIR: Final = "/tmp/repository"
VISIBLE: Final = """\
#!/usr/bin/env -S python3 -BS
import m

failed = 0
for name, calls in {calls}:
    for inputs, right in calls:
        result = getattr(m, name)(*inputs)
        if result != right:
            print(f"{{name}}({{','.join(map(str, inputs))}}) is {{result}}, not {{right}}")
            failed = 1
            break
    else:
        print(name, "ok")
raise SystemExit(failed)
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
    visible = [
        (one.name, [(inputs, one.value(one.right_sign, inputs)) for inputs in calls])
        for one, calls in zip(made.functions, made.visible, strict=True)
    ]
    hidden = [(one, inputs) for one in made.functions for inputs in one.calls(random)]
    program = f"from m import *; print({', '.join(one.call(inputs) for one, inputs in hidden)})"
    right = " ".join(str(one.value(one.right_sign, inputs)) for one, inputs in hidden)
    files = {
        "task.toml": TOML.format(workdir=WORKDIR, key=SPLIT_KEY, word=wrong.name),
        "instruction.md": problem_of(made),
        "environment/m.py": made.text(made.signs),
        "environment/t.py": VISIBLE.format(calls=visible),
        "tests/test.sh": HIDDEN.format(workdir=WORKDIR, program=shlex.quote(program), right=shlex.quote(right)),
        "solution/solve.sh": change_command(wrong.name, made.signs[made.wrong], wrong.right_sign) + "\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "environment/t.py").chmod(0o755)


def problem_of(made: Module) -> str:
    """The problem for the agent: a call with a wrong result."""
    wrong = made.functions[made.wrong]
    inputs = wrong.failing(made.signs[made.wrong], made.visible[made.wrong])
    assert inputs is not None
    return f"{wrong.call(inputs)} should be {wrong.value(wrong.right_sign, inputs)}"


def look_up_command(name: str) -> str:
    """Prints a function's line."""
    return f"grep {name} m.py"


def change_command(name: str, sign: str, to: str) -> str:
    """Changes the sign in a function's line, and runs the visible test."""
    return f"sed -i '/{name}/s,{sign},{to},' m.py\n{TEST}"


def test_output(made: Module, signs: Sequence[str]) -> str:
    """The output of the visible test with these signs, as the agent sees it."""
    failing = made.failing(signs)
    lines = []
    for one, sign, inputs in zip(made.functions, signs, failing, strict=True):
        if inputs is None:
            lines.append(f"{one.name} ok\n")
        else:
            lines.append(f"{one.call(inputs)} is {one.value(sign, inputs)}, not {one.value(one.right_sign, inputs)}\n")
    return "".join(lines) + ("[exit code 1]" if any(failing) else "")


def demonstration(random: Random) -> Mapping[str, Any]:
    """A chat of the teacher, with what its commands print."""
    made = module(random, Split.TRAIN)
    signs = list(made.signs)
    said = [_message("user", problem_of(made)), *_block(TEST, test_output(made, signs))]
    for _ in range(MOST_CHANGES):
        fails = [inputs is not None for inputs in made.failing(signs)]
        found = random.random() < FIND_RATE
        at = random.choice([index for index, failed in enumerate(fails) if failed is found] or range(len(fails)))
        one, sign = made.functions[at], signs[at]
        signs[at] = _written_sign(one, sign, random)
        said += _block(look_up_command(one.name), one.text(sign))
        said += _block(change_command(one.name, sign, signs[at]), test_output(made, signs))
        if not any(made.failing(signs)) or random.random() >= GO_ON_RATE:
            break
    return {"messages": [*said, *_block(SUBMIT, "")[:1]], SPLIT_KEY: made.functions[made.wrong].name}


def _written_sign(one: Function, sign: str, random: Random) -> str:
    return one.right_sign if random.random() < REPAIR_RATE else random.choice(one.other_signs(sign))


def lesson(random: Random) -> Mapping[str, Any]:
    """A demonstration or exercises."""
    return demonstration(random) if random.random() < 0.5 else exercises(random)


def exercises(random: Random) -> Mapping[str, Any]:
    """A chat of exercises: to look up any function, and to change the sign in a line."""
    said = []
    for _ in range(4):
        made = module(random, Split.TRAIN)
        one, sign = made.functions[made.wrong], made.signs[made.wrong]
        if random.random() < 0.5:
            command = look_up_command(random.choice(made.functions).name)
            said += [_message("user", test_output(made, made.signs)), *_block(command, "")[:1]]
        else:
            command = change_command(one.name, sign, _written_sign(one, sign, random))
            said += [_message("user", one.text(sign)), *_block(command, "")[:1]]
    return {"messages": said, SPLIT_KEY: one.name}


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
    _write(folder / "demonstrations.jsonl", lesson, Random(f"{seed}/demonstrations"))


def _write(file: Path, chat: Callable[[Random], Mapping[str, Any]], random: Random) -> None:
    file.write_text("".join(json.dumps(chat(random)) + "\n" for _ in range(DOCUMENTS)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "0")
