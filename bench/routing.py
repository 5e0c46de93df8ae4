"""The effect and the cost of replaying the sampler's choices of experts.

    python -m bench.routing [--requests N] [--json FILE] [--markdown FILE]

A generator samples answers of heavy-tailed lengths from a tiny random model of eight experts, two for each token, and
records its choices. A trainer computes the log-probs of all answers twice, with its own choices and with the sampler's.
`differing` counts the choices, at the tokens that predict trained ones, that were not the sampler's; `sampler_kl` and
`greatest` compare log-probs with the sampler's.

Costs are CPU seconds in one process of one thread, where the sides take turns: the same requests sampled by an engine
that records choices and by one that does not, and a forward and backward pass over the sampled rows with and without
choices. Each is the median over the rounds of one side over the other.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from bench.report import Machine, options, write
from goaly.generate.settings import GeneratorSettings
from goaly.losses.kl import k3
from goaly.models.settings import ModelSettings
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.parity import CheckedRequest, rows_of, sampled
from goaly.train.settings import TrainerSettings
from goaly.trajectory import EXPERT_CHOICES, TensorDict

DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
ROUNDS = 7
ROW_LENGTH, MICROBATCH_ROWS = 1024, 4
TRAINER = TrainerSettings(microbatch_rows=MICROBATCH_ROWS)
GENERATOR = GeneratorSettings(max_running=128, max_context=512, kv_cache_gib=0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far a trainer is from the sampler, of one number format and routing."""

    dtype: str
    routing: str
    tokens: int
    choices: int
    differing: int
    """Choices that were not the sampler's."""
    sampler_kl: float
    greatest: float
    """The greatest difference of two log-probs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The CPU seconds of each round with replay and without, in turns."""

    replay: list[float]
    own: list[float]

    @property
    def ratio(self) -> float:
        """The median over the rounds of one over the other."""
        return median(one / other for one, other in zip(self.replay, self.own, strict=True))


def asked(count: int) -> list[CheckedRequest]:
    """The requests of `bench.generate`."""
    from bench.generate import heavy_tailed
    from goaly.generate.request import Sampling

    return [
        CheckedRequest(name=str(number), prompt=one.prompt, sampling=Sampling(max_tokens=one.tokens, seed=number))
        for number, one in enumerate(heavy_tailed(count))
    ]


def agreement(engine: Any, rows: TensorDict, dtype: str, routing: str) -> Agreement:
    """Compute the log-probs of these rows with this trainer, and compare them and the choices with the sampler's."""
    chosen: list[list[torch.Tensor]] = [[] for _ in engine._experts.layers]

    def noting(number: int) -> Callable[..., None]:
        return lambda module, given, out: chosen[number].append(out[1][0])

    hooks = [layer.router.register_forward_hook(noting(number)) for number, layer in enumerate(engine._experts.layers)]
    differing = choices = 0
    greatest, divergence, tokens = 0.0, 0.0, 0
    for part in rows.split(MICROBATCH_ROWS):
        batch = engine._microbatch(part)
        recorded_PNK = batch.choices_1TNK[0, batch.predicting_P].long()
        own = engine._microbatch(part.exclude(EXPERT_CHOICES)) if routing == "own" else batch
        with torch.no_grad():
            logprobs_P = engine._outputs(own)[0].float()
        sampler_P = batch.columns["sampler_logprobs"]
        greatest = max(greatest, float((logprobs_P - sampler_P).abs().max()))
        divergence += float(k3(sampler_P, logprobs_P).double().sum())
        tokens += len(sampler_P)
        for number, of_layer in enumerate(chosen):
            mine_PK, sampler_PK = of_layer.pop()[batch.predicting_P], recorded_PNK[:, number]
            differing += int((mine_PK[:, :, None] != sampler_PK[:, None]).all(-1).sum())
            choices += sampler_PK.numel()
    for hook in hooks:
        hook.remove()
    return Agreement(
        dtype=dtype,
        routing=routing,
        tokens=tokens,
        choices=choices,
        differing=differing,
        sampler_kl=divergence / tokens,
        greatest=greatest,
    )


def alternating(work: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """CPU seconds of each round. Each follows one of the other side: a second one of the same side is faster."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(ROUNDS + 1):
        for name, side in work.items():
            started = time.process_time()
            side()
            if turn:  # the first is a warm-up
                seconds[name].append(time.process_time() - started)
    return seconds


def generation(engines: dict[str, Any], requests: Sequence[CheckedRequest]) -> Cost:
    """All requests at once, by an engine that records choices and by one that does not."""

    def side(engine: Any) -> Callable[[], None]:
        def serve() -> None:
            for one in requests:
                engine.add(one.name, one.prompt, one.sampling)
            while engine.running:
                engine.step()

        return serve

    return Cost(**alternating({name: side(engine) for name, engine in engines.items()}))


def training(engine: Any, rows: TensorDict) -> Cost:
    """Forward and backward passes over the rows, with their choices and without."""
    from goaly.losses.objective import PolicyObjective
    from goaly.losses.settings import LossSettings

    objective, trained = PolicyObjective(LossSettings()), int(rows["trained"].sum())

    def side(given: TensorDict) -> Callable[[], None]:
        def step() -> None:
            engine.forward_backward(given.split(MICROBATCH_ROWS), objective, trained)
            engine._model.zero_grad()

        return step

    return Cost(**alternating({"replay": side(rows), "own": side(rows.exclude(EXPERT_CHOICES))}))


def measure(count: int) -> tuple[list[Agreement], dict[str, Cost]]:
    """Both number formats; the costs in bfloat16."""
    from goaly.generate.vllm_engine import VllmEngine
    from goaly.train.train_engine import TrainEngine

    found: list[Agreement] = []
    costs: dict[str, Cost] = {}
    requests = asked(count)
    with tempfile.TemporaryDirectory(prefix="bench-routing-") as folder:
        path = str(write_tiny_model(Path(folder) / "model", TinyModel(experts=8)))
        models = {dtype: ModelSettings(path=path, dtype=dtype) for dtype in DTYPES}
        # An engine that is freed takes vLLM's process groups with it, which the next one uses.
        recorders = {dtype: VllmEngine(GENERATOR, model, records_choices=True) for dtype, model in models.items()}
        for dtype, model in models.items():
            recording = recorders[dtype]
            rows = rows_of(sampled(recording, requests), ROW_LENGTH)
            trainer = TrainEngine(model, TRAINER)
            found += [agreement(trainer, rows, dtype, routing) for routing in ("own", "replay")]
            if dtype == "bfloat16":
                costs["generation"] = generation({"replay": recording, "own": VllmEngine(GENERATOR, model)}, requests)
                costs["training"] = training(trainer, rows)
    return found, costs


def markdown(found: Sequence[Agreement], costs: dict[str, Cost]) -> str:
    """The page of the results."""
    rows = [
        f"| {one.dtype}, {one.routing} | {one.differing:,} of {one.choices:,} ({one.differing / one.choices:.2%}) | "
        f"{one.greatest:.2g} | {one.sampler_kl:.2g} |"
        for one in found
    ]
    taken = [
        f"| {name} | {median(cost.own):.2f} | {median(cost.replay):.2f} | {cost.ratio:.3f} |"
        for name, cost in costs.items()
    ]
    return "\n".join(
        [
            "# Routing replay: what it changes, and what it costs",
            "",
            "    python -m bench.routing --json docs/results/routing.json --markdown docs/results/routing.md",
            "",
            f"A random model of 3 layers, two of eight experts for each token; {found[0].tokens:,} sampled tokens.",
            "",
            "| | choices that differ from the sampler's | greatest difference of log-probs | `sampler_kl` |",
            "|---|---|---|---|",
            *rows,
            "",
            "CPU seconds in bfloat16, medians; the ratio is the median over the rounds, in which the two take turns.",
            "",
            "| | own | replay | ratio |",
            "|---|---|---|---|",
            *taken,
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    arguments = options(__doc__, "json", "markdown", requests=192).parse_args(argv)
    machine = Machine.now()
    torch.set_num_threads(1)
    found, costs = measure(arguments.requests)
    table = Table("", "differ", "greatest", "sampler_kl", title="replayed routing")
    for one in found:
        share = f"{one.differing / one.choices:.3%}"
        table.add_row(f"{one.dtype}, {one.routing}", share, f"{one.greatest:.2g}", f"{one.sampler_kl:.2g}")
    Console().print(table)
    for name, cost in costs.items():
        print(f"{name}: {cost.ratio:.3f} times the CPU seconds")
    taken = {name: {"ratio": cost.ratio, **asdict(cost)} for name, cost in costs.items()}
    record = {"machine": machine.record(), "agreement": [asdict(one) for one in found], "costs": taken}
    write(arguments.json, record)
    write(arguments.markdown, markdown(found, costs))


if __name__ == "__main__":
    main()
