"""What a generator replica is made of, and how it samples unless a request says otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from math import inf
from typing import Any, Literal, Protocol

from goaly.configuration.schema import KnownWords

PREPACKED = (
    "vLLM's own models prepack their linear layers on CPU, so no weight update can reach them; "
    'use engine "torchtitan" in a run that trains'
)

FLIP_UNDER_GRAPHS = (
    "must be copy where decode steps are recorded as CUDA graphs, which would go on with the old memory; "
    "or set generator.cuda_graphs=false"
)


@dataclass(kw_only=True)
class GeneratorSettings(KnownWords):
    """A vLLM engine in each generator process."""

    replicas: int = 1
    """How many engines generate side by side."""

    tp: int = 1
    """Tensor-parallel processes of one replica."""

    engine: Literal["torchtitan", "native"] = "torchtitan"
    """Which model definition runs inside vLLM: "torchtitan" (the trainer's own) or "native" (vLLM's; in a run that
    trains for Qwen3 on GPUs, on CPU only for weights that never change)."""

    max_running: int = 128
    """How many requests a replica decodes at once; more wait."""

    max_context: int = 1024
    """Most tokens of a prompt and its answer together; an answer that gets there ends as if by its token limit."""

    max_step_tokens: int = 4096
    """Most tokens that one engine step computes; on GPUs a longer prompt is prefilled in parts."""

    kv_cache_gib: float = 0.5
    """Memory of the key-value cache of each process, in GiB."""

    on_update: Literal["recompute", "keep", "drain"] = "recompute"
    """What happens to running requests when new weights come: "recompute" fills their key-value cache anew under the
    new weights, "keep" goes on with the old one, "drain" lets them end first and applies the weights then."""

    prefix_caching: bool = True
    """Compute the prompt that the samples of a group share only once."""

    cuda_graphs: bool = True
    """Record decode steps as CUDA graphs; without effect on CPU."""

    threads: int = 1
    """CPU threads of each process."""

    start_minutes: float = 30.0
    """Most minutes that a replica may take to start: to load the model and to catch up with the weights. One that takes
    longer is killed; at the start of the run that ends the run, later another replacement is tried. Raise it for models
    that load slowly."""

    seed: int = 0
    """Seeds the sampling of requests that bring no seed of their own; replica i uses seed + i."""

    def problems(self, prefix: str, *, device: str | None = None, updates: bool = True) -> list[str]:
        """One line for each setting that can't work on `device` (vLLM's own), with weight updates or without."""
        problems = [
            f"{prefix}{key}={getattr(self, key)}: must be at least 1"
            for key in ("replicas", "tp", "max_running", "threads")
            if getattr(self, key) < 1
        ]
        if self.max_context < 2:
            problems.append(f"{prefix}max_context={self.max_context}: must be at least 2, a prompt and an answer")
        if self.max_step_tokens < self.max_running:
            problems.append(
                f"{prefix}max_step_tokens={self.max_step_tokens}: must be at least max_running ({self.max_running}), "
                "for each running request decodes one token a step"
            )
        problems += [
            f"{prefix}{key}={getattr(self, key)}: must be positive"
            for key in ("kv_cache_gib", "start_minutes")
            if not getattr(self, key) > 0
        ]
        if self.engine == "native" and updates and (device or vllm_device()) == "cpu":
            problems.append(f'{prefix}engine="native": {PREPACKED}')
        return problems

    def model_problems(self, prefix: str, model: str, shape: "ModelShape", *, device: str | None = None) -> list[str]:
        """One line for each reason why this model, which `model` names in messages, can't be served on `device`."""
        problems = []
        if self.max_context > shape.max_context:
            problems.append(
                f"{prefix}max_context={self.max_context}: must be at most the model's context of {shape.max_context}"
            )
        if (device or vllm_device()) == "cpu" and shape.head_dim not in CPU_HEAD_DIMS:
            known = ", ".join(map(str, CPU_HEAD_DIMS))
            problems.append(
                f"{model}: has attention heads of dimension {shape.head_dim}, must be one of {known} on CPU, where "
                "vLLM's attention has no others"
            )
        return problems


CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The head dimensions that vLLM's attention on CPU has kernels for (`tests/characterization` compares them)."""


class ModelShape(Protocol):
    """What a generator needs to know about a model."""

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        ...

    @property
    def max_context(self) -> int:
        """Most positions that the model knows."""
        ...


def vllm_device() -> str:
    """What the installed vLLM computes on: its CPU build is another package, or says so in its version."""
    try:
        return "cpu" if "cpu" in version("vllm") else "cuda"
    except PackageNotFoundError:
        return "cpu"


NEUTRAL: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "min_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "allowed_token_ids": None,
}
"""The parameters that change the distribution which tokens are drawn from, each with the value that leaves it as the
model gives it. A parameter that is not here decides only where an answer ends, or which draw is made."""
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
"""vLLM raises a lower one to the first without an error, and refuses a higher one than the second."""


@dataclass(kw_only=True)
class SamplingSettings:
    """How answers are sampled."""

    temperature: float = 1.0
    """Logits are divided by it; 0 decodes greedily. In a run that trains it must be `trainer.temperature`."""

    top_p: float = 1.0
    """Sample from the smallest set of tokens with at least this probability; 1 is all of them. Evaluations only: in a
    run that trains it must be 1."""

    top_k: int = -1
    """Sample from so many of the likeliest tokens; -1 is all of them. Evaluations only: in a run that trains it must be
    -1."""

    min_p: float = 0.0
    """Sample from the tokens with at least this share of the likeliest token's probability; 0 is all of them.
    Evaluations only: in a run that trains it must be 0."""

    presence_penalty: float = 0.0
    """What is subtracted from the logit of a token that the answer has already, from -2 to 2. Evaluations only: in a
    run that trains it must be 0."""

    frequency_penalty: float = 0.0
    """What is subtracted from a token's logit for each time that the answer has it already, from -2 to 2. Evaluations
    only: in a run that trains it must be 0."""

    repetition_penalty: float = 1.0
    """Divides the logit of a token that prompt or answer have already; above 1 it becomes less likely. Evaluations
    only: in a run that trains it must be 1."""

    max_tokens: int = 256
    """Most tokens of one answer."""

    min_tokens: int = 0
    """Fewest tokens of one answer: until then no stop token can be drawn, and no stop string ends it. Evaluations only:
    in a run that trains it must be 0, for without its stop tokens the distribution is another one."""

    stop: list[str] = field(default_factory=list)
    """Texts that end an answer, such as `["\\n\\n"]`. The tokens that write such a text stay in the answer, whole."""

    stop_token_ids: list[int] | None = None
    """Tokens that end an answer, instead of the model's own; null: those that its `generation_config.json` and its
    tokenizer name."""

    def problems(self, prefix: str) -> list[str]:
        """One line for each setting that can't work."""
        problems = []

        def need(key: str, holds: bool, must: str) -> None:
            if not holds:
                problems.append(f"{prefix}{key}={getattr(self, key)}: must be {must}")

        need(
            "temperature",
            self.temperature == 0 or LOWEST_TEMPERATURE <= self.temperature <= HIGHEST_TEMPERATURE,
            f"0 (greedy), or at least {LOWEST_TEMPERATURE} and at most {HIGHEST_TEMPERATURE}",
        )
        need("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        need("top_k", self.top_k == -1 or self.top_k >= 1, "at least 1, or -1 for all tokens")
        need("min_p", 0 <= self.min_p <= 1, "at least 0 and at most 1")
        need("presence_penalty", -2 <= self.presence_penalty <= 2, "at least -2 and at most 2")
        need("frequency_penalty", -2 <= self.frequency_penalty <= 2, "at least -2 and at most 2")
        need("repetition_penalty", 0 < self.repetition_penalty < inf, "a number above 0")
        need("max_tokens", self.max_tokens >= 1, "at least 1")
        need("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"at least 0 and at most {prefix}max_tokens")
        need("stop", all(self.stop), "a list of texts that are not empty")
        need("stop_token_ids", all(token >= 0 for token in self.stop_token_ids or ()), "a list of ids of at least 0")
        return problems

    def training_problems(self, prefix: str, trainer: str, temperature: float) -> list[str]:
        """One line for each setting that makes the sampled distribution another than the trained one, which is over
        all tokens at `temperature`, the setting that `trainer` names."""
        problems = []
        if self.temperature != temperature:
            problems.append(
                f"{prefix}temperature={self.temperature}: must be {trainer} ({temperature}), or what is trained is not "
                "what was sampled"
            )
        for key in (key for key in vars(self) if key in NEUTRAL and key != "temperature"):
            if (value := getattr(self, key)) != NEUTRAL[key]:
                problems.append(
                    f"{prefix}{key}={value}: must be {NEUTRAL[key]} in a run that trains: the trainer's "
                    "log-probabilities are those of the distribution over all tokens"
                )
        return problems
