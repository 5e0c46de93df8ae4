"""How many log-probs of trainer and sampler differ under bitwise numerics, and what these cost.

    python -m bench.parity [--only bits|costs] [--requests N] [--json FILE] [--markdown FILE]

Generators of TP 1 and 2, with experts also of EP 2, those of two ranks also with two threads each, all in float32 and
bfloat16, sample requests of mixed lengths with shared prefixes, in a cache so small that some are preempted and in
steps so short that many prompts are computed in parts. Trainers of one rank, of two threads, of FSDP 2, of TP 2 and of
both, with experts also of EP 2 and 4, recompute what each of them sampled, on three packings. `tokens` counts each time
that a token is compared, `differing_tokens` those that are not equal.

`generate_cost` and `train_cost` are the CPU seconds of bitwise numerics over those of the fast ones, in one process of
one thread where the two take turns: the same requests sampled by an engine, and forward and backward passes over the
same packed rows. A round runs both sides twice, in the order A, B, B, A, after one that warms both up; a cost is the
median over the rounds' ratios. All of three tiny random models, a dense one, one with experts and one that has shared
experts, too, or of `--model`. The costs of a model with experts are `experts_generate_cost` and `experts_train_cost`,
and with shared ones `shared_experts_generate_cost` and `shared_experts_train_cost`.

If a log-prob differs, or a cost is above its bar, the exit code is 1 and the last line names it.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from goaly.generate.settings import GeneratorSettings
from goaly.models.settings import ModelSettings
from goaly.models.spec import architecture, read_config
from goaly.models.tiny import TinyModel, write_tiny_model
from goaly.parity import Recomputer, Sampler, recompute_in_ranks, sample_in_ranks
from goaly.parity_requests import cramped, mixed_requests
from goaly.run.ranks import fork_ranks_from_one_server
from goaly.train.settings import TrainerSettings

TRAINING_ROUNDS, GENERATION_ROUNDS = 8, 3
LONGEST = 512
DTYPES = ("float32", "bfloat16")
GENERATORS = {"TP 1": {}, "TP 2": {"tp": 2}, "TP 2, 2 threads": {"tp": 2, "threads": 2}}
TRAINERS = {
    "1 rank": {},
    "1 rank, 2 threads": {"threads": 2},
    "FSDP 2": {"fsdp": 2},
    "TP 2": {"tp": 2},
    "FSDP 2, TP 2": {"fsdp": 2, "tp": 2},
}
OF_EXPERTS = {"EP 2": {"tp": 2, "ep": 2}, "EP 2, 2 threads": {"tp": 2, "ep": 2, "threads": 2}}
TRAINERS_OF_EXPERTS = {
    "FSDP 2, EP 2": {"fsdp": 2, "ep": 2},
    "TP 2, EP 2": {"tp": 2, "ep": 2},
    "FSDP 2, TP 2, EP 2": {"fsdp": 2, "tp": 2, "ep": 2},
    "FSDP 2, TP 2, EP 4": {"fsdp": 2, "tp": 2, "ep": 4},
}
SIZES = {
    "dense": TinyModel(),
    "experts": TinyModel(experts=8),
    "shared experts": TinyModel(experts=8, shared_experts=1),
}
PACKINGS = ((1024, 4), (512, 1), (2048, 2))
BARS = {"generate_cost": 1.3, "train_cost": 1.15}
"""The most that each cost should be, of any model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """What one trainer found about one generator, over all packings."""

    model: str
    dtype: str
    generator: str
    trainer: str
    tokens: int
    differing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was measured."""

    combinations: list[Combination]
    seconds: dict[str, dict[str, list[float]]]
    """For each cost the CPU seconds of each round, by numerics: of two runs in each round."""

    def numbers(self) -> dict[str, float]:
        """The totals and the costs."""
        return {
            "tokens": sum(one.tokens for one in self.combinations),
            "differing_tokens": sum(one.differing for one in self.combinations),
            **{name: _cost(of_sides) for name, of_sides in self.seconds.items()},
        }

    def bars(self) -> dict[str, float]:
        """The most that each number should be, of those that have a bar."""
        of_costs = {name: bar for name in self.seconds for ending, bar in BARS.items() if name.endswith(ending)}
        return {"differing_tokens": 0, **of_costs}

    def missed(self) -> list[str]:
        """The costs above their bars."""
        numbers = self.numbers()
        return [
            f"{name} {numbers[name]:,.4g} is above {bar:g}" for name, bar in self.bars().items() if numbers[name] > bar
        ]


def _cost(seconds: dict[str, list[float]]) -> float:
    return median(bitwise / fast for bitwise, fast in zip(seconds["bitwise"], seconds["fast"], strict=True))


def combinations(name: str, model: str, requests: int) -> list[Combination]:
    """Compare every generator with every trainer of this model."""
    shape = architecture(read_config(model))
    vocabulary, generators, trainers = shape.vocab_size, GENERATORS, TRAINERS
    if shape.experts:
        generators, trainers = GENERATORS | OF_EXPERTS, TRAINERS | TRAINERS_OF_EXPERTS
    found: list[Combination] = []
    with tempfile.TemporaryDirectory() as folder:
        sampled: dict[tuple[str, str], Path] = {}
        for number, dtype in enumerate(DTYPES):
            for generator_name, degrees in generators.items():
                settings = ModelSettings(path=model, dtype=dtype, numerics="bitwise")
                generator = GeneratorSettings(max_running=32, max_context=LONGEST, **degrees)
                asked = mixed_requests(requests, vocabulary=vocabulary, longest=LONGEST, seed=10 * number)
                file = sampled[dtype, generator_name] = Path(folder) / f"{dtype}-{generator_name}"
                generator = cramped(settings, generator, asked)
                sample_in_ranks(Sampler(model=settings, generator=generator, asked=asked), file)
        for trainer, degrees in trainers.items():
            recomputers = [
                Recomputer(
                    model=ModelSettings(path=model, dtype=dtype, numerics="bitwise"),
                    trainer=TrainerSettings(**degrees),
                    sequences=file,
                    packings=PACKINGS,
                )
                for (dtype, _), file in sampled.items()
            ]
            for (dtype, generator_name), of_packings in zip(sampled, recompute_in_ranks(recomputers), strict=True):
                found.append(
                    Combination(
                        model=name,
                        dtype=dtype,
                        generator=generator_name,
                        trainer=trainer,
                        tokens=sum(one.tokens for one in of_packings),
                        differing=sum(one.differing for one in of_packings),
                    )
                )
    return found


def in_turns(work: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each side's rounds. In a round each side runs as often after itself as after the other one, which
    leaves other memory and caches, and a machine that becomes slower delays both by as much."""
    seconds: dict[str, list[float]] = {name: [0.0] * (rounds + 1) for name in work}
    for number in range(rounds + 1):
        for name in (*work, *reversed(work)):
            started = time.process_time()
            work[name]()
            seconds[name][number] += time.process_time() - started
    return {name: of_side[1:] for name, of_side in seconds.items()}  # the first round is a warm-up


def training(model: str) -> dict[str, list[float]]:
    """Forward and backward passes over the batch of `bench.train`."""
    from bench.train import packed_batch
    from goaly.losses.objective import PolicyObjective
    from goaly.losses.settings import LossSettings
    from goaly.train.engine import TrainEngine

    batch, objective = packed_batch(), PolicyObjective(LossSettings())

    def side(numerics: Any) -> Callable[[], None]:
        engine = TrainEngine(ModelSettings(path=model, numerics=numerics), TrainerSettings())

        def step() -> None:
            engine.forward_backward(batch.rows.split(4), objective, batch.batch_trained_tokens)
            engine._model.zero_grad()

        return step

    return in_turns({numerics: side(numerics) for numerics in ("fast", "bitwise")}, TRAINING_ROUNDS)


def generation(model: str) -> dict[str, list[float]]:
    """The requests of `bench.generate`, all there at once."""
    from bench.generate import heavy_tailed
    from goaly.generate.engine import Engine
    from goaly.generate.request import Sampling

    requests = heavy_tailed(192)

    def side(numerics: Any) -> Callable[[], None]:
        settings = GeneratorSettings(max_running=128, max_context=LONGEST, kv_cache_gib=0.3)
        engine = Engine(settings, ModelSettings(path=model, numerics=numerics))

        def serve() -> None:
            for number, request in enumerate(requests):
                engine.add(str(number), request.prompt, Sampling(max_tokens=request.tokens))
            while engine.running:
                engine.step()

        return serve

    return in_turns({numerics: side(numerics) for numerics in ("fast", "bitwise")}, GENERATION_ROUNDS)


def markdown(result: Result) -> str:
    """The page of the results."""
    numbers = result.numbers()
    rows = [
        f"| {one.model} | {one.dtype} | {one.generator} | {one.trainer} | {one.tokens:,} | {one.differing:,} |"
        for one in result.combinations
    ]
    return "\n".join(
        [
            "# Bitwise parity, and what it costs",
            "",
            "    python -m bench.parity --json docs/results/parity.json --markdown docs/results/parity.md",
            "",
            "A token counts once for each trainer and packing that recomputes its log-prob.",
            "",
            "| model | type | generator | trainer | tokens compared | differ |",
            "|---|---|---|---|---|---|",
            *rows,
            f"| all | | | | {numbers['tokens']:,} | {numbers['differing_tokens']:,} |",
            "",
            "CPU seconds with bitwise numerics over those with fast ones, float32, one thread. A bar is the most that "
            "it should be.",
            "",
            "| | bar | measured |",
            "|---|---|---|",
            *(
                f"| `{name}` | {bar} | {numbers[name]:.3f} |"
                for name, bar in result.bars().items()
                if name in result.seconds
            ),
            "",
        ]
    )


def report(result: Result) -> None:
    """Print the table."""
    table = Table("", "value", title="bitwise parity")
    for name, value in result.numbers().items():
        table.add_row(name, f"{value:,.3f}" if "cost" in name else f"{value:,}")
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write."""
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # two ranks of two threads each would spin for each other
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=96, help="answers of each generator")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; a tiny random model by default")
    parser.add_argument("--only", choices=("bits", "costs"), help="measure only these; both by default")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--markdown", type=Path, help="write the page of the result to this file")
    arguments = parser.parse_args(argv)
    fork_ranks_from_one_server()
    with tempfile.TemporaryDirectory() as made:
        models = {name: str(write_tiny_model(Path(made) / name, size)) for name, size in SIZES.items()}
        if arguments.model is not None:
            models = {arguments.model.name: str(arguments.model)}
        compared: list[Combination] = []
        if arguments.only != "costs":
            compared = [one for name, model in models.items() for one in combinations(name, model, arguments.requests)]
        import torch

        torch.set_num_threads(1)
        seconds: dict[str, dict[str, list[float]]] = {}
        for model in models.values() if arguments.only != "bits" else ():
            shape = architecture(read_config(model))
            before = "shared_experts_" if shape.shared_hidden_dim else "experts_" if shape.experts else ""
            seconds[f"{before}train_cost"] = training(model)
            seconds[f"{before}generate_cost"] = generation(model)
        result = Result(combinations=compared, seconds=seconds)
    report(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**result.numbers(), **asdict(result)}, indent=2) + "\n")
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(result))
    if missed := result.missed():
        raise SystemExit("; ".join(missed))


if __name__ == "__main__":
    main()
