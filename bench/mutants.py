"""Do the tests notice a single changed line? Mutation score of the pure modules, with the survivors listed.

    make mutants                   # installs mutmut, then runs this: some forty minutes on two cores
    python -m bench.mutants [--only PATTERN] [--json FILE] [--markdown FILE]

mutmut changes one operator, constant, name or argument of a function at a time and runs the tests that reach it; which
modules and tests is in `[tool.mutmut]` of pyproject.toml. A mutant is killed if a test fails or hangs. `JUSTIFIED`
holds the survivors that change nothing a test could or should see, by the line that they change, with the reason; they
count as survivors all the same. The exit code is 1 if the score is below 0.9, or a justification no longer applies.

This module is also a plugin of pytest, loaded in those runs.
"""

import argparse
import fnmatch
import json
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LEAST_SCORE = 0.9
MUTANTS = Path("mutants")
KILLED = {1, 3, -24, 24, 36, 152, 255}
"""mutmut's exit codes of mutants that a test noticed: it failed, could not import, or ran into the time limit."""

JUSTIFIED: Mapping[str, str] = {}
"""Why a survivor may stay: by `function: changed line`."""


def pytest_collection_modifyitems(items: Sequence[Any]) -> None:
    """mutmut 3.8 reads an attribute of pytest's items that pytest 9.2 calls otherwise."""
    for item in items:
        item._nodeid = item.nodeid


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """A mutant that no test noticed."""

    module: str
    function: str
    removed: str
    added: str

    @property
    def key(self) -> str:
        """Names it in `JUSTIFIED`: stable under edits of other lines."""
        return f"{self.module}.{self.function}: {self.added}"


def verdicts() -> dict[str, dict[str, int | None]]:
    """The exit code of each mutant by module; None where mutmut has not run it."""
    found = {}
    for file in sorted(MUTANTS.rglob("*.py.meta")):
        module = ".".join(file.relative_to(MUTANTS / "src").with_suffix("").with_suffix("").parts)
        found[module] = json.loads(file.read_text())["exit_code_by_key"]
    return {module: codes for module, codes in found.items() if codes}


def asked_for(
    found: Mapping[str, Mapping[str, int | None]], patterns: Sequence[str]
) -> dict[str, dict[str, int | None]]:
    """The mutants that these patterns name, all of them where there is no pattern. One that did not run survived."""
    return {
        module: {
            name: code
            for name, code in codes.items()
            if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        }
        for module, codes in found.items()
    }


def survivor(module: str, mutant: str) -> Survivor:
    """The mutant's change, as mutmut shows it."""
    shown = subprocess.run(
        [sys.executable, "-m", "mutmut", "show", mutant], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    removed = [line[1:].strip() for line in shown if line.startswith("-") and not line.startswith("---")]
    added = [line[1:].strip() for line in shown if line.startswith("+") and not line.startswith("+++")]
    function = mutant.removeprefix(f"{module}.").rpartition("__mutmut_")[0].removeprefix("x_").replace("xǁ", "")
    return Survivor(
        module=module, function=function.replace("ǁ", "."), removed=" ".join(removed), added=" ".join(added)
    )


def scores(found: Mapping[str, Mapping[str, int | None]]) -> dict[str, tuple[int, int]]:
    """Killed and all mutants by module."""
    return {module: (sum(code in KILLED for code in codes.values()), len(codes)) for module, codes in found.items()}


def table(by_module: Mapping[str, tuple[int, int]]) -> str:
    """The scores as a table in Markdown."""
    lines = ["| module | mutants | killed | score |", "|---|---|---|---|"]
    total = Counter(killed=0, all=0)
    for module, (killed, count) in by_module.items():
        total.update(killed=killed, all=count)
        lines.append(f"| {module.removeprefix('goaly.')} | {count} | {killed} | {killed / count:.2f} |")
    lines.append(f"| all | {total['all']} | {total['killed']} | {total['killed'] / max(1, total['all']):.3f} |")
    return "\n".join(lines)


def survivors_table(survivors: Sequence[Survivor]) -> str:
    """The survivors by module, with the reasons of those that have one."""
    by_module: dict[str, list[Survivor]] = defaultdict(list)
    for one in survivors:
        by_module[one.module].append(one)
    lines = []
    for module, of_module in by_module.items():
        lines += [f"\n### {module.removeprefix('goaly.')}\n", "| function | line | mutant | why it may stay |"]
        lines.append("|---|---|---|---|")
        for one in of_module:
            cells = (one.function, f"`{one.removed}`", f"`{one.added}`", JUSTIFIED.get(one.key, ""))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Run mutmut, print the scores, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="mutants, such as 'goaly.losses.kl.*'")
    parser.add_argument("--children", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    if not arguments.only:
        shutil.rmtree(MUTANTS, ignore_errors=True)  # mutmut keeps verdicts that were made with other tests
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(arguments.children), *arguments.only]
    if code := subprocess.run(command).returncode:
        return code
    found = asked_for(verdicts(), arguments.only)
    by_module = scores({module: codes for module, codes in found.items() if codes})
    survivors = [
        survivor(module, name) for module, codes in found.items() for name, code in codes.items() if code not in KILLED
    ]
    killed, count = (sum(column) for column in zip(*by_module.values(), strict=True))
    score = killed / count
    print(f"\n{table(by_module)}\n{survivors_table(survivors)}")
    gone = sorted(set(JUSTIFIED) - {one.key for one in survivors}) if not arguments.only else []
    for key in gone:
        print(f"JUSTIFIED has {key!r}, which no longer survives: remove it")
    if arguments.json:
        content = {"score": score, "modules": by_module, "survivors": [asdict(one) for one in survivors]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    if arguments.markdown:
        title = "# Mutation score of the pure modules\n\n    make mutants\n"
        arguments.markdown.write_text(f"{title}\n{table(by_module)}\n\n## Survivors\n{survivors_table(survivors)}\n")
    return 1 if score < LEAST_SCORE or gone else 0


if __name__ == "__main__":
    sys.exit(main())
