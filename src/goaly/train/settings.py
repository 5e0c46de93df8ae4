"""How the models train: layout, optimizer, schedule; the policy, the reference and the critic."""

from dataclasses import dataclass, field, replace
from typing import Literal

from goaly.configuration.schema import KnownWords
from goaly.models.settings import ModelSettings

NEEDS_GPU = "needs a GPU: shapes of the CPU's packed attention change with the documents"
OFFLOAD_NEEDS_GPU = "needs a GPU: on a CPU the parameters are in its memory anyway"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW."""

    lr: float = 1e-6
    """Learning rate at the end of the warm-up."""
    beta1: float = 0.9
    """Decay of the gradient's running mean."""
    beta2: float = 0.95
    """Decay of the squared gradient's running mean."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay, on every parameter."""

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each."""
        lines = []
        if self.lr <= 0:
            lines.append(f"{prefix}lr={self.lr}: must be above 0")
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= beta < 1:
                lines.append(f"{prefix}{name}={beta}: must be at least 0 and below 1")
        if self.eps <= 0:
            lines.append(f"{prefix}eps={self.eps}: must be above 0")
        if self.weight_decay < 0:
            lines.append(f"{prefix}weight_decay={self.weight_decay}: must be at least 0")
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings(KnownWords):
    """The learning rate over training steps, each on one batch."""

    warmup_steps: int = 0
    """Steps over which the rate rises linearly to its full value."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """What the rate does after the warm-up."""
    total_steps: int | None = None
    """Steps after which a decay has reached its end; the rate stays there. Needed for `linear` and `cosine`."""
    min_lr_factor: float = 0.0
    """Where a decay ends, as a share of the full rate."""

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each."""
        lines = []
        if self.warmup_steps < 0:
            lines.append(f"{prefix}warmup_steps={self.warmup_steps}: must be at least 0")
        if self.decay != "constant" and self.total_steps is None:
            lines.append(f"{prefix}total_steps: is not set, {prefix}decay={self.decay} needs it")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            lines.append(
                f"{prefix}total_steps={self.total_steps}: must be above {prefix}warmup_steps={self.warmup_steps}"
            )
        if not 0 <= self.min_lr_factor <= 1:
            lines.append(f"{prefix}min_lr_factor={self.min_lr_factor}: must be between 0 and 1")
        if self.decay == "constant" and self.min_lr_factor:
            lines.append(
                f"{prefix}min_lr_factor={self.min_lr_factor}: has no effect, {prefix}decay=constant keeps the full rate"
            )
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings(KnownWords):
    """The trainer's processes and its optimizer steps."""

    fsdp: int = 1
    """Ranks over which parameters, gradients and optimizer state are sharded; each trains its own rows."""
    tp: int = 1
    """Tensor-parallel ranks that share every row."""
    threads: int = 1
    """CPU threads of each rank."""
    microbatch_rows: int = 4
    """Packed rows in one forward and backward pass. Changes memory and speed, not the gradient."""
    minibatches: int = 1
    """Parts of a batch, each an optimizer step of its own, of the policy and of a critic: balanced by tokens, every
    group whole in one of them. The policy version and the schedules go up by one with the batch, however many these
    are."""
    logprob_chunk: int = 1024
    """Tokens whose logits exist at one time."""
    temperature: float = 1.0
    """Divides the logits before log-probabilities are taken: that of sampling."""
    max_grad_norm: float | None = 1.0
    """Gradients above this norm are scaled down to it; null never scales."""
    activation_checkpointing: Literal["off", "selective", "full"] = "off"
    """Recompute activations in the backward pass: none, all but matrix products and attention, or all."""
    compile: bool = False
    """Compile each transformer block with torch.compile; needs a GPU."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    """AdamW's settings."""
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    """The learning rate over time."""

    @property
    def ranks(self) -> int:
        """Processes of the trainer."""
        return self.fsdp * self.tp

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each. `prefix` is the section's dotted path with its dot, such as `trainer.`."""
        lines = []
        for name in ("fsdp", "tp", "threads", "microbatch_rows", "minibatches", "logprob_chunk"):
            if getattr(self, name) < 1:
                lines.append(f"{prefix}{name}={getattr(self, name)}: must be at least 1")
        if self.temperature <= 0:
            lines.append(f"{prefix}temperature={self.temperature}: must be above 0")
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            lines.append(f"{prefix}max_grad_norm={self.max_grad_norm}: must be above 0, or null for no clipping")
        if self.compile and self.ranks > 1:
            lines.append(f"{prefix}compile=true: works on one rank, {prefix}fsdp * {prefix}tp is {self.ranks}")
        lines += self.optimizer.problems(f"{prefix}optimizer.")
        lines += self.schedule.problems(f"{prefix}schedule.")
        return lines

    def device_problems(self, prefix: str, *, elsewhere: bool = False) -> list[str]:
        """One line for each setting that this machine's devices can't do (where ranks run `elsewhere`: this torch)."""
        return [f"{prefix}compile=true: {NEEDS_GPU}"] if self.compile and not _has_gpu(elsewhere) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSettings:
    """The model that the KL term measures the distance from; spawned only if the loss or the advantages use it."""

    path: str | None = None
    """A Hugging Face folder; null is the model that training starts from."""
    refresh_every: int | None = None
    """Steps after which the reference takes the policy's weights, again and again; null never changes it."""
    offload: bool = False
    """Keep the parameters in the CPU's memory and bring them to the GPU a block at a time, for each pass: for a model
    that does not fit beside others. Needs a GPU."""
    fsdp: int = 1
    """Ranks, each computing its own rows."""
    tp: int = 1
    """Tensor-parallel ranks that share every row."""
    threads: int = 1
    """CPU threads of each rank."""

    @property
    def ranks(self) -> int:
        """Processes of the reference model."""
        return self.fsdp * self.tp

    def engine_settings(self, trainer: TrainerSettings) -> TrainerSettings:
        """How its engine computes: as the trainer's, but for what is set here and what only training needs."""
        own = {key: getattr(self, key) for key in ("fsdp", "tp", "threads")}
        return replace(trainer, compile=False, activation_checkpointing="off", **own)

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each."""
        found = [
            f"{prefix}{name}={getattr(self, name)}: must be at least 1"
            for name in ("fsdp", "tp", "threads")
            if getattr(self, name) < 1
        ]
        if self.refresh_every is not None and self.refresh_every < 1:
            found.append(f"{prefix}refresh_every={self.refresh_every}: must be at least 1, or null")
        found += _path_problems(prefix, self.path)
        if self.refresh_every is not None and self.path is not None:
            found.append(
                f"{prefix}path={self.path}: must be null where {prefix}refresh_every is set: the reference is "
                "then the policy as it was"
            )
        return found

    def device_problems(self, prefix: str, *, elsewhere: bool = False) -> list[str]:
        """One line for each setting that this machine's devices can't do (where ranks run `elsewhere`: this torch)."""
        return [f"{prefix}offload=true: {OFFLOAD_NEEDS_GPU}"] if self.offload and not _has_gpu(elsewhere) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings:
    """The model that learns what to expect from each token on, for advantages over its values (`gae`).

    Minibatches, microbatches and activation checkpointing are the trainer's.
    """

    path: str | None = None
    """A Hugging Face folder for all but its head, which begins at 0; null is the model that training starts from."""
    fsdp: int = 1
    """Ranks over which parameters, gradients and optimizer state are sharded; each trains its own rows."""
    tp: int = 1
    """Tensor-parallel ranks that share every row."""
    threads: int = 1
    """CPU threads of each rank."""
    epochs: int = 1
    """Passes over each batch, each of `trainer.minibatches` optimizer steps."""
    value_clip: float | None = None
    """Leaves values no gain from going further than this from what they were before the batch; null never clips."""
    max_grad_norm: float | None = 1.0
    """Gradients above this norm are scaled down to it; null never scales."""
    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(lr=1e-5))
    """AdamW's settings."""
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    """The learning rate over time."""

    @property
    def ranks(self) -> int:
        """Processes of the critic."""
        return self.fsdp * self.tp

    def engine_settings(self, trainer: TrainerSettings) -> TrainerSettings:
        """How its engine computes: as the trainer's, but for what is set here."""
        own = {key: getattr(self, key) for key in ("fsdp", "tp", "threads", "max_grad_norm", "optimizer", "schedule")}
        return replace(trainer, compile=False, **own)

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each. `prefix` is the section's dotted path with its dot, such as `critic.`."""
        lines = [
            f"{prefix}{name}={getattr(self, name)}: must be at least 1"
            for name in ("fsdp", "tp", "threads", "epochs")
            if getattr(self, name) < 1
        ]
        lines += _path_problems(prefix, self.path)
        for name in ("value_clip", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                lines.append(f"{prefix}{name}={value}: must be above 0, or null")
        lines += self.optimizer.problems(f"{prefix}optimizer.")
        lines += self.schedule.problems(f"{prefix}schedule.")
        return lines


def _has_gpu(elsewhere: bool) -> bool:
    import torch  # which `--help` can do without

    return torch.backends.cuda.is_built() if elsewhere else torch.cuda.is_available()


def _path_problems(prefix: str, path: str | None) -> list[str]:
    return [] if path is None else ModelSettings(path=path).problems(prefix)
