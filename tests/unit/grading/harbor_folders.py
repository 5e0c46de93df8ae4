"""Folders of Harbor's form."""

from pathlib import Path

CONFIG = """\
schema_version = "1.4"
artifacts = ["/var/out", { source = "notes.txt" }]

[task]
name = "acme/count-lines"
description = "Counts."
keywords = ["text"]

[metadata]
difficulty = "easy"

[agent]
timeout_sec = 90

[verifier]
timeout_sec = 45.5
env = { EXPECTED = "3" }

[environment]
build_timeout_sec = 30.0
cpus = 2
memory_mb = 512
storage_mb = 256
gpus = 0
network_mode = "no-network"
env = { MODE = "${GOALY_TEST_MODE:-plain}" }

[solution]
env = { ANSWER = "it's 3" }
"""

FILES = {
    "task.toml": CONFIG,
    "instruction.md": "Write the number of lines of text.txt into answer.txt.\n",
    "environment/Dockerfile": "FROM debian AS base\nWORKDIR /else\nFROM base\nWORKDIR /srv\nworkdir app\nCOPY . .\n",
    "environment/text.txt": "a\nb\nc\n",
    "tests/test.sh": 'test "$(cat answer.txt)" = "$EXPECTED"; echo $((1 - $?)) > /logs/verifier/reward.txt\n',
    "tests/data/more.txt": "x\n",
    "solution/solve.sh": '#!/bin/sh\necho "$ANSWER" | tr -dc 0-9 > answer.txt\n',
    "solution/notes.md": "count\n",
}


def write_harbor(folder: Path, **changes: str | None) -> Path:
    """A task; `changes` replace its files, whose `/` and `.` are written `__` and `_` , or leave them out."""
    for name, text in FILES.items():
        if (text := changes.get(name.replace("/", "__").replace(".", "_"), text)) is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder
