"""The engine of one rank: model, optimizer and schedule, without an actor.

`ModelEngine` is the base of `TrainEngine`, the policy's engine, and of `CriticEngine`. They differ in the head that
replaces the output projection, and in the objective.

Consumes packed rows, produces parameters. All ranks call the same methods in the same order; data-parallel ranks have
different rows, tensor-parallel and context-parallel ranks the same.

Invariants
    TE-1  The gradient is that of (sum of the objective over the global batch) / (its denominator over the global
          batch), on any packing, microbatches and ranks.
    TE-2  A loss or gradient that is not finite raises, and its step changes no parameter.
    TE-3  The same inputs give bit-identical parameters.
    TE-4  The policy version and the schedules count batches, however many optimizer steps a batch makes.
    TE-5  A forward pass uses the current parameters, also when something other than the optimizer has written them.
    TE-6  The proximal policy of all minibatches of a batch is the policy before the first one's step.
    TE-7  If the rows have the sampler's choices of experts, policy and reference send each token on which a trained one
          depends to these experts, in every pass.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from goaly.errors import ParityError
from goaly.losses.objective import PROXIMAL, Contribution, Objective
from goaly.models.settings import ModelSettings
from goaly.models.spec import versioned_tensors
from goaly.train.microbatch import Microbatch, microbatch
from goaly.train.parallel import Head, build_parallel
from goaly.train.settings import TrainerSettings
from goaly.train.step_metrics import COUNT, StepMetrics, combine, greatest, step_metrics, sums
from goaly.trajectory import PackedRows, TensorDict
from goaly.watchdog import progress
from goaly.weights.placement import local

if TYPE_CHECKING:
    from goaly.models.operations import Outputs
    from goaly.weights.digest import Digest


class ModelEngine(ABC):
    """Model, optimizer and schedule of one rank; with `trains=False` a frozen model for forward passes only.

    A frozen model has parameters of its compute type, with `offload` in CPU memory.
    """

    _not_finite: ClassVar[str]
    """The error of a metric that is not finite, with places for its name, its value and `steps_done`."""
    _replays: ClassVar[bool] = False
    """Whether tokens go to the experts that the sampler chose, if the rows have its choices."""

    def __init__(self, model: ModelSettings, settings: TrainerSettings, *, trains: bool = True, offload: bool = False):
        self._source = model.path
        self._settings = settings
        assert not (trains and offload), "only a frozen model can be offloaded"
        self._parallel = build_parallel(model, settings, self._head(), trains=trains, offload=offload)
        self._model = self._parallel.model
        self._expert_layers = [layer for layer in self._model.modules() if hasattr(layer, "tokens_per_expert_E")]
        counts = [torch.zeros_like(local(layer.tokens_per_expert_E)) for layer in self._expert_layers]
        for layer, count_E in zip(self._expert_layers, counts, strict=True):
            layer.rerouted = count_E.new_zeros(())
        self._loads_LE = torch.stack(counts) if counts else None
        """Each expert's share of its layer's tokens in the last step; zeros before the first."""
        self.dp_rank, self.dp_ranks, self.leads = self._parallel.dp_rank, settings.fsdp, self._parallel.leads
        self._row_multiple = settings.token_multiple
        if model.numerics == "bitwise":
            from goaly.models.bitwise import row_multiple

            self._row_multiple = math.lcm(self._row_multiple, row_multiple())
        self._steps_done = torch.zeros((), dtype=torch.int64)
        self._digest: Digest | None = None
        self._optimizer = None
        if trains:
            from goaly.train.optimizer import ScheduledOptimizer

            self._optimizer = ScheduledOptimizer(self._model, settings)
        else:
            self._model.requires_grad_(False)

    @property
    def steps_done(self) -> int:
        """The batches trained; of a frozen model, those that its parameters were trained on."""
        return int(self._steps_done)

    @steps_done.setter
    def steps_done(self, batches: int) -> None:
        self._steps_done.fill_(batches)

    def forward_backward(
        self, microbatches: Iterable[TensorDict], objective: Callable[..., Contribution], denominator: int
    ) -> StepMetrics:
        """Accumulate gradients; `denominator` is the objective's for the global batch (TE-1).

        There must be no gradients before. If the objective counts only the tokens it keeps, all gradients are scaled at
        the end, once the counts of all microbatches and ranks are known.
        """
        if denominator < 1:
            raise ValueError(f"denominator={denominator}: must be at least 1; the batch has no trained token")
        parts: list[dict[str, torch.Tensor]] = []
        maxima: list[dict[str, torch.Tensor]] = []
        for rows in microbatches:
            batch = self._microbatch(rows)
            part = objective(*self._outputs(batch), batch.columns, self.steps_done)
            loss = part.total / denominator
            loss.backward()
            parts.append(sums(part, loss, len(batch.cells_P)))
            maxima.append(greatest(part))
        summed = self._across_ranks(parts, dist.ReduceOp.SUM)
        found = step_metrics(summed, self._across_ranks(maxima, dist.ReduceOp.MAX))
        self._check_finite(found.means | found.maxima)
        if COUNT in summed:
            found.means["loss"] *= self._divide_by(summed[COUNT], instead_of=denominator)
        return found

    def optimizer_step(self, *, last: bool = True) -> dict[str, float]:
        """Clip the gradients, take a step, zero the gradients; the `last` step of a batch advances the schedule."""
        assert self._optimizer is not None, "a frozen engine can't step"
        metrics = {"lr": self._optimizer.lr, "grad_norm": self._optimizer.clip()}
        self._check_finite(metrics)
        self._optimizer.step(advance=last)
        self.steps_done += last
        return metrics

    def _train(
        self,
        minibatches: Sequence[PackedRows],
        objective: Callable[..., Contribution],
        counted: Callable[[PackedRows], int],
    ) -> dict[str, float]:
        """Take an optimizer step for each minibatch, divided by what is `counted` in it; the batch's metrics."""
        steps = []
        for number, minibatch in enumerate(minibatches, 1):
            microbatches = minibatch.rows.split(self._settings.microbatch_rows)
            self._balance_experts(minibatch.batch_trained_tokens)
            found = self.forward_backward(microbatches, objective, counted(minibatch))
            found.means |= self.optimizer_step(last=number == len(minibatches))
            steps.append(found)
        return combine(steps).metrics | self._expert_loads()

    def _expert_loads(self) -> dict[str, float]:
        """How evenly the trained tokens since the last call were spread over each layer's experts, on all ranks; and if
        their experts were the sampler's choices, how many of these the router would have made differently.

        Moves the biases that choose experts by `trainer.expert_bias_rate`."""
        if self._loads_LE is None:
            return {}
        found = [local(layer.tokens_per_expert_E) for layer in self._expert_layers]
        rerouted = [layer.rerouted for layer in self._expert_layers]
        counted = torch.cat([torch.stack(found).flatten(), torch.stack(rerouted)])
        torch._foreach_zero_([*found, *rerouted])
        if dist.is_initialized():
            dist.all_reduce(counted)
        tokens_LE = counted[: -len(rerouted)].view_as(self._loads_LE)
        self._loads_LE.copy_(tokens_LE / tokens_LE.sum(1, keepdim=True).clamp(min=1))
        if rate := self._settings.expert_bias_rate:
            rises_LE = torch.sign(tokens_LE.mean(1, keepdim=True) - tokens_LE) * rate
            torch._foreach_add_([local(layer.expert_bias_E) for layer in self._expert_layers], list(rises_LE))
        metrics = {
            "experts/load_max": float(self._loads_LE.max()) * self._loads_LE.shape[1],
            "experts/unused": float((tokens_LE == 0).sum()),
        }
        if self._expert_layers[0].choices_BLK is not None:
            differ = counted[-len(rerouted) :].sum() / tokens_LE.sum().clamp(min=1)
            metrics["experts/rerouted"] = float(differ)
        return metrics

    def _balance_experts(self, trained_tokens: int) -> None:
        """Add the gradient of `trainer.expert_balance` to the next passes' router scores.

        The shares are those of the batch before, so that they are known in each pass, on any packing and rank.
        """
        weight = self._settings.expert_balance
        if weight and self._loads_LE is not None:
            layers, experts = self._loads_LE.shape  # without a trained token, `forward_backward` raises
            for layer, share_E in zip(self._expert_layers, self._loads_LE, strict=True):
                layer.score_gradient_E = share_E * (weight * experts / layers / max(trained_tokens, 1))

    def named_tensors(self) -> Mapping[str, torch.Tensor]:
        """The live parameters by torchtitan name, of a model with adapters these alone (LR-1); read them between steps
        only."""
        return {name: tensor.detach() for name, tensor in versioned_tensors(self._model).items()}

    def check_base(self) -> None:
        """Raise if the model got adapters that do not belong to the weights of its folder (LR-4)."""
        if self._settings.lora is not None:
            from goaly.models.lora import check_base

            check_base(self._model)

    def save_hf(self, folder: str | Path) -> None:
        """Write a Hugging Face folder, or that of the adapters (`trainer.lora.save`); every rank must call it."""
        from goaly.models.hf import save_hf

        lora = self._settings.lora
        if lora is not None and lora.save == "adapter":
            from goaly.models.adapter_folder import save_adapters

            return save_adapters(self._model, self._parallel.spec, folder, self._source, lora)
        save_hf(self._model, self._parallel.spec, folder, self._source, scale=0.0 if lora is None else lora.scale)

    def digest(self) -> str:
        """A digest of the current parameters, the same on every rank and any mesh; every rank must call it."""
        if self._digest is None:
            from goaly.weights.digest import Digest

            self._digest = Digest(self.named_tensors())
        return self._digest.compute()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The state that resuming needs: live tensors by name, which may be sharded. Read them between steps only."""
        state = {f"model.{name}": tensor for name, tensor in self.named_tensors().items()}
        if self._optimizer is not None:
            state |= self._optimizer.state_dict()
        if self._loads_LE is not None:
            state["expert_loads"] = self._loads_LE
        return state | {"steps_done": self._steps_done}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from `state_dict`. Learning rate, schedule and AdamW's other settings are this engine's own."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
        self.check_base()
        if self._optimizer is not None:
            self._optimizer.seek(self.steps_done)

    @abstractmethod
    def _head(self) -> Head:
        """The head that replaces the output projection."""

    @abstractmethod
    def _apply_head(self, hidden_1TD: torch.Tensor, batch: Microbatch) -> tuple[torch.Tensor, ...]:
        """The head's outputs for each trained token, `[P]` each: the objective's first arguments."""

    def _outputs(self, batch: Microbatch) -> tuple[torch.Tensor, ...]:
        from goaly.models.attention import document_masks

        context = self._parallel.context
        if context is None:
            return self._outputs_of(batch, document_masks(self._model, batch.positions_1T))
        places = context.share(batch.tokens_1T.shape[1]).to(self._parallel.device)
        part, own = batch.part(places)
        outputs = self._outputs_of(part, context.documents(batch.positions_1T))
        return context.joined(outputs, own, len(batch.cells_P))  # CP-4

    def _outputs_of(self, batch: Microbatch, attention_masks: Any) -> tuple[torch.Tensor, ...]:
        """The outputs for the tokens that this rank computes."""
        if self._expert_layers:
            trained_1T1 = torch.zeros_like(batch.tokens_1T, dtype=torch.float32)[..., None]
            trained_1T1[:, batch.predicting_P] = 1.0
            for layer in self._expert_layers:
                layer.trained_BL1 = trained_1T1
            if self._replays:
                self._replay(batch)
        hidden_1TD = self._model(
            batch.tokens_1T,
            positions=batch.positions_1T,
            attention_masks=attention_masks,
        )
        return self._apply_head(hidden_1TD, batch)

    def _replay(self, batch: Microbatch) -> None:
        """Let the next pass send tokens to the experts that the sampler chose, if they are known (TE-7)."""
        for number, layer in enumerate(self._expert_layers):
            layer.choices_BLK = None if batch.choices_1TNK is None else batch.choices_1TNK[:, :, number]
            layer.replayed_BL1 = None if batch.replayed_1T is None else batch.replayed_1T[..., None]

    @torch.no_grad()
    def _column(self, rows: TensorDict) -> torch.Tensor:
        """The head's first output at the trained tokens as a column `[R, L]` f32; 0 at all others."""
        parts = []
        for part in rows.split(self._settings.microbatch_rows):
            batch = self._microbatch(part)
            out = torch.zeros(part.batch_size.numel())
            out[batch.cells_P.cpu()] = self._outputs(batch)[0].float().cpu()
            parts.append(out.view(part.batch_size))
        if isinstance(self._model, FSDPModule):
            self._model.reset_iter_state()  # TE-5: or the next pass would reuse the gathered parameters
        return torch.cat(parts)

    def _microbatch(self, rows: TensorDict) -> Microbatch:
        progress()
        return microbatch(rows, multiple_of=self._row_multiple).to(self._parallel.device)

    def _divide_by(self, count: float, *, instead_of: int) -> float:
        """Scale the gradients to the denominator `count`, and return the factor; 1 if nothing was counted."""
        factor = instead_of / count if count else 1.0
        gradients = [local(parameter.grad) for parameter in self._model.parameters() if parameter.grad is not None]
        torch._foreach_mul_(gradients, factor)
        return factor

    def _across_ranks(self, parts: list[dict[str, torch.Tensor]], operation: Any) -> dict[str, float]:
        """Reduce values over the microbatches, and over the ranks with different rows."""
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
                raise FloatingPointError(self._not_finite.format(name, value, self.steps_done))  # TE-2


class TrainEngine(ModelEngine):
    """The policy, or with `trains=False` a frozen reference: gives the log-probs of the trained tokens."""

    _not_finite = "train {} is {} at policy version {}"
    _replays = True

    def __init__(self, model: ModelSettings, settings: TrainerSettings, *, trains: bool = True, offload: bool = False):
        super().__init__(model, settings, trains=trains, offload=offload)
        self._parity = None
        self._compares = False
        if model.numerics == "bitwise":
            from goaly.train.parity_check import ParityCheck

            self._parity = ParityCheck(self._model, self._logprobs if settings.ranks == 1 else None)

    @property
    def policy_version(self) -> int:
        """The version of the current parameters (TE-4)."""
        return self.steps_done

    def train_step(self, packed: PackedRows, objective: Objective) -> dict[str, float]:
        """Take an optimizer step for each minibatch of a batch; the metrics of the global batch."""
        minibatches = packed.split()
        for minibatch in minibatches[1:] if objective.needs_proximal else ():
            minibatch.rows[PROXIMAL] = self.logprobs(minibatch.rows)  # TE-6: no step of this batch is done yet
        self._compares = objective.was_sampled  # PC-1: until the first step
        metrics = self._train(minibatches, objective, objective.denominator)
        if self._parity is None or not objective.was_sampled:
            return metrics
        return metrics | self._across_ranks([self._parity.take()], dist.ReduceOp.SUM)

    @torch.no_grad()
    def explain(self, rows: TensorDict) -> str:
        """What the check of bitwise numerics says about these rows; empty if no log-prob differs."""
        self._compares = True
        try:
            for part in rows.split(self._settings.microbatch_rows):
                self._outputs(self._microbatch(part))
        except ParityError as error:
            return str(error)
        finally:
            self._compares = False
        return ""

    @torch.no_grad()
    def operations(self, rows: TensorDict) -> "Outputs":
        """What the model's operations give the tokens of a microbatch of these rows; every rank must call it."""
        from goaly.models.operations import by_token, recorded

        with recorded(self._model) as outputs:
            self._outputs(self._microbatch(rows))
        return by_token(outputs, has_all_experts=self._settings.ep == 1)

    def optimizer_step(self, *, last: bool = True) -> dict[str, float]:
        """Clip the gradients, take a step, zero the gradients; the `last` step of a batch advances the schedule."""
        self._compares = False
        return super().optimizer_step(last=last)

    def logprobs(self, rows: TensorDict) -> torch.Tensor:
        """Log-probs `[R, L]` f32 of the trained tokens; 0 at all others."""
        return self._column(rows)

    def _outputs(self, batch: Microbatch) -> tuple[torch.Tensor, ...]:
        outputs = super()._outputs(batch)
        if self._parity is not None and self._compares:
            self._parity.compare(batch, outputs[0], self.policy_version)
        return outputs

    def _head(self) -> Head:
        from goaly.train.logprobs import LOGPROBS

        return LOGPROBS

    def _apply_head(self, hidden_1TD: torch.Tensor, batch: Microbatch) -> tuple[torch.Tensor, ...]:
        return self._logprobs(hidden_1TD, batch.predicting_P, batch.targets_P)

    def _logprobs(
        self, hidden_1TD: torch.Tensor, predicting_P: torch.Tensor, targets_P: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        settings = self._settings
        return self._model.lm_head(hidden_1TD, predicting_P, targets_P, settings.logprob_chunk, settings.temperature)
