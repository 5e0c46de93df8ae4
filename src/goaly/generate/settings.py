"""Settings of the generator replicas, and the default sampling parameters of requests."""

from collections.abc import Iterator, Mapping
from dataclasses import field
from importlib.metadata import PackageNotFoundError, version
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MinLen

from goaly.base.config.settings import NonNegativeInt, PositiveFloat, PositiveInt, Section, Settings, Share
from goaly.models.settings import division_problems

if TYPE_CHECKING:
    from goaly.models.architecture import Architecture

NO_ADAPTERS = "must be torchtitan where trainer.lora is set: adapters are published by torchtitan's names"


class GeneratorSettings(Settings):
    """A vLLM engine in each generator process."""

    replicas: PositiveInt = 1
    """Number of engines that generate in parallel."""
    tp: PositiveInt = 1
    """Tensor-parallel processes of one replica."""
    ep: PositiveInt = 1
    """Expert-parallel processes of a replica. `tp`: each computes with its own share of a layer's experts; 1: each
    computes with a part of every expert."""
    engine: Literal["torchtitan", "native"] = "torchtitan"
    """Model definition inside vLLM: "torchtitan" (the trainer's own) or "native" (vLLM's). A run that trains supports
    "native" for dense Qwen3 models on GPUs; on CPU its weights cannot change."""
    max_running: PositiveInt | Literal["auto"] = 128
    """Most requests that a replica decodes at once; more wait. "auto" starts with as many as the key-value cache
    certainly holds (its tokens divided by `max_context`), and follows the measured use of the cache: it grows while the
    cache has room, and shrinks before it is full or when requests are preempted. It is at most 1,024, and at most
    `max_step_tokens`. Choose it where answers are much shorter than `max_context`, or change their length."""
    max_context: Annotated[int, Ge(2)] = 1024
    """Most tokens of a prompt and its answer together; an answer that reaches it ends as at its token limit."""
    max_step_tokens: int = 4096
    """Most tokens that one engine step computes: one of each running request, and prompts with what is left. A longer
    prompt is computed in several steps. Lower it where long prompts hold up the answers beside them."""
    kv_cache_gib: PositiveFloat = 0.5
    """Memory of the key-value cache of each process, in GiB."""
    on_update: Literal["recompute", "keep", "drain"] = "recompute"
    """Running requests under new weights: "recompute" computes their key-value cache again, "keep" keeps the old cache,
    "drain" waits for them to finish before it applies the weights. With "keep" the next turn of an episode also goes on
    with the cache of its earlier ones, and with the others it computes them again under the new weights."""
    prefix_caching: bool = True
    """Compute the shared prompt of a group's samples only once."""
    cuda_graphs: bool = True
    """Record decode steps as CUDA graphs. No effect on CPU, with `model.numerics=bitwise`, and on experts in float32 or
    on a GPU older than Hopper."""
    async_scheduling: bool = False
    """GPU only: plan the next decode step while the GPU computes this one. Each weight update first waits for the step
    under way. Set it where steps are short; it has not been measured on a GPU yet."""
    threads: PositiveInt = 1
    """CPU threads of each process."""
    start_minutes: PositiveFloat = 30.0
    """Time limit for the start of a replica: to load the model and to catch up with the weights. A replica that takes
    longer is killed: at the start of the run this ends the run, later it starts another one. Raise it for models that
    load slowly."""
    seed: int = 0
    """Seeds the sampling; replica i uses seed + i. Each request of an evaluation has a seed of its own, made of this
    one, the policy version, the problem and the number of the sample, so that an evaluation can be repeated."""

    def device_problems(self, prefix: str, *, device: str | None = None, updates: bool = True) -> list[str]:
        """One line for each setting that cannot work on `device` (None: vLLM's own), with weight updates or without."""
        found = []
        on_cpu = (device or vllm_device()) == "cpu"
        if self.engine == "native" and updates and on_cpu:
            why = "vLLM's own models prepack their linear layers, so weight updates cannot reach them"
            found.append(f"{prefix}engine=native: must be torchtitan in a run that trains on CPU: {why}")
        if self.async_scheduling and on_cpu:
            why = "where vLLM plans and computes steps in one thread"
            found.append(f"{prefix}async_scheduling=true: must be false on CPU, {why}")
        return found

    @property
    def most_running(self) -> int:
        """The most requests that `max_running` ever allows."""
        if self.max_running == "auto":
            return min(MOST_RUNNING, self.max_step_tokens)
        return self.max_running

    def _problems(self, at: Section) -> Iterator[str]:
        if self.ep not in (1, self.tp):
            yield f"{at.ep}: must be 1 or {at.tp}, the processes of a replica"
        if self.max_step_tokens < (1 if self.max_running == "auto" else self.max_running):
            because = "because each running request decodes one token in a step"
            yield f"{at.max_step_tokens}: must be at least {at.max_running}, {because}"

    def shape_problems(self, at: Section, shape: "Architecture", whose: str) -> Iterator[str]:
        """One line for each reason why a replica cannot divide a model of this shape; `whose` is its name."""
        yield from division_problems(at, self.tp, self.ep, shape, whose)
        if shape.vocab_size % self.tp:
            yield f"{at.tp}: must divide the {whose}'s vocabulary of {shape.vocab_size} tokens"
        if not shape.experts and shape.hidden_dim % self.tp:
            yield f"{at.tp}: must divide the width {shape.hidden_dim} of the {whose}'s feed-forward networks"

    def cached_token_bytes(self, shape: "Architecture", dtype: str) -> int:
        """The bytes of a token's keys and values in the cache of each process."""
        return 2 * shape.layers * max(1, shape.kv_heads // self.tp) * shape.head_dim * (4 if dtype == "float32" else 2)

    def model_problems(
        self, at: Section, model: str, shape: "Architecture", dtype: str, *, device: str | None = None
    ) -> Iterator[str]:
        """One line for each reason why `device` cannot serve this model; `model` is its name in messages."""
        block = CPU_BLOCK_TOKENS if (device or vllm_device()) == "cpu" else GPU_BLOCK_TOKENS
        tokens = (ceil(self.max_context / block) + 1) * block  # vLLM keeps a block for itself
        least = tokens * self.cached_token_bytes(shape, dtype) / (1 << 30)
        if self.kv_cache_gib < least:
            right = f"must be at least {ceil(least * 1e4) / 1e4:g} to hold a sequence of {at.max_context}"
            yield f"{at.kv_cache_gib}: {right}"
        if self.max_context > shape.max_context:
            yield f"{at.max_context}: must be at most the model's context of {shape.max_context}"
        if (device or vllm_device()) == "cpu" and shape.head_dim not in CPU_HEAD_DIMS:
            known = ", ".join(map(str, CPU_HEAD_DIMS))
            yield (
                f"{model}: has attention heads of dimension {shape.head_dim}, must be one of {known} on CPU, because "
                "vLLM's attention has no others"
            )


MOST_RUNNING = 1024
"""The limit of `generator.max_running=auto`. vLLM reserves memory for each request that it may run."""
CPU_BLOCK_TOKENS = 32
"""The smallest block of the key-value cache that the CPU kernels support. vLLM's default is 128, but only whole blocks
of a prefix are shared."""
GPU_BLOCK_TOKENS = 16
"""The smallest block that vLLM chooses on a GPU."""
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head dimensions for which vLLM's attention on CPU has kernels (`tests/characterization` compares them)."""


def vllm_device() -> str:
    """Device of the installed vLLM: its CPU build is another package, or has "cpu" in its version."""
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
    "structured_outputs": None,
}
"""The parameters that change the distribution of tokens, each with the value that keeps the model's distribution. All
others only decide where an answer ends, or the random draw."""
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
"""vLLM silently raises a lower temperature to the first, and refuses one above the second."""


Penalty = Annotated[float, Ge(-2), Le(2)]


class SamplingSettings(Settings):
    """How answers are sampled."""

    temperature: float = 1.0
    """Logits are divided by it; 0 decodes greedily. In a run that trains it must be `trainer.temperature`."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Sample from the smallest set of tokens with at least this probability; 1 is all tokens. For evaluations: it must
    be 1 in a run that trains."""
    top_k: Literal[-1] | PositiveInt = -1
    """Sample from the `top_k` most likely tokens; -1 is all tokens. For evaluations: it must be -1 in a run that
    trains."""
    min_p: Share = 0.0
    """Sample from the tokens with at least this share of the most likely token's probability; 0 is all tokens. For
    evaluations: it must be 0 in a run that trains."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logit of each token that is in the answer already. For evaluations: it must be 0 in a run
    that trains."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit once for each time that it is in the answer already. For evaluations: it must be
    0 in a run that trains."""
    repetition_penalty: PositiveFloat = 1.0
    """Divides the logit of each token that is in the prompt or the answer already; above 1 such tokens become less
    likely. For evaluations: it must be 1 in a run that trains."""
    max_tokens: PositiveInt = 256
    """Most tokens of one answer."""
    min_tokens: NonNegativeInt = 0
    """Fewest tokens of one answer: before, no stop token is drawn and no stop string ends it. For evaluations: it must
    be 0 in a run that trains, because forbidding stop tokens changes the distribution."""
    stop: list[Annotated[str, MinLen(1)]] = field(default_factory=list)
    """Texts that end an answer, such as `["\\n\\n"]`. The tokens of that text stay in the answer."""
    stop_token_ids: list[NonNegativeInt] | None = None
    """Tokens that end an answer, instead of the model's own; null: those in the model's `generation_config.json` and in
    its tokenizer."""

    def _problems(self, at: Section) -> Iterator[str]:
        if self.temperature != 0 and not LOWEST_TEMPERATURE <= self.temperature <= HIGHEST_TEMPERATURE:
            bounds = f"at least {LOWEST_TEMPERATURE} and at most {HIGHEST_TEMPERATURE}"
            yield f"{at.temperature}: must be 0 (greedy), or {bounds}"
        if self.min_tokens > self.max_tokens:
            yield f"{at.min_tokens}: must be at most {at.max_tokens}"

    def training_problems(self, at: Section, trainer: str, temperature: float) -> Iterator[str]:
        """One line for each setting that makes the sampled distribution differ from the trained one: all tokens, at
        `temperature`, which is the setting `trainer`."""
        if self.temperature != temperature:
            otherwise = "or the run trains another distribution than it samples"
            yield f"{at.temperature}: must be {trainer} ({temperature}), {otherwise}"
        because = "because the trainer's log-probabilities are over all tokens"
        for key, value in vars(self).items():
            if key != "temperature" and value != NEUTRAL.get(key, value):
                yield f"{at}{key}={value}: must be {NEUTRAL[key]} in a run that trains, {because}"
