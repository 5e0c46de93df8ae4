"""The generator's checks of `bench.gpu`: torchtitan's model in vLLM under CUDA graphs, with steps launched ahead, and
with bitwise numerics. Each returns numbers by name, or raises.
"""

import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from bench.gpu_trainer import MOST_OFF, random_model
from goaly.generate.request import Sample, Sampling
from goaly.generate.settings import GeneratorSettings
from goaly.models.settings import ModelSettings
from goaly.models.tiny_model import TinyModel, write_tiny_model

if TYPE_CHECKING:
    from goaly.generate.vllm_engine import VllmEngine

REQUESTS, PROMPT, ANSWER = (64, 64, 256) if torch.cuda.is_available() else (8, 16, 24)
ROUNDS = 3
STEPS_BETWEEN_UPDATES = 7
STAMP_OFF = 0.02
"""Of a log-prob from the one that its version gives; versions differ by 0.1 and more."""


def cuda_graphs() -> dict[str, Any]:
    """Greedy answers with decode steps recorded as CUDA graphs and without."""
    with tempfile.TemporaryDirectory() as made:
        model = random_model(Path(made))
        engines = {name: _engine(model, cuda_graphs=name == "graphs") for name in ("graphs", "eager")}
        if torch.cuda.is_available() and not engines["graphs"].records_graphs:
            raise AssertionError("the engine records no CUDA graphs")
        return _both(engines)


def async_scheduling() -> dict[str, Any]:
    """Greedy answers with the next step launched ahead and without, and the stamps of answers during updates."""
    with tempfile.TemporaryDirectory() as made:
        model = random_model(Path(made))
        launches_ahead = torch.cuda.is_available()  # a CPU's engines are both step by step
        engines = {
            name: _engine(model, async_scheduling=launches_ahead and name == "ahead") for name in ("ahead", "in_turn")
        }
        return _both(engines) | _stamps(engines["ahead"])


def bitwise_numerics() -> dict[str, int]:
    """The tokens that vLLM sampled of small models; raises if the trainer gives any of them another log-prob."""
    from goaly.generate.vllm_engine import VllmEngine
    from goaly.parity import compared, cramped, mixed_requests, rows_of, sampled
    from goaly.train.settings import TrainerSettings
    from goaly.train.train_engine import TrainEngine

    numbers = {}
    for name, size in {"dense": TinyModel(), "experts": TinyModel(experts=8)}.items():
        with tempfile.TemporaryDirectory() as made:
            folder = str(write_tiny_model(Path(made) / "model", size))
            model = ModelSettings(path=folder, dtype="bfloat16", numerics="bitwise")
            asked = mixed_requests(64, vocabulary=30, longest=400)
            engine = VllmEngine(cramped(model, GeneratorSettings(max_running=32, max_context=512), asked), model)
            rows = rows_of(sampled(engine, asked), 1024)
            found = compared(rows, TrainEngine(model, TrainerSettings()).logprobs(rows))
        if found.differing:
            raise AssertionError(f"{name}: {found.differing} of {found.tokens} log-probs differ: {found.largest:.3g}")
        numbers[f"{name}_tokens"] = found.tokens
    return numbers


def _engine(model: ModelSettings, **changes: Any) -> "VllmEngine":
    from goaly.generate.vllm_engine import VllmEngine

    settings = GeneratorSettings(
        max_running=REQUESTS, max_context=PROMPT + ANSWER, kv_cache_gib=1.0, on_update="keep", **changes
    )
    return VllmEngine(settings, model)


def _both(engines: dict[str, "VllmEngine"]) -> dict[str, float]:
    """Tokens per second of two engines, and how their greedy answers differ; raises if they are not the same.

    Batches of other sizes round differently, so near a tie the likeliest token may be another: the log-probs up to and
    including the first token that differs must be equal up to rounding."""
    samples = {name: answers(engine) for name, engine in engines.items()}  # a warm-up, too
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(ROUNDS):
        for name, engine in engines.items():
            began = time.perf_counter()
            answers(engine)
            seconds[name].append(time.perf_counter() - began)
    speeds = {f"{name}_tokens_per_second": REQUESTS * ANSWER / median(taken) for name, taken in seconds.items()}
    largest, equal = 0.0, 0
    for one, other in zip(*samples.values(), strict=True):
        same = (one.tokens == other.tokens).long().cumprod(0)
        equal += int(same.sum())
        until = min(int(same.sum()) + 1, ANSWER)
        largest = max(largest, float((one.logprobs - other.logprobs)[:until].abs().max()))
    if largest > MOST_OFF["bfloat16"]:
        raise AssertionError(f"the answers of {' and '.join(engines)} differ: log-probs by {largest:.3g}")
    first, second = speeds.values()
    return speeds | {
        "speedup": first / second,
        "equal_tokens_share": equal / (REQUESTS * ANSWER),
        "logprob_difference": largest,
    }


def answers(engine: "VllmEngine") -> list[Sample]:
    """Greedy answers to the same prompts."""
    draw = random.Random(0)
    for number in range(REQUESTS):
        prompt = [draw.randrange(2, 30) for _ in range(PROMPT)]
        engine.add(str(number), prompt, Sampling(max_tokens=ANSWER, temperature=0.0))
    return list(_ended(engine).values())


def _ended(engine: "VllmEngine", *, updates: bool = False) -> dict[str, Sample]:
    """The samples of all requests, by name in order; with `updates` new weights come every few steps."""
    found: dict[str, Sample] = {}
    steps = 0
    while engine.running:
        for name, sample in engine.step():
            assert isinstance(sample, Sample), sample
            found[name] = sample
        steps += 1
        if updates and steps % STEPS_BETWEEN_UPDATES == 0:
            _set_version(engine, engine.version + 1)
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def _stamps(engine: "VllmEngine") -> dict[str, float]:
    """Whether each token was stamped with the version that gave it its log-prob.

    The weights make every hidden state the same, and every answer a row of token 0, whose logit is the version's."""
    live = engine.named_tensors()
    for name, tensor in live.items():
        if name.endswith(("attention.wo.weight", "feed_forward.w2.weight")):
            tensor.zero_()
        elif name in ("tok_embeddings.weight", "norm.weight"):
            tensor.fill_(1.0)
    _set_version(engine, 1)
    answers_between = 2
    for number in range(answers_between * REQUESTS):
        engine.add(str(number), [2, 3, 4], Sampling(max_tokens=8 + number % ANSWER, temperature=0.0))
    samples = list(_ended(engine, updates=True).values())
    vocabulary, largest = len(live["lm_head.weight"]), 0.0
    for sample in samples:
        logits = torch.tensor([_logit(int(version)) for version in sample.versions], dtype=torch.float64)
        expected = logits - (logits.exp() + vocabulary - 1).log()
        largest = max(largest, float((sample.logprobs - expected).abs().max()))
    versions = {int(version) for sample in samples for version in sample.versions}
    if largest > STAMP_OFF or len(versions) < 2:
        raise AssertionError(f"tokens of versions {sorted(versions)} have log-probs {largest:.3g} off their versions'")
    return {"stamp_error": largest, "stamped_versions": len(versions)}


def _set_version(engine: "VllmEngine", version: int) -> None:
    head_VD = engine.named_tensors()["lm_head.weight"]

    def fill() -> int:
        head_VD.zero_()
        head_VD[0] = _logit(version) / head_VD.shape[1]
        return version

    engine.apply(fill)


def _logit(version: int) -> float:
    """The logit of token 0 under this version; all others are 0."""
    return 1 + version % 8 / 2
