"""Do the tests notice a single changed line? Mutation score of the pure modules, with the survivors listed.

    make mutants                   # an hour on two cores, in as many pieces as you like
    python -m bench.mutants [--only PATTERN] [--minutes M] [--runs FILE] [--json FILE] [--markdown FILE]

mutmut changes one operator, constant, name or argument of a function at a time, and `bench/mutation.py` runs the tests
that reach the function. `[tool.mutmut]` of pyproject.toml names the modules and the tests. No mutant changes only a
string literal: most of these are an error's wording. A mutant is killed if a test fails or hangs.
`justified_mutants.toml` holds the survivors that change nothing a test could or should see, with the reason; they count
as survivors all the same. The verdicts of a module are a line of the `--runs` file. They are not made again while its
source is the same, unless `--again` asks for those that survived without a reason. After `--minutes` no mutant is
started; 0 only reports. The exit code is 1 if the score is below 0.9, a mutant was not run, or a justification no
longer applies.
"""

import argparse
import fnmatch
import json
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import ndiff
from hashlib import sha256
from pathlib import Path

from bench.mutant_files import MUTANTS, file_of, module_of, with_verdicts
from bench.record import append, finished

LEAST_SCORE = 0.9
NUMBER = "__mutmut_"
"""Stands before the number of a mutant in its name."""
KILLED = {1, 3, -24, 24, 36, 152, 255}
"""mutmut's exit codes of mutants that a test noticed: it failed, could not import, or ran into the time limit."""

JUSTIFIED: Mapping[str, str] = {
    f"{one['where']}: {one['line']}": one["why"]
    for one in tomllib.loads(Path(__file__).with_name("justified_mutants.toml").read_text())["survivor"]
}
"""Why a survivor may stay: by `module.function: changed line`."""
STRICT = "`strict` states what is so by construction; it could only report a bug of ours"
"""Why a mutant of no more than the `strict` of a `zip` may stay."""

Verdicts = dict[str, dict[str, int | None]]
"""The exit code of each mutant by module; None where mutmut has not run it."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The verdicts of a module with this source: mutmut's exit codes, by function in the order of its mutants."""

    module: str
    source: str
    codes: Mapping[str, Sequence[int | None]]
    survivors: Sequence[Mapping[str, str]]

    @classmethod
    def of(cls, module: str, verdicts: Mapping[str, int | None]) -> "Judged":
        """The verdicts of all mutants of a module that mutmut has just made."""
        codes: dict[str, list[int | None]] = defaultdict(list)
        for name, code in verdicts.items():
            codes[name.rpartition(NUMBER)[0]].append(code)
        survivors = [asdict(survivor(module, name)) for name in survived(verdicts)]
        return cls(module=module, source=source_of(module), codes=dict(codes), survivors=survivors)

    @property
    def verdicts(self) -> dict[str, int | None]:
        """The exit code of each mutant."""
        return {f"{name}{NUMBER}{n}": code for name, codes in self.codes.items() for n, code in enumerate(codes, 1)}

    def may_stay(self) -> list[str]:
        """The survivors that have a reason."""
        named = zip(survived(self.verdicts), self.survivors, strict=True)
        return [name for name, one in named if reason(Survivor(**one))]


def survived(verdicts: Mapping[str, int | None]) -> list[str]:
    """The mutants that no test noticed."""
    return [name for name, code in verdicts.items() if code is not None and code not in KILLED]


def source_of(module: str) -> str:
    """A digest of a module's source; of none, if it is gone."""
    file = file_of(module)
    return sha256(file.read_bytes()).hexdigest()[:16] if file.exists() else "none"


def known(found: Sequence[Judged]) -> dict[str, Judged]:
    """The newest verdicts of each module whose source is still the same."""
    return {one.module: one for one in found if one.source == source_of(one.module)}


def left(modules: Sequence[str], judged: Mapping[str, Judged], patterns: Sequence[str] = ()) -> list[str]:
    """The mutants to run among those that these patterns name, all of them where there is no pattern: all of a module
    that has no verdicts, and those that lack one."""
    names = []
    for module in modules:
        if module not in judged:
            whole = not patterns or any(fnmatch.fnmatch(f"{module}.x", pattern) for pattern in patterns)
            names += [f"{module}.x*"] if whole else [pattern for pattern in patterns if in_module(pattern, module)]
    found = asked_for({module: judged[module].verdicts for module in modules if module in judged}, patterns)
    names += [name for codes in found.values() for name, code in codes.items() if code is None]
    return list(dict.fromkeys(names))


def asked_again(judged: Mapping[str, Judged], patterns: Sequence[str]) -> list[str]:
    """The survivors without a reason among the mutants that these patterns name, all of them where there is none."""
    found = asked_for({module: one.verdicts for module, one in judged.items()}, patterns)
    may_stay = {name for one in judged.values() for name in one.may_stay()}
    return [
        name for codes in found.values() for name, code in codes.items() if code not in KILLED and name not in may_stay
    ]


def setting(name: str) -> list[str]:
    """A setting of `[tool.mutmut]`."""
    return tomllib.loads(Path("pyproject.toml").read_text())["tool"]["mutmut"][name]


def mutated_modules() -> list[str]:
    """The modules that pyproject.toml names."""
    files = sorted({file for pattern in setting("only_mutate") for file in Path().glob(pattern)})
    return list(map(module_of, files))


def verdicts() -> Verdicts:
    """mutmut's verdicts."""
    return {module: json.loads(file.read_text())["exit_code_by_key"] for module, file in with_verdicts().items()}


def run(names: Sequence[str], tests: Sequence[str], children: int, minutes: float) -> int:
    """Judge these mutants for so long; the exit code of pytest."""
    from bench.mutation import judge, make  # takes long

    make([module for module in mutated_modules() if any(in_module(name, module) for name in names)])
    return judge(names, tests, children, 60 * minutes)


def in_module(pattern: str, module: str) -> bool:
    """Whether a pattern may name mutants of this module."""
    return fnmatch.fnmatch(f"{module}.x", pattern) or pattern.startswith((f"{module}.x_", f"{module}.xǁ"))


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
    """The mutant's change: the lines that differ."""
    name = mutant.removeprefix(f"{module}.")
    function = name.rpartition(NUMBER)[0]
    described = function.removeprefix("x_").replace("xǁ", "").replace("ǁ", ".")
    file = file_of(module)
    spans = json.loads((MUTANTS / file.with_suffix(".py.spans")).read_text())["spans"]
    written = (MUTANTS / file).read_text().splitlines()
    versions = []
    for one in (f"{function}{NUMBER}orig", name):
        start, stop = spans[one]
        plain = (line.strip().replace(one, described.rpartition(".")[2]) for line in written[start - 1 : stop])
        versions.append(list(plain))
    changes = list(ndiff(*versions))
    removed = [line[2:] for line in changes if line.startswith("-")]
    added = [line[2:] for line in changes if line.startswith("+")]
    return Survivor(module=module, function=described, removed=" ".join(removed), added=" ".join(added))


def scores(found: Mapping[str, Mapping[str, int | None]]) -> dict[str, tuple[int, int]]:
    """Killed and all mutants by module."""
    return {module: (sum(code in KILLED for code in codes.values()), len(codes)) for module, codes in found.items()}


def table(by_module: Mapping[str, tuple[int, int]]) -> str:
    """The scores as a table in Markdown."""
    lines = ["| module | mutants | killed | score |", "|---|---|---|---|"]
    total = Counter(killed=0, all=0)
    for module, (killed, count) in by_module.items():
        total.update(killed=killed, all=count)
        lines.append(f"| {shown(module)} | {count} | {killed} | {killed / count:.2f} |")
    lines.append(f"| all | {total['all']} | {total['killed']} | {total['killed'] / max(1, total['all']):.3f} |")
    return "\n".join(lines)


def shown(module: str) -> str:
    """The module's file in `src/goaly`."""
    return file_of(module).relative_to("src/goaly").as_posix()


def not_yet(mutants: int, modules: Sequence[str]) -> str:
    """Say what has not been run; empty if all has."""
    lines = [f"{mutants} mutants of these modules have not been run yet; they count as survivors."] if mutants else []
    lines += [f"Not run at all, and not counted: {', '.join(map(shown, modules))}."] if modules else []
    return " ".join(lines)


def reason(one: Survivor) -> str:
    """Why it may stay; empty if nobody has said."""
    strict = re.fullmatch(r"(.*), (strict=(None|False))?(\).*)", one.added)
    if strict and one.removed == f"{strict[1]}, strict=True{strict[4]}":
        return STRICT
    return JUSTIFIED.get(one.key, "")


def survivors_table(survivors: Sequence[Survivor]) -> str:
    """The survivors by module, with the reasons of those that have one."""
    by_module: dict[str, list[Survivor]] = defaultdict(list)
    for one in survivors:
        by_module[one.module].append(one)
    lines = []
    for module, of_module in by_module.items():
        lines += [f"\n### {shown(module)}\n", "| function | line | mutant | why it may stay |"]
        lines.append("|---|---|---|---|")
        for one in of_module:
            cells = (one.function, f"`{one.removed}`", f"`{one.added}`", reason(one))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Run mutmut, print the scores, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="mutants, such as 'goaly.losses.kl.*'")
    parser.add_argument("--tests", nargs="*", default=[], help="judge by these tests; by all that are set if none")
    parser.add_argument("--again", action="store_true", help="judge those again that survived without a reason")
    parser.add_argument("--children", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--minutes", type=float, default=240.0)
    parser.add_argument("--runs", type=Path, default=Path("docs/results/mutants.jsonl"))
    arguments = parser.parse_args()
    judged = known(finished(arguments.runs, Judged))
    names = asked_again(judged, arguments.only) if arguments.again else left(mutated_modules(), judged, arguments.only)
    selection = setting("pytest_add_cli_args_test_selection")
    tests = [*arguments.tests, *(one for one in selection if one.startswith("-") or not arguments.tests)]
    asked = bool(names and arguments.minutes)
    if asked and (code := run(names, tests, arguments.children, arguments.minutes)):
        return code
    for module, codes in verdicts().items() if asked else ():
        before = judged[module].verdicts if module in judged else {}
        codes = {name: before.get(name) if code is None else code for name, code in codes.items()}
        if codes != before or not (codes or module in judged):
            judged[module] = Judged.of(module, codes)
            append(arguments.runs, judged[module])
    found = asked_for({module: one.verdicts for module, one in judged.items()}, arguments.only)
    by_module = scores({module: codes for module, codes in sorted(found.items()) if codes})
    missing = [module for module in mutated_modules() if module not in judged]
    not_run = sum(code is None for codes in found.values() for code in codes.values())
    survivors = [Survivor(**one) for module in by_module for one in judged[module].survivors]
    killed, count = (sum(column) for column in zip((0, 0), *by_module.values(), strict=True))
    score = killed / max(1, count)
    print(f"\n{table(by_module)}\n{survivors_table(survivors)}")
    if lacking := not_yet(not_run, missing):
        print(lacking)
    whole = not arguments.only and not lacking
    gone = sorted(set(JUSTIFIED) - {one.key for one in survivors}) if whole else []
    for key in gone:
        print(f"JUSTIFIED has {key!r}, which no longer survives: remove it")
    if arguments.json:
        content = {
            "score": score,
            "not_run": not_run,
            "modules_not_run": missing,
            "modules": by_module,
            "survivors": [asdict(one) for one in survivors],
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    if arguments.markdown:
        title = "# Mutation score of the pure modules\n\n    make mutants\n"
        title += f"\n{lacking}\n" if lacking else ""
        arguments.markdown.write_text(f"{title}\n{table(by_module)}\n\n## Survivors\n{survivors_table(survivors)}\n")
    return 1 if score < LEAST_SCORE or gone or lacking else 0


if __name__ == "__main__":
    sys.exit(main())
