"""How soon a large prompt file gives its first prompt, in how much memory, and how fast the others follow.

    python -m bench.data [--gigabytes G] [--prompts N] [--json FILE]

Writes a JSONL file of about G gigabytes to the temporary folder, reads N prompts in random order in a process for each
arm, and removes the file. `goaly` is `prompts.files`; `datasets` streams the file with Hugging Face's library and a
shuffle buffer of as many records as goaly shuffles together; `whole` reads the file into a list first, and gets a
twentieth of it. Imports are not measured. Memory is what the process grew by at its peak.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.report import Machine, options, write

ARMS = ("goaly", "datasets", "whole")
WHOLE_SHARE = 20
RECORDS = 20_000
"""Different records; the file repeats them with other numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one arm."""

    arm: str
    gigabytes: float
    first_seconds: float
    prompts_per_second: float
    peak_megabytes: float


def write_file(path: Path, gigabytes: float) -> None:
    """Write prompts of 200 to 2,000 characters with an answer."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(2_000)]
    texts = [" ".join(draw.choices(words, k=draw.randint(35, 350))) for _ in range(RECORDS)]
    number = 0
    with path.open("w") as file:
        while file.tell() < gigabytes * 1e9:
            lines = [json.dumps({"prompt": f"{number + i} {text}", "answer": "1"}) for i, text in enumerate(texts)]
            file.write("\n".join(lines) + "\n")
            number += RECORDS


def goaly(path: Path) -> Callable[[], object]:
    """The next prompt of a run's stream."""
    from goaly.prompts.mixture import prompt_mixture
    from goaly.prompts.settings import PromptSettings

    def prompts():
        mixture = prompt_mixture(PromptSettings(task=None, files=(str(path),)))
        while True:
            yield mixture.next()

    return prompts().__next__


def datasets(path: Path) -> Callable[[], object]:
    """The next record of a streamed and shuffled dataset."""
    from datasets import load_dataset

    from goaly.prompts.blocks import BLOCK_BYTES, POOL_BLOCKS

    def records():
        stream = load_dataset("json", data_files=str(path), split="train", streaming=True)
        yield from stream.shuffle(seed=0, buffer_size=BLOCK_BYTES * POOL_BLOCKS // 1200)

    return records().__next__


def whole(path: Path) -> Callable[[], object]:
    """The next record of a list."""

    def records():
        with path.open() as lines:
            found = [json.loads(line) for line in lines]
        random.Random(0).shuffle(found)
        yield from found

    return records().__next__


def measure(arm: str, path: Path, prompts: int) -> Result:
    """Read the prompts in this process."""
    take = {"goaly": goaly, "datasets": datasets, "whole": whole}[arm](path)
    _forget_peak()
    before, began = _peak_megabytes(), time.monotonic()
    take()
    first = time.monotonic() - began
    for _ in range(prompts - 1):
        take()
    rest = time.monotonic() - began - first
    return Result(
        arm=arm,
        gigabytes=os.stat(path).st_size / 1e9,
        first_seconds=first,
        prompts_per_second=(prompts - 1) / rest,
        peak_megabytes=_peak_megabytes() - before,
    )


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_megabytes() -> float:
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM")]
    return int(line.split()[1]) / 1000


def main() -> None:
    """Measure the arms, each in a process of its own, and print the table."""
    parser = options(__doc__, "json", gigabytes=5.0, prompts=20_000)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        print(json.dumps(asdict(measure(arguments.arm, arguments.file, arguments.prompts))))
        return
    machine, results = Machine.now(), []
    with tempfile.TemporaryDirectory(prefix="bench-data-") as folder:
        large, small = Path(folder) / "large.jsonl", Path(folder) / "small.jsonl"
        write_file(large, arguments.gigabytes)
        write_file(small, arguments.gigabytes / WHOLE_SHARE)
        for arm in ARMS:
            file = small if arm == "whole" else large
            command = [sys.executable, "-m", "bench.data", "--arm", arm, "--file", str(file)]
            output = subprocess.run(
                [*command, "--prompts", str(arguments.prompts)], capture_output=True, text=True, check=True
            ).stdout
            results.append(Result(**json.loads(output.splitlines()[-1])))
    table = Table("", "GB", "s to the first", "prompts/s", "peak MB")
    for one in results:
        table.add_row(
            one.arm,
            f"{one.gigabytes:.2f}",
            f"{one.first_seconds:.2f}",
            f"{one.prompts_per_second:.0f}",
            f"{one.peak_megabytes:.0f}",
        )
    Console().print(str(machine), table)
    content = {"machine": machine.record(), "arms": [asdict(one) for one in results]}
    write(arguments.json, content)


if __name__ == "__main__":
    main()
