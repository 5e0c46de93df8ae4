"""AdamW, gradient clipping and the learning-rate schedule, on torchtitan's containers."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.distributed.utils import clip_grad_norm_

from goaly.train.settings import TrainerSettings

ENDLESS = 2**60
"""Total steps of a schedule that never decays."""


class ScheduledOptimizer:
    """AdamW over all parameters of a model that are not frozen, in its fused form, with torchtitan's warm-up, stable,
    decay schedule."""

    def __init__(self, model: torch.nn.Module, settings: TrainerSettings, pipeline: DeviceMesh | None = None):
        """`pipeline` is the mesh of the ranks that have the other stages of the model."""
        adamw, schedule = settings.optimizer, settings.schedule
        group = ParamGroupConfig(
            pattern=r".*",
            optimizer_name="AdamW",
            optimizer_kwargs={
                "lr": adamw.lr,
                "betas": (adamw.beta1, adamw.beta2),
                "eps": adamw.eps,
                "weight_decay": adamw.weight_decay,
            },
        )
        optimizers = OptimizersContainer.Config(param_groups=[group], implementation="fused").build(model_parts=[model])
        constant = schedule.decay == "constant"
        total = ENDLESS if constant or schedule.total_steps is None else schedule.total_steps
        self._optimizers: Any = optimizers
        self._schedulers: Any = LRSchedulersContainer.Config(
            warmup_steps=schedule.warmup_steps,
            total_steps=total,
            decay_ratio=0.0 if constant else None,
            decay_type="cosine" if schedule.decay == "cosine" else "linear",
            min_lr_factor=schedule.min_lr_factor,
        ).build(optimizers=optimizers, training_steps=total)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._max_grad_norm = settings.max_grad_norm
        self._divides_experts = settings.ep > 1
        self._pipeline = pipeline
        self._total_steps = total

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self._schedulers.schedulers[0].get_last_lr()[0])

    def clip(self) -> float:
        """Clip the gradients to the norm limit, and return the global norm before clipping."""
        limit = float("inf") if self._max_grad_norm is None else self._max_grad_norm
        how = {"foreach": True, "ep_enabled": self._divides_experts, "pp_mesh": self._pipeline}
        return float(clip_grad_norm_(self._parameters, limit, **how))

    def step(self, *, advance: bool = True) -> None:
        """Take an optimizer step and zero the gradients; with `advance`, step the schedule too, until it ends."""
        self._optimizers.step()
        self._optimizers.zero_grad()
        if advance and self._schedulers.schedulers[0].last_epoch < self._total_steps:
            self._schedulers.step()

    def state_dict(self) -> dict[str, Tensor]:
        """The live step counts and moments, by kind and parameter; zeros before the first step."""
        return {
            f"{kind}.{name}": tensor
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
            for kind, tensor in _adamw_state(optimizer, parameter).items()
        }

    def seek(self, batches: int) -> None:
        """Set the learning rate to that of the schedule after this number of batches."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="To get the last learning rate")  # from torchtitan
            self._schedulers.load_state_dict({"last_epoch": min(batches, self._total_steps)})
        for scheduler in self._schedulers:
            for group, lr in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = lr  # torchtitan leaves it as it was until the next step


def _adamw_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The live state of a parameter, as AdamW would make it before its first step."""
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    return state
