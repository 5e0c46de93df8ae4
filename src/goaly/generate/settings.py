"""What a generator replica is made of, and how it samples unless a request says otherwise."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

ENGINES = ("torchtitan", "native")
APPLY_MODES = ("recompute", "keep", "drain")
PREPACKED = (
    "vLLM's own models prepack their linear layers on CPU, so no weight update can reach them; "
    'use engine "torchtitan" in a run that trains'
)

FLIP_UNDER_GRAPHS = (
    "must be copy where decode steps are recorded as CUDA graphs, which would go on with the old memory; "
    "or set generator.cuda_graphs=false"
)


@dataclass(kw_only=True)
class GeneratorSettings:
    """A vLLM engine in each generator process."""

    replicas: int = 1
    """How many engines generate side by side."""

    tp: int = 1
    """Tensor-parallel processes of one replica."""

    engine: str = "torchtitan"
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

    apply: str = "recompute"
    """What happens to running requests when new weights come: "recompute" fills their key-value cache anew under the
    new weights, "keep" goes on with the old one, "drain" lets them end first and applies the weights then."""

    prefix_caching: bool = True
    """Compute the prompt that the samples of a group share only once."""

    cuda_graphs: bool = True
    """Record decode steps as CUDA graphs; without effect on CPU."""

    threads: int = 1
    """CPU threads of each process."""

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
        if self.kv_cache_gib <= 0:
            problems.append(f"{prefix}kv_cache_gib={self.kv_cache_gib}: must be positive")
        if self.apply not in APPLY_MODES:
            problems.append(f"{prefix}apply={self.apply!r}: must be one of {', '.join(APPLY_MODES)}")
        if self.engine not in ENGINES:
            problems.append(f"{prefix}engine={self.engine!r}: must be one of {', '.join(ENGINES)}")
        elif self.engine == "native" and updates and (device or vllm_device()) == "cpu":
            problems.append(f'{prefix}engine="native": {PREPACKED}')
        return problems


def vllm_device() -> str:
    """What the installed vLLM computes on: its CPU build is another package, or says so in its version."""
    try:
        return "cpu" if "cpu" in version("vllm") else "cuda"
    except PackageNotFoundError:
        return "cpu"


@dataclass(kw_only=True)
class SamplingSettings:
    """How answers are sampled."""

    temperature: float = 1.0
    """Logits are divided by it; 0 decodes greedily."""

    top_p: float = 1.0
    """Sample from the smallest set of tokens with at least this probability; 1 is all of them."""

    top_k: int = -1
    """Sample from so many of the likeliest tokens; -1 is all of them."""

    max_tokens: int = 256
    """Most tokens of one answer."""

    def problems(self, prefix: str) -> list[str]:
        """One line for each setting that can't work."""
        problems = []
        if self.temperature < 0:
            problems.append(f"{prefix}temperature={self.temperature}: must be at least 0")
        if not 0 < self.top_p <= 1:
            problems.append(f"{prefix}top_p={self.top_p}: must be above 0 and at most 1")
        if self.top_k == 0 or self.top_k < -1:
            problems.append(f"{prefix}top_k={self.top_k}: must be at least 1, or -1 for all tokens")
        if self.max_tokens < 1:
            problems.append(f"{prefix}max_tokens={self.max_tokens}: must be at least 1")
        return problems
