"""How many log-probs of trainer and sampler differ under bitwise numerics, and what these cost.

    python -m bench.parity [--only bits|costs|MODEL ...] [--requests N] [--json FILE] [--markdown FILE]

Each generator samples requests of mixed lengths with shared prefixes (`goaly.parity.py`), in a cache so small
that some are preempted and in steps so short that prompts are computed in parts, in float32 and in bfloat16. Each
trainer recomputes on three packings what each of them sampled. `tokens` counts each time that a token is compared,
`differing_tokens` those that are not equal. `preemptions`, `prompts_in_parts` and `prefix_hits` are the least of any
generator: none may be 0.

The models are tiny: a dense one and one with experts. A tied model and a Llama have a few of the combinations. Two are
left out because others contain them: the generators of TP 2 and of EP 2 with one thread and without an update.

`generate_cost` and `train_cost` are the CPU seconds of bitwise numerics over those of the fast ones, in one process of
one thread where the two take turns: the same requests sampled by an engine, and forward and backward passes over the
same packed rows. A round runs both sides twice, in the order A, B, B, A, after one that warms both up; a cost is the
median over the rounds' ratios. All of two tiny random models, a dense one and one with experts, or of `--model`; both
sides have the same, in float32. The costs of a model with experts begin with `experts_`.

If a log-prob differs, a generator did not preempt, all models together have fewer than 100,000 tokens, or a cost is
above its bar, the exit code is 1 and the last line names it.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from bench.parity_result import Combination, Result, Sampled, markdown
from bench.report import options, show
from goaly.generate.settings import GeneratorSettings
from goaly.models.families import architecture, read_config
from goaly.models.settings import ModelSettings
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.parity import Recomputer, Sampler, cramped, mixed_requests, recompute_in_ranks, sample_in_ranks
from goaly.run.rendezvous import fork_ranks_from_one_server
from goaly.train.settings import TrainerSettings
from tests.random_model import write_random_llama

TRAINING_ROUNDS, GENERATION_ROUNDS = 8, 3
LONGEST = 512
LEAST_TOKENS = 100_000
"""Fewer compared ones, of everything that is measured, say too little."""
DTYPES = ("float32", "bfloat16")
UPDATES = "update"
GENERATORS: dict[str, dict[str, int]] = {
    "TP 1": {},
    "TP 1, 2 threads": {"threads": 2},
    f"TP 2, {UPDATES}": {"tp": 2},
    "TP 2, 2 threads": {"tp": 2, "threads": 2},
}
"""Those with an `update` halve the weights in the middle of answers."""
TRAINERS: dict[str, dict[str, int]] = {
    "1 rank": {},
    "1 rank, 2 threads": {"threads": 2},
    "FSDP 2": {"fsdp": 2},
    "TP 2": {"tp": 2},
    "FSDP 2, TP 2": {"fsdp": 2, "tp": 2},
}
OF_EXPERTS = {"EP 2, 2 threads": {"tp": 2, "ep": 2, "threads": 2}}
TRAINERS_OF_EXPERTS = {
    "FSDP 2, EP 2": {"fsdp": 2, "ep": 2},
    "TP 2, EP 2": {"tp": 2, "ep": 2},
    "FSDP 2, TP 2, EP 2": {"fsdp": 2, "tp": 2, "ep": 2},
    "FSDP 2, TP 2, EP 4": {"fsdp": 2, "tp": 2, "ep": 4},
}
BRIEF = ("TP 1", f"TP 2, {UPDATES}", "EP 2, 2 threads", "1 rank", "FSDP 2, TP 2")
DIFFER_IN_ONE_LAYER = ("tied", "Llama")
"""The models that differ from another one in one layer, and have these combinations."""
SIZES = {"dense": TinyModel(), "experts": TinyModel(experts=8)}
"""The models of the costs."""
MODELS: dict[str, Callable[[Path], Path]] = {
    "dense": write_tiny_model,
    "experts": partial(write_tiny_model, size=SIZES["experts"]),
    "tied": partial(write_tiny_model, size=TinyModel(tied=True)),
    "Llama": write_random_llama,
}
"""The models whose log-probs are compared."""
PACKINGS = ((1024, 4), (512, 1), (2048, 2))


def bits(name: str, model: str, requests: int) -> Result:
    """Compare every generator with every trainer of this model."""
    shape = architecture(read_config(model))
    generators, trainers = GENERATORS, TRAINERS
    if shape.experts:
        generators, trainers = GENERATORS | OF_EXPERTS, TRAINERS | TRAINERS_OF_EXPERTS
    if name in DIFFER_IN_ONE_LAYER:
        generators = {one: degrees for one, degrees in generators.items() if one in BRIEF}
        trainers = {one: degrees for one, degrees in trainers.items() if one in BRIEF}
    did: list[Sampled] = []
    found: list[Combination] = []
    with tempfile.TemporaryDirectory() as folder:
        sampled: dict[tuple[str, str], Path] = {}
        for number, dtype in enumerate(DTYPES):
            asked = mixed_requests(requests, vocabulary=shape.vocab_size, longest=LONGEST, seed=10 * number)
            for generator, degrees in generators.items():
                settings = ModelSettings(path=model, dtype=dtype, numerics="bitwise")
                file = sampled[dtype, generator] = Path(folder) / f"{dtype}-{generator}"
                limits = GeneratorSettings(max_running=32, max_context=LONGEST, **degrees)
                sampler = Sampler(
                    model=settings,
                    generator=cramped(settings, limits, asked),
                    asked=asked,
                    updates=UPDATES in generator,
                )
                scheduling = sample_in_ranks(sampler, file)
                did.append(Sampled(model=name, dtype=dtype, generator=generator, scheduling=scheduling))
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
            for (dtype, generator), of_packings in zip(sampled, recompute_in_ranks(recomputers), strict=True):
                found.append(
                    Combination(
                        model=name,
                        dtype=dtype,
                        generator=generator,
                        trainer=trainer,
                        tokens=sum(one.tokens for one in of_packings),
                        differing=sum(one.differing for one in of_packings),
                    )
                )
    return Result(generators=did, combinations=found)


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
    from goaly.train.train_engine import TrainEngine

    objective, rows = PolicyObjective(LossSettings()), packed_batch().rows
    trained = int(rows["trained"].sum())

    def side(numerics: Any) -> Callable[[], None]:
        engine = TrainEngine(ModelSettings(path=model, numerics=numerics), TrainerSettings())

        def step() -> None:
            engine.forward_backward(rows.split(4), objective, trained)
            engine._model.zero_grad()

        return step

    return in_turns({numerics: side(numerics) for numerics in ("fast", "bitwise")}, TRAINING_ROUNDS)


def generation(model: str) -> dict[str, list[float]]:
    """The requests of `bench.generate`, all there at once."""
    from bench.generate import heavy_tailed
    from goaly.generate.request import Sampling
    from goaly.generate.vllm_engine import VllmEngine

    requests = heavy_tailed(192)

    def side(numerics: Any) -> Callable[[], None]:
        settings = GeneratorSettings(max_running=128, max_context=LONGEST, kv_cache_gib=0.3)
        engine = VllmEngine(settings, ModelSettings(path=model, numerics=numerics))

        def serve() -> None:
            for number, request in enumerate(requests):
                engine.add(str(number), request.prompt, Sampling(max_tokens=request.tokens))
            while engine.running:
                engine.step()

        return serve

    return in_turns({numerics: side(numerics) for numerics in ("fast", "bitwise")}, GENERATION_ROUNDS)


def costs(models: Iterable[str]) -> Iterator[Result]:
    """The CPU seconds of each cost of these models."""
    import torch

    torch.set_num_threads(1)
    for model in models:
        kind = "experts_" if architecture(read_config(model)).experts else ""
        yield Result(seconds={f"{kind}train_cost": training(model)})
        yield Result(seconds={f"{kind}generate_cost": generation(model)})


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write."""
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # two ranks of two threads each would spin for each other
    parser = options(__doc__, "json", "markdown", requests=32)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; tiny random models by default")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=("bits", "costs", *MODELS),
        help="measure only these, of the models their bits; the rest of the files stays as it is",
    )
    arguments = parser.parse_args(argv)
    if arguments.model and set(arguments.only or ()) & MODELS.keys():
        parser.error("--only names a tiny model, but --model is another one: must be bits or costs")
    if arguments.only and arguments.markdown and not arguments.json:
        parser.error("--markdown with --only also needs --json, which has what is not measured")
    wanted = set(arguments.only or ("bits", "costs"))
    result = Result.read(arguments.json) if arguments.only and arguments.json and arguments.json.exists() else Result()
    fork_ranks_from_one_server()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if arguments.model is not None:
            compared = costed = {arguments.model.name: str(arguments.model)}
        else:
            compared = {name: str(write(folder / f"bits of {name}")) for name, write in MODELS.items()}
            costed = {name: str(write_tiny_model(folder / name, size)) for name, size in SIZES.items()}
        of_bits = (bits(*model, arguments.requests) for model in compared.items() if wanted & {"bits", model[0]})
        for part in chain(of_bits, costs(costed.values()) if "costs" in wanted else ()):
            result = result.updated(part)
            if arguments.json is not None:
                result.write(arguments.json)
            if arguments.markdown is not None:
                arguments.markdown.write_text(markdown(result))
    show(result.numbers(), "bitwise parity")
    missed, tokens = result.missed(), result.numbers()["tokens"]
    if arguments.only is None and tokens < LEAST_TOKENS:
        missed.append(f"tokens {tokens:,} is below {LEAST_TOKENS:,}")
    if missed:
        raise SystemExit("; ".join(missed))


if __name__ == "__main__":
    main()
