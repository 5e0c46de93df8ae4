"""The training engine of one rank: model, optimizer and schedule, without any actor around them.

Consumes packed rows, produces parameters. All ranks call the same methods in the same order; rows differ between
data-parallel ranks, and are the same on tensor-parallel ranks.

Invariants
    TE-1  The gradient is that of (sum of the objective over the global batch) / (its denominator over the global
          batch), whatever the packing, the microbatches and the ranks.
    TE-2  A loss or gradient that isn't finite raises and changes no parameter.
    TE-3  The same inputs give bit-identical parameters.
    TE-4  `policy_version` is the number of optimizer steps done.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from goaly.losses.objective import Contribution, Objective, finish
from goaly.models.settings import ModelSettings
from goaly.train.microbatch import Microbatch, microbatch, split_rows
from goaly.train.parallel import build_parallel
from goaly.train.settings import TrainerSettings
from goaly.trajectory import PackedRows


class TrainEngine:
    """Model, optimizer and schedule of one rank; `trains=False` leaves a frozen model that only gives log-probs."""

    def __init__(self, model: ModelSettings, settings: TrainerSettings, *, trains: bool = True):
        self._source = model.path
        self._settings = settings
        self._parallel = build_parallel(model, settings)
        self._model = self._parallel.model
        self.policy_version = 0
        self._optimizer = None
        if trains:
            from goaly.train.optimizer import build_optimizer

            self._optimizer = build_optimizer(self._model, settings)
        else:
            self._model.requires_grad_(False)

    @property
    def dp_rank(self) -> int:
        """Which share of a batch's rows this rank trains."""
        return self._parallel.dp_rank

    @property
    def leads(self) -> bool:
        """Whether this is the one, of the ranks that share its rows, that reports for them."""
        return self._parallel.leads

    def train_step(self, packed: PackedRows, objective: Objective) -> dict[str, float]:
        """One optimizer step on this rank's share of a batch; returns the global batch's metrics."""
        metrics = self.forward_backward(
            split_rows(packed.rows, self._settings.microbatch_rows), objective, objective.denominator(packed)
        )
        return metrics | self.optimizer_step()

    def forward_backward(
        self, microbatches: Iterable[TensorDict], objective: Objective, denominator: int
    ) -> dict[str, float]:
        """Add to the gradients; `denominator` is the objective's for the global batch (TE-1).

        Begins without gradients: where the objective counts only what it keeps, all of them are scaled at the end, once
        the counts of all microbatches and ranks are known.
        """
        if denominator < 1:
            raise ValueError(f"denominator={denominator}: the batch must hold at least one trained token")
        sums: list[dict[str, torch.Tensor]] = []
        maxima: list[dict[str, torch.Tensor]] = []
        for rows in microbatches:
            batch = self._microbatch(rows)
            logprobs_P, entropies_P = self._logprobs(batch)
            part = objective(logprobs_P, entropies_P, batch.columns, self.policy_version)
            loss = part.total / denominator
            loss.backward()
            sums.append(_sums(part, loss, len(logprobs_P)))
            maxima.append({name: _greatest(values_P) for name, values_P in part.maximum.items()})
        summed = self._across_ranks(sums, dist.ReduceOp.SUM)
        metrics = _means(summed) | self._across_ranks(maxima, dist.ReduceOp.MAX)
        self._check_finite(metrics)
        if COUNT in summed:
            metrics["loss"] *= self._divide_by(summed[COUNT], instead_of=denominator)
        return finish(metrics)

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, advance the schedule, and drop the gradients."""
        assert self._optimizer is not None, "a frozen engine can't step"
        metrics = {"lr": self._optimizer.lr, "grad_norm": self._optimizer.clip()}
        self._check_finite(metrics)
        self._optimizer.step()
        self.policy_version += 1
        return metrics

    @torch.no_grad()
    def logprobs(self, rows: TensorDict) -> torch.Tensor:
        """Log-probs `[R, L]` f32 of the trained tokens; 0 at all others."""
        parts = []
        for part in split_rows(rows, self._settings.microbatch_rows):
            batch = self._microbatch(part)
            logprobs_P, _ = self._logprobs(batch)
            out = torch.zeros(part.batch_size.numel())
            out[batch.cells_P.cpu()] = logprobs_P.float().cpu()
            parts.append(out.view(part.batch_size))
        return torch.cat(parts)

    def named_tensors(self) -> Mapping[str, torch.Tensor]:
        """The live parameters by torchtitan name: read them between steps only."""
        from torchtitan.components.checkpointer.utils import canonical_fqn

        return {canonical_fqn(name): parameter.detach() for name, parameter in self._model.named_parameters()}

    def save_hf(self, folder: str | Path) -> None:
        """Write a Hugging Face folder; every rank must call it."""
        from goaly.models.hf import save_hf

        save_hf(self._model, self._parallel.spec, folder, self._source)

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs; tensors may be sharded (DTensor)."""
        assert self._optimizer is not None, "a frozen engine has no state"
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "policy_version": self.policy_version,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        assert self._optimizer is not None, "a frozen engine has no state"
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.policy_version = state["policy_version"]

    def _microbatch(self, rows: TensorDict) -> Microbatch:
        return microbatch(rows, multiple_of=self._parallel.token_multiple).to(self._parallel.device)

    def _logprobs(self, batch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
        from goaly.models.attention import document_masks

        hidden_1TD = self._model(
            batch.tokens_1T,
            positions=batch.positions_1T,
            attention_masks=document_masks(self._model, batch.positions_1T),
        )
        return self._model.lm_head(
            hidden_1TD, batch.predicting_P, batch.targets_P, self._settings.logprob_chunk, self._settings.temperature
        )

    def _divide_by(self, count: float, *, instead_of: int) -> float:
        """Scale the gradients to another denominator; the factor. Nothing counted leaves gradients of 0 as they are."""
        factor = instead_of / count if count else 1.0
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        torch._foreach_mul_(gradients, factor)
        return factor

    def _across_ranks(self, parts: list[dict[str, torch.Tensor]], operation: Any) -> dict[str, float]:
        """Join the microbatches' values and those of the ranks with other rows."""
        if not parts or not parts[0]:
            return {}
        stacked = torch.stack([torch.stack([value.double() for value in part.values()]) for part in parts])
        joined = stacked.sum(0) if operation == dist.ReduceOp.SUM else stacked.amax(0)
        if self._parallel.dp_group is not None:
            dist.all_reduce(joined, operation, self._parallel.dp_group)
        return dict(zip(parts[0], joined.tolist(), strict=True))

    def _check_finite(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if not math.isfinite(value):
                self._model.zero_grad()
                raise FloatingPointError(f"train {name} is {value} at policy version {self.policy_version}")  # TE-2


TOKENS, COUNT = "tokens", "count"
"""Sums beside the loss and the metrics: trained tokens, and what the objective counts of them."""


def _sums(part: Contribution, loss: torch.Tensor, tokens: int) -> dict[str, torch.Tensor]:
    """What this microbatch adds to the global batch's loss, counts and means."""
    sums = {TOKENS: loss.new_tensor(tokens), "loss": loss.detach()}
    sums |= {name: values_P.detach().sum() for name, values_P in part.mean.items()}
    return sums if part.count is None else sums | {COUNT: part.count}


def _means(sums: Mapping[str, float]) -> dict[str, float]:
    """The loss, and the means over the global batch's trained tokens."""
    tokens = max(sums[TOKENS], 1)
    return {
        name: value if name == "loss" else value / tokens for name, value in sums.items() if name not in (TOKENS, COUNT)
    }


def _greatest(values_P: torch.Tensor) -> torch.Tensor:
    """The greatest value; where there is none, one that every value exceeds."""
    return values_P.detach().amax() if len(values_P) else values_P.new_tensor(-math.inf)
