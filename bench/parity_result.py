"""Numbers of `bench.parity`, with their bars, their file and their page."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from bench.report import markdown_table, page
from goaly.generate.scheduling_counter import SchedulingCounts

BARS = {"generate_cost": 1.3, "train_cost": 1.15}
"""The most that each cost should be, of any model."""
STRESS = ("preemptions", "prompts_in_parts", "prefix_hits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One trainer's comparison with one generator, over all packings."""

    model: str
    dtype: str
    generator: str
    trainer: str
    tokens: int
    differing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A generator, and how often its scheduler did what a check needs."""

    model: str
    dtype: str
    generator: str
    scheduling: SchedulingCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Everything measured so far."""

    generators: list[Sampled] = field(default_factory=list)
    combinations: list[Combination] = field(default_factory=list)
    seconds: Mapping[str, dict[str, list[float]]] = field(default_factory=dict)
    """For each cost the CPU seconds of each round, by numerics: of two runs in each round."""

    @classmethod
    def read(cls, file: Path) -> "Result":
        """The result in a file of `write`."""
        written = json.loads(file.read_text())
        generators = [one | {"scheduling": SchedulingCounts(**one["scheduling"])} for one in written["generators"]]
        return cls(
            generators=[Sampled(**one) for one in generators],
            combinations=[Combination(**one) for one in written["combinations"]],
            seconds=written["seconds"],
        )

    def write(self, file: Path) -> None:
        """Write all of it, and the numbers, as JSON."""
        file.write_text(json.dumps({**self.numbers(), **asdict(self)}, indent=2) + "\n")

    def updated(self, part: "Result") -> "Result":
        """This with what the part has of its models and costs, in place of what was known of them."""
        models = {one.model for one in part.generators}
        return Result(
            generators=[*(one for one in self.generators if one.model not in models), *part.generators],
            combinations=[*(one for one in self.combinations if one.model not in models), *part.combinations],
            seconds={**self.seconds, **part.seconds},
        )

    def numbers(self) -> dict[str, float]:
        """The totals and the costs."""
        return {
            "tokens": sum(one.tokens for one in self.combinations),
            "differing_tokens": sum(one.differing for one in self.combinations),
            **{name: min(getattr(one.scheduling, name) for one in self.generators) for name in self.stress()},
            **{name: _cost(of_sides) for name, of_sides in self.seconds.items()},
        }

    def bars(self) -> dict[str, float]:
        """The most that each number should be, of those that have a bar."""
        of_costs = {name: bar for name in self.seconds for ending, bar in BARS.items() if name.endswith(ending)}
        return {"differing_tokens": 0, **of_costs}

    def missed(self) -> list[str]:
        """The numbers above their bars, and what a generator did not do."""
        numbers = self.numbers()
        above = [
            f"{name} {numbers[name]:,.4g} is above {bar:g}" for name, bar in self.bars().items() if numbers[name] > bar
        ]
        return above + [f"{name} 0 is not above 0" for name in self.stress() if not numbers[name]]

    def stress(self) -> tuple[str, ...]:
        """The names of what each generator must do."""
        return STRESS if self.generators else ()


def _cost(seconds: dict[str, list[float]]) -> float:
    return median(bitwise / fast for bitwise, fast in zip(seconds["bitwise"], seconds["fast"], strict=True))


def markdown(result: Result) -> str:
    """The page of the results."""
    numbers, bars = result.numbers(), result.bars()
    rows = [
        (one.model, one.dtype, one.generator, one.trainer, f"{one.tokens:,}", f"{one.differing:,}")
        for one in result.combinations
    ]
    rows.append(("all", "", "", "", f"{numbers['tokens']:,}", f"{numbers['differing_tokens']:,}"))
    columns = ("model", "type", "generator", "trainer", "tokens compared", "differ")
    costs = [(f"`{name}`", bars[name], f"{numbers[name]:.3f}") for name in result.seconds]
    return page(
        "parity",
        "Bitwise parity, and what it costs",
        "A token counts once for each trainer and packing that recomputes its log-prob. Generators with an "
        "`update` halve the weights in the middle of answers; trainers recompute the tokens of both versions. Each "
        f"generator had at least: {', '.join(f'{name} {numbers[name]:,}' for name in result.stress())}.",
        markdown_table(columns, rows),
        "CPU seconds with bitwise numerics over those with fast ones, in float32 and one thread. A bar is the most "
        "that it should be.",
        markdown_table(("", "bar", "measured"), costs),
    )
