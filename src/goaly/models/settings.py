"""Which model is trained and sampled, how many ranks can divide it, and how its tokens are routed to experts."""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from goaly.base.config.settings import NonNegativeInt, PositiveFloat, PositiveInt, Section, Settings

if TYPE_CHECKING:
    from goaly.models.architecture import Architecture

EXPERT_MULTIPLE = 8
"""Widths of experts must be multiples of this: their matrix product needs rows of whole 16 bytes, also in bfloat16."""
MOST_EXPERTS = 256
"""A choice of an expert is recorded in a byte."""
Numerics = Literal["fast", "bitwise"]
ADAPTER_CONFIG = "adapter_config.json"
"""The file that a folder of adapters has."""
Target = Literal["q", "k", "v", "o", "gate", "up", "down", "experts"]
TARGETS: tuple[Target, ...] = get_args(Target)


class ModelSettings(Settings):
    """The model that trainer, generator and reference share at the start."""

    path: str = ""
    """A Hugging Face folder: config.json, safetensors, tokenizer files. Families: Qwen3, dense or with experts,
    Llama 3, DeepSeek-V3, dots.llm1, and gpt-oss without quantization."""
    architecture: (
        Literal[
            "qwen3-0.6b",
            "qwen3-8b",
            "qwen3-32b",
            "qwen3-30b-a3b",
            "qwen3-coder-30b-a3b",
            "qwen3-235b-a22b",
            "llama3-70b",
        ]
        | None
    ) = None
    """The published model that the folder must hold. Dry runs and `tiny` then need no folder. null: any model."""
    tiny: bool = False
    """Try the run on a CPU: replace the model by a tiny one with random weights, of the same family and number of
    experts, and keep the pattern of parallelism, with two ranks each for trainer and generator. Lengths, batches and
    steps become small too, and `hosts` is this machine. `backlog.dynamic_sampling` is off: the tiny model solves no
    problem, so no group would have a signal. Overrides on the command line are applied after that. The resolved config
    has these small values, and `tiny: false`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the model's computations. In bfloat16 the trainer keeps float32 parameters and casts them for
    each pass; a reference keeps bfloat16 ones, and weights travel as bfloat16 (`weights.transfer_dtype`)."""
    numerics: Numerics = "fast"
    """"fast" computes with the fastest kernels, and the log-probs of trainer and sampler differ in their last bits.
    "bitwise" makes them equal to the last bit, and each step checks that they are. It is for Qwen3, dense or with
    experts, and Llama 3, without adapters and context parallelism; docs/parity.md has its cost on CPUs. Its kernels for
    GPUs have run in Triton's interpreter only, and record no CUDA graphs."""

    def _problems(self, at: Section) -> Iterator[str]:
        if self.tiny:
            yield f"{at.tiny}: has no effect on settings in Python, only on those of files and overrides"
        if self.path == "" or self.architecture is None:
            yield from folder_problems(self.path, at)


class MoeSettings(Settings):
    """Mixtures of experts."""

    routing: Literal["own", "replay"] = "own"
    """Experts of each token in trainer and reference: "own" are those that their own routers choose; "replay" are those
    that the sampler chose. Rounding makes a few choices of their own differ from the sampler's, and their log-probs
    with them: set "replay" if `sampler_kl` is high. Trajectories then have a byte for each layer and expert of a
    token."""
    compare_every: PositiveInt | None = 10
    """With "replay", every `compare_every` steps the first microbatch is computed twice before the step: with the
    sampler's choices and with the model's own. `experts/kl_replay` and `experts/kl_own` report both divergences from
    the sampler. null never does."""

    @property
    def replays(self) -> bool:
        """Whether the sampler's choices are recorded and replayed."""
        return self.routing == "replay"

    def compares(self, version: int) -> bool:
        """Whether the trainer of this policy version computes the effect of replay before its next step."""
        return self.replays and self.compare_every is not None and version % self.compare_every == 0

    def _problems(self, at: Section) -> Iterator[str]:
        if not self.replays:
            yield from at.idle(f"{at.routing} replays no choices", "compare_every")

    def shape_problems(self, at: Section, whose: str, shape: "Architecture", model: "Architecture") -> Iterator[str]:
        """One line for each reason why the choices of `model` cannot be replayed in a model of this shape."""
        if not self.replays:
            return
        if shape.experts > MOST_EXPERTS:
            yield f"{at.routing}: the {whose} has {shape.experts} experts, must have at most {MOST_EXPERTS}"
        ours, theirs = ((one.layers - one.dense_layers, one.experts, one.experts_per_token) for one in (shape, model))
        if ours != theirs:
            yield f"{at.routing}: the {whose} has (layers, experts, experts of a token) {ours}, must have {theirs}"


class LoraSettings(Settings):
    """Low-rank adapters (LoRA): the model's weights stay as they are, and only adapters beside them are trained."""

    rank: PositiveInt = 16
    """Rank of the adapters: they have `rank * (inputs + outputs)` numbers for each layer, or for each expert."""
    alpha: PositiveFloat = 32.0
    """Scale: the product of a layer's adapters counts `alpha / rank` times."""
    targets: list[Target] | None = None
    """The layers that get adapters: "q", "k", "v" and "o" of the attention, "gate", "up" and "down" of the dense
    feed-forward networks, "experts" (all three matrices of each expert); null: all of these that the model has.
    Embeddings, norms, routers and the output projection never have adapters."""
    seed: NonNegativeInt = 0
    """Seeds the random start of the adapters, which does not change what the model computes."""
    save: Literal["adapter", "merged"] = "adapter"
    """Form of a saved policy: "adapter" is a folder in PEFT's format, to be used with the model that training started
    from; "merged" is a whole Hugging Face model, in which the adapters are added to the weights and rounded."""

    @property
    def scale(self) -> float:
        """The factor of the adapters' product."""
        return self.alpha / self.rank

    @property
    def chosen(self) -> tuple[Target, ...]:
        """The targets, also those that a model does not have."""
        return TARGETS if self.targets is None else tuple(self.targets)

    def elements(self, shape: "Architecture") -> int:
        """The number of elements of all adapters of a model of this shape."""
        by_target = shape.projections()
        weights = [weight for target in set(self.chosen) for weight in by_target.get(target, ())]
        return sum(self.rank * prod(experts) * (rows + columns) for *experts, rows, columns in weights)

    def _problems(self, at: Section) -> Iterator[str]:
        if self.targets is not None and len(set(self.targets)) != max(len(self.targets), 1):
            yield f"{at.targets}: must name at least one target, and none twice"

    def model_problems(self, at: Section, shape: "Architecture") -> Iterator[str]:
        """One line for each reason why a model of this shape cannot have these adapters."""
        if shape.no_adapters:
            yield f"{at}rank={self.rank}: adapters are not supported for {shape.no_adapters}"
            return
        found = shape.projections()
        for target in self.targets or ():
            if target not in found:
                yield f"{at.targets}: the model has no {target}, must be among {', '.join(found)}"
        narrowest = min((min(weight[-2:]) for target in self.chosen for weight in found.get(target, ())), default=None)
        if narrowest is not None and self.rank > narrowest:
            yield f"{at.rank}: must be at most {narrowest}, the smallest width of these layers"
        if "experts" in found and "experts" in self.chosen and self.rank % EXPERT_MULTIPLE:
            yield f"{at.rank}: must be a multiple of {EXPERT_MULTIPLE} for adapters of experts"


def folder_problems(path: str | None, at: Section) -> Iterator[str]:
    """One line if `at.path` is not a model's folder; null is none."""
    if path == "":
        yield f"{at}path: is not set, must be a Hugging Face folder"
    elif path is not None and not (Path(path) / "config.json").is_file():
        yield no_model(path, f"{at.path}")


def no_model(folder: str | Path, named: str) -> str:
    """A line that says why this folder, which has no config.json, is no model."""
    for adapters in (Path(folder), Path(folder) / "policy"):
        if (adapters / ADAPTER_CONFIG).is_file():
            return f"{named}: has adapters only; python -m goaly.models.adapter_folder {adapters} OUTPUT makes a model"
    return f"{named}: has no config.json, must be a Hugging Face folder"


def division_problems(at: Section, tp: int, ep: int, shape: "Architecture", whose: str) -> Iterator[str]:
    """One line for each reason why these ranks cannot divide the heads and experts of a model of this shape."""
    for what, count in (("attention heads", shape.heads), ("key-value heads", shape.kv_heads)):
        if count % tp:
            yield f"{at}tp={tp}: must divide the {whose}'s {count} {what}"
    if not shape.experts:
        if ep > 1:
            yield f"{at}ep={ep}: must be 1, because the {whose} has no experts"
        return
    if shape.experts % ep:
        yield f"{at}ep={ep}: must divide the {whose}'s {shape.experts} experts"
    if shape.dim % EXPERT_MULTIPLE:
        yield f"the {whose}: has width {shape.dim}, must be a multiple of {EXPERT_MULTIPLE} for a model with experts"
    parts = 1 if ep > 1 else tp
    if shape.hidden_dim % (parts * EXPERT_MULTIPLE):
        each = f"a multiple of {EXPERT_MULTIPLE} for each of {parts} ranks"
        yield f"{at}tp={tp}: the {whose}'s experts have width {shape.hidden_dim}, must be {each}"
    for what, width in (("shared experts", shape.shared_hidden_dim), ("dense layers", shape.dense_hidden_dim)):
        if width % tp:
            yield f"{at}tp={tp}: must divide the width {width} of the {whose}'s {what}"
