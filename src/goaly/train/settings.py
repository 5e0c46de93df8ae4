"""How the models train: layout, optimizer, schedule; the policy, the reference and the critic."""

import math
from collections.abc import Iterator
from dataclasses import field, replace
from typing import TYPE_CHECKING, Literal

from goaly.base.config.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Settings,
    Share,
    ShareBelowOne,
)
from goaly.models.settings import LoraSettings, division_problems, folder_problems

if TYPE_CHECKING:
    from goaly.models.architecture import Architecture

NEEDS_GPU = "needs a GPU: shapes of the CPU's packed attention change with the documents"
AXES = ("pp", "fsdp", "tp", "cp")
"""The settings whose product is the number of ranks."""
NOT_BITWISE = "must be 1 with model.numerics=bitwise, which has no context parallelism, or model.numerics fast"
"""Why ranks with bitwise numerics cannot divide the tokens of a pass."""
TIED_STAGES = "for tied embeddings: the first and the last stage would each need the weight that the other one changes"
SHARED_PLANS = 128
"""DTensor plans each operation once for each number of tokens, which takes longer than a pass. Multiples of this are
few enough to share plans."""
OFFLOAD_NEEDS_GPU = "needs a GPU: on a CPU the parameters are in its memory anyway"


class OptimizerSettings(Settings):
    """AdamW."""

    lr: PositiveFloat = 1e-6
    """Learning rate at the end of the warm-up."""
    beta1: ShareBelowOne = 0.9
    """Decay of the gradient's running mean."""
    beta2: ShareBelowOne = 0.95
    """Decay of the squared gradient's running mean."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, on every parameter."""


class ScheduleSettings(Settings):
    """The learning rate over training steps, each on one batch."""

    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises linearly to its full value."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the rate after the warm-up."""
    total_steps: int | None = None
    """Step at which the decay ends; the rate stays there. Needed for `linear` and `cosine`."""
    min_lr_factor: Share = 0.0
    """Rate at the end of the decay, as a share of the full rate."""

    def _problems(self, at: Section) -> Iterator[str]:
        if self.decay != "constant" and self.total_steps is None:
            yield f"{at}total_steps: is not set, {at.decay} needs it"
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            yield f"{at.total_steps}: must be above {at.warmup_steps}"
        if self.decay == "constant":
            yield from at.idle(f"{at.decay} keeps the full rate", "min_lr_factor")


class RanksSettings(Settings):
    """The ranks of a model."""

    pp: PositiveInt = 1
    """Pipeline stages, each of which has some of the layers, on ranks of its own. Set it for a model that is too large
    for the ranks whose communication is fast: stages exchange hidden states only. A batch should have many more
    microbatches for each data-parallel rank than there are stages, because stages wait for each other at its start and
    end."""
    fsdp: PositiveInt = 1
    """Ranks over which parameters, gradients and optimizer state are sharded; each trains its own rows."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks that share every row."""
    cp: PositiveInt = 1
    """Context-parallel ranks that divide the tokens of every row, for rows that are too long for one rank's memory.
    Parameters are sharded over these ranks too."""
    ep: PositiveInt = 1
    """Expert-parallel ranks, taken from the `fsdp * tp * cp` ones of a stage: each computes with its own share of a
    layer's experts."""
    threads: PositiveInt = 1
    """CPU threads of each rank."""

    @property
    def ranks(self) -> int:
        """Processes of the model."""
        return self.pp * self.stage_ranks

    @property
    def stage_ranks(self) -> int:
        """Processes of a pipeline stage."""
        return self.fsdp * self.tp * self.cp

    @property
    def shards(self) -> int:
        """Ranks over which parameters are sharded, beside tensor parallelism: FSDP's degree."""
        return self.fsdp * self.cp

    @property
    def token_multiple(self) -> int:
        """The tokens of a pass are padded to a multiple of this: ranks can divide them, and share DTensor's plans."""
        divided = self.tp if self.cp == 1 else 2 * self.cp * self.tp
        return divided if self.tp == 1 else math.lcm(divided, SHARED_PLANS)

    def _problems(self, at: Section) -> Iterator[str]:
        if self.stage_ranks % self.ep:
            of_stage = " of a stage" if self.pp > 1 else ""
            product = f"{at}fsdp * {at}tp * {at}cp = {self.stage_ranks}"
            yield f"{at.ep}: must divide the number of ranks{of_stage}, {product}"
        elif self.ep > 1 and self.ep % self.tp:
            yield f"{at.ep}: must be 1 or a multiple of {at.tp}"

    def shape_problems(self, at: Section, shape: "Architecture", whose: str) -> Iterator[str]:
        """One line for each reason why these ranks cannot divide a model of this shape; `whose` is its name."""
        yield from division_problems(at, self.tp, self.ep, shape, whose)
        if self.pp > shape.layers:
            yield f"{at.pp}: must be at most the {whose}'s {shape.layers} layers"
        if self.pp > 1 and shape.tied:
            yield f"{at.pp}: must be 1 {TIED_STAGES}"
        if not shape.experts:
            return
        if self.ep > 1:
            among, name = self.stage_ranks, f"{at}fsdp * {at}tp * {at}cp = {self.stage_ranks}"
        else:
            among, name = self.shards, f"{at}fsdp * {at}cp = {self.shards}" if self.cp > 1 else f"{at.fsdp}"
        if among <= shape.experts:
            if shape.experts % among and not shape.experts % self.ep:
                yield f"{name}: must divide the {whose}'s {shape.experts} experts"
        elif not among % self.ep:
            yield from self._problems_within_experts(name, among // self.ep, shape, whose)

    def _problems_within_experts(self, name: str, ranks: int, shape: "Architecture", whose: str) -> Iterator[str]:
        """One line for each part of an expert that `ranks` cannot divide: more ranks than experts divide each of
        them, along the first dimension of its matrices and evenly."""
        for part, width in self._widths_within_experts(shape).items():
            if width % ranks:
                why = f"its {ranks} ranks for each of the {whose}'s {shape.experts} experts"
                yield f"{name}: {why} must divide an expert's {part} {width}"

    def _widths_within_experts(self, shape: "Architecture") -> dict[str, int]:
        return {"width": shape.dim, "hidden width": shape.hidden_dim // (1 if self.ep > 1 else self.tp)}


class TrainerSettings(RanksSettings):
    """The trainer's processes and its optimizer steps."""

    microbatch_rows: PositiveInt = 4
    """Packed rows in one forward and backward pass. Changes memory and speed, not the gradient."""
    minibatches: PositiveInt = 1
    """Number of minibatches into which a batch is split, balanced by tokens and without splitting a group. Each is one
    optimizer step of the policy, and of the critic. The policy version and the schedules advance by one for each batch,
    not for each minibatch."""
    logprob_chunk: PositiveInt = 1024
    """Tokens whose logits are in memory at once."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by it before log-probabilities are taken; `sampling.temperature` must be the same."""
    expert_balance: NonNegativeFloat = 0.0
    """Weight of a loss that spreads tokens evenly over experts: the mean over trained tokens and layers of
    E * sum(f * p), where E is the number of experts, p the token's router scores, and f each expert's share of the
    trained tokens of the batch before. A critic with experts has the same. With adapters routers do not change, so it
    acts on the adapters of earlier layers only."""
    expert_bias_rate: NonNegativeFloat = 0.0
    """Balances experts without a loss: after each batch, the bias by which tokens choose an expert rises by this much
    if the expert had fewer trained tokens than the mean of its layer, and falls if it had more (arXiv:2408.15664).
    Needs a model with such a bias, as DeepSeek-V3, whose authors used 0.001, or dots.llm1. A critic of such a model
    has the same."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients above this norm are scaled down to it; null disables clipping."""
    activation_checkpointing: Literal["off", "selective", "full"] = "off"
    """Activations that the backward pass recomputes: none; all but those of matrix products and attention; or all."""
    compile: bool = False
    """Compile each transformer block with torch.compile; needs a GPU."""
    lora: LoraSettings | None = None
    """Adapters that are trained in place of the model's weights; null trains the weights. `lora: {}` has the defaults.
    Adapters need a learning rate about ten times as high."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    """AdamW's settings."""
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    """The learning rate over time."""

    def _problems(self, at: Section) -> Iterator[str]:
        yield from super()._problems(at)
        if self.compile and self.ranks > 1:
            yield f"{at.compile}: works on one rank, {' * '.join(f'{at}{axis}' for axis in AXES)} is {self.ranks}"

    def shape_problems(self, at: Section, shape: "Architecture", whose: str) -> Iterator[str]:
        """Also of what else these settings do with the model."""
        yield from super().shape_problems(at, shape, whose)
        if self.compile and shape.biased:
            yield f"{at.compile}: must be false for gpt-oss: its attention with sinks has not been compiled yet"

    def _widths_within_experts(self, shape: "Architecture") -> dict[str, int]:
        widths = super()._widths_within_experts(shape)
        if self.lora is not None and "experts" in self.lora.chosen:
            widths["adapters' rank"] = self.lora.rank
        return widths

    def balance_problems(self, at: Section, shape: "Architecture") -> Iterator[str]:
        """One line for each setting that cannot balance the experts of a model of this shape."""
        if not shape.experts:
            yield from at.idle("the model has no experts", "expert_balance", "expert_bias_rate")
        elif shape.biased_routing and self.expert_balance:
            yield f"{at.expert_balance}: must be 0, the model balances its experts by a bias: set {at}expert_bias_rate"
        elif not shape.biased_routing and self.expert_bias_rate:
            yield f"{at.expert_bias_rate}: must be 0, the model chooses experts without a bias: set {at}expert_balance"

    def device_problems(self, prefix: str, *, device: str | None = None, elsewhere: bool = False) -> list[str]:
        """One line for each setting that `device` cannot do; None: this machine's, or, if ranks run `elsewhere`, what
        this torch can use."""
        return [f"{prefix}compile=true: {NEEDS_GPU}"] if self.compile and not has_gpu(device, elsewhere) else []


class ReferenceSettings(RanksSettings):
    """The model of the KL term and the teacher of `loss.distill`, which is not trained; it is started only if the loss
    or the advantages use it."""

    path: str | None = None
    """A Hugging Face folder; null is the model that training starts from."""
    refresh_every: PositiveInt | None = None
    """Steps between two copies of the policy's weights to the reference; null never copies. Each copy is also in the
    run folder."""
    average: ShareBelowOne | None = None
    """Share of the reference that stays at each of these copies, so that it is an exponential moving average of the
    policy; null copies the policy as it is."""
    offload: bool = False
    """Keep the parameters in CPU memory and copy one block at a time to the GPU in each pass. Set it if the reference
    does not fit into GPU memory beside other models. Needs a GPU."""
    fsdp: PositiveInt = 1
    """Ranks, each of which computes its own rows."""

    def engine_settings(self, trainer: TrainerSettings) -> TrainerSettings:
        """The trainer's settings with this section's keys, and without those that only training needs. Without a
        refresh the reference is the model without adapters."""
        own = {key: getattr(self, key) for key in (*AXES, "ep", "threads")}
        lora = None if self.refresh_every is None else trainer.lora
        return replace(trainer, compile=False, activation_checkpointing="off", lora=lora, **own)

    def _problems(self, at: Section) -> Iterator[str]:
        yield from super()._problems(at)
        yield from folder_problems(self.path, at)
        if self.refresh_every is None:
            yield from at.idle(f"{at}refresh_every is null", "average")
        if self.refresh_every is not None and self.path is not None:
            yield f"{at.path}: must be null where {at}refresh_every is set: the reference is then an earlier policy"

    def device_problems(self, prefix: str, *, device: str | None = None, elsewhere: bool = False) -> list[str]:
        """One line for each setting that `device` cannot do; None: this machine's, or, if ranks run `elsewhere`, what
        this torch can use."""
        return [f"{prefix}offload=true: {OFFLOAD_NEEDS_GPU}"] if self.offload and not has_gpu(device, elsewhere) else []


class CriticSettings(RanksSettings):
    """The model that predicts the value of each token, for advantages that use values (`gae`).

    Minibatches, microbatches and activation checkpointing are the trainer's.
    """

    path: str | None = None
    """A Hugging Face folder; null is the model that training starts from. The value head starts at 0."""
    epochs: PositiveInt = 1
    """Passes over each batch, each of `trainer.minibatches` optimizer steps."""
    value_clip: PositiveFloat | None = None
    """Value clip range: a value that moves further than this from its value before the batch gains nothing; null
    disables clipping."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients above this norm are scaled down to it; null disables clipping."""
    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(lr=1e-5))
    """AdamW's settings."""
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    """The learning rate over time."""

    def engine_settings(self, trainer: TrainerSettings) -> TrainerSettings:
        """The trainer's settings with this section's keys. A critic has no adapters."""
        keys = (*AXES, "ep", "threads", "max_grad_norm", "optimizer", "schedule")
        return replace(trainer, compile=False, lora=None, **{key: getattr(self, key) for key in keys})

    def shape_problems(self, at: Section, shape: "Architecture", whose: str) -> Iterator[str]:
        """Those of a model whose embedding is its own: the value head replaces a tied projection."""
        yield from super().shape_problems(at, replace(shape, tied=False), whose)

    def _problems(self, at: Section) -> Iterator[str]:
        yield from super()._problems(at)
        yield from folder_problems(self.path, at)


def has_gpu(device: str | None, elsewhere: bool = False) -> bool:
    """Whether ranks on `device` have a GPU; None: this machine's, or, if they run `elsewhere`, what this torch can
    use."""
    if device is not None:
        return device == "cuda"
    import torch  # `--help` does not need it

    return torch.backends.cuda.is_built() if elsewhere else torch.cuda.is_available()
