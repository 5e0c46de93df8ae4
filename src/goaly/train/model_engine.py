"""The engine of one rank: model, optimizer and schedule, without an actor.

It is the critic's, and the base of the policy's (`train_engine.py`). They differ in the head that replaces the output
projection, and in the objective.

Consumes packed rows, produces parameters. All ranks call the same methods in the same order; data-parallel ranks have
different rows, all others the same. Of a pipeline's ranks only those of the last stage have outputs of the model; they
give all ranks the results.

On CPUs the same inputs give bit-identical parameters. The policy version and the schedules count batches, however many
optimizer steps a batch makes. A forward pass uses the current parameters, also when something other than the optimizer
has written them. The proximal policy of all minibatches of a batch is the policy before the first one's step.

Invariants
    train-1: The gradient is that of (sum of the objective over the global batch) / (its denominator over the global
        batch), on any packing, microbatches and ranks.
    train-2: A loss or gradient that is not finite raises, and its step changes no parameter.
    train-3: If the rows have the sampler's choices of experts, policy and reference send each token on which a trained
        one depends to these experts, in every pass.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from goaly.base.errors import GoalyError
from goaly.base.watchdog import progress
from goaly.losses.objective import Contribution, Objective
from goaly.losses.value_loss import ValueLoss
from goaly.models.definition import versioned_tensors
from goaly.models.settings import ModelSettings
from goaly.train.expert_layers import ExpertLayers
from goaly.train.microbatch import Microbatch, microbatch
from goaly.train.parallel_model import Head, build_parallel
from goaly.train.pipeline import Pass
from goaly.train.settings import TrainerSettings
from goaly.train.step_metrics import COUNT, StepMetrics, combine, greatest, step_metrics, sums
from goaly.trajectory import PackedRows, TensorDict
from goaly.weights.dtensor_layout import local

if TYPE_CHECKING:
    from goaly.train.parity_check import ParityCheck
    from goaly.weights.digest import Digest


class ModelEngine:
    """Model, optimizer and schedule of one rank; with `trains=False` a frozen model for forward passes only.

    A frozen model has parameters of its compute type, with `offload` in CPU memory.
    """

    _replays: ClassVar[bool] = False
    """Whether tokens go to the experts that the sampler chose, if the rows have its choices."""

    def __init__(
        self, model: ModelSettings, settings: TrainerSettings, head: Head, *, trains: bool = True, offload: bool = False
    ):
        self._source = model.path
        self._head = head
        self.settings = settings
        self._parity: ParityCheck | None = None
        """Compares the next pass over trained tokens with the sampler's log-probs."""
        assert not (trains and offload), "only a frozen model can be offloaded"
        self._parallel = build_parallel(model, settings, head, trains=trains, offload=offload)
        self._model = self._parallel.model
        self._pipeline = self._parallel.pipeline
        self._experts = None
        config = self._parallel.spec.model
        if any(layer.moe is not None for layer in config.layers):
            self._experts = ExpertLayers(self._model, config, self._pipeline.stage, self._parallel.device)
        self.dp_rank, self.dp_ranks, self.leads = self._parallel.dp_rank, settings.fsdp, self._parallel.leads
        self._row_multiple = settings.token_multiple
        if model.numerics == "bitwise":
            from goaly.numerics.bitwise_operations import row_multiple

            self._row_multiple = math.lcm(self._row_multiple, row_multiple())
        self._steps_done = torch.zeros((), dtype=torch.int64)
        self._digest: Digest | None = None
        self._optimizer = None
        if trains:
            from goaly.train.optimizer import ScheduledOptimizer

            self._optimizer = ScheduledOptimizer(self._model, settings, self._pipeline.mesh)
        else:
            self._model.requires_grad_(False)

    @property
    def decoder(self) -> torch.nn.Module:
        """torchtitan's model on this rank, of a pipeline its stage."""
        return self._model

    @property
    def steps_done(self) -> int:
        """The batches trained; of a frozen model, those that its parameters were trained on."""
        return int(self._steps_done)

    @steps_done.setter
    def steps_done(self, batches: int) -> None:
        self._steps_done.fill_(batches)

    def train_step(self, packed: PackedRows, objective: Objective | ValueLoss, *, epochs: int = 1) -> dict[str, float]:
        """Take an optimizer step for each minibatch of a batch, in each of the `epochs`; the metrics of the global
        batch."""
        minibatches, steps = self._minibatches(packed, objective) * epochs, []
        for number, minibatch in enumerate(minibatches, 1):
            microbatches = minibatch.rows.split(self.settings.microbatch_rows)
            if self._experts is not None:
                self._experts.balance(self.settings.expert_balance, minibatch.batch_trained_tokens)
            counts = objective.denominator(minibatch), minibatch.batch_taught_tokens
            found = self.forward_backward(microbatches, objective, *counts)
            found.means |= self.optimizer_step(last=number == len(minibatches))
            steps.append(found)
        return combine(steps).metrics | self._batch_metrics(packed)

    def _minibatches(self, packed: PackedRows, objective: Objective | ValueLoss) -> list[PackedRows]:
        """The minibatches of a batch, with all columns that the objective needs."""
        return packed.split()

    def _batch_metrics(self, packed: PackedRows) -> dict[str, float]:
        """The batch's metrics that are not those of a step, after its last step."""
        return {} if self._experts is None else self._experts.take_loads(self.settings.expert_bias_rate)

    def forward_backward(
        self,
        microbatches: Iterable[TensorDict],
        objective: Callable[..., Contribution],
        denominator: int,
        taught_tokens: int = 0,
    ) -> StepMetrics:
        """Accumulate gradients; `denominator` is the objective's for the global batch (train-1), and `taught_tokens`
        that of its part by a teacher.

        There must be no gradients before. If the objective counts only the tokens it keeps, all gradients are scaled at
        the end, once the counts of all microbatches and ranks are known.
        """
        if denominator < 1:
            raise ValueError(f"denominator={denominator}: must be at least 1; the batch has no trained token")
        parts: list[dict[str, Tensor]] = []
        maxima: list[dict[str, Tensor]] = []

        def loss_of(batch: Microbatch, outputs: tuple[Tensor, ...]) -> Tensor:
            part = objective(*outputs[:2], batch.columns, self.steps_done, *outputs[2:])
            loss = part.total / denominator
            if part.taught is not None and taught_tokens:
                loss = loss + part.taught / taught_tokens
            parts.append(sums(part, loss, len(batch.cells_P)))
            maxima.append(greatest(part))
            return loss

        self._pass_through(list(microbatches), loss_of, trains=True)
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

    def named_tensors(self) -> Mapping[str, Tensor]:
        """The live parameters by torchtitan name, of a model with adapters these alone (models-3). Read them between
        steps only."""
        return {name: tensor.detach() for name, tensor in versioned_tensors(self._model).items()}

    def check_base(self) -> None:
        """Raise if the model got adapters that do not belong to the weights of its folder (models-5)."""
        if self.settings.lora is not None:
            from goaly.models.lora import check_base

            check_base(self._model)

    def save_hf(self, folder: str | Path) -> None:
        """Write a Hugging Face folder, or that of the adapters (`trainer.lora.save`); every rank must call it."""
        from goaly.models.hf import save_hf

        lora = self.settings.lora
        if lora is not None and lora.save == "adapter":
            from goaly.models.adapter_folder import save_adapters

            return save_adapters(self._model, self._parallel.spec, folder, self._source, lora, self._pipeline.gathered)
        scale = 0.0 if lora is None else lora.scale
        save_hf(self._model, self._parallel.spec, folder, self._source, scale=scale, gather=self._pipeline.gathered)

    def digest(self) -> str:
        """A digest of the current parameters, the same on every rank and any mesh; every rank must call it."""
        if self._digest is None:
            from goaly.weights.digest import Digest

            self._digest = Digest(self.named_tensors())
        return self._digest.compute()

    def state_dict(self) -> dict[str, Tensor]:
        """The state that resuming needs: live tensors by name, which may be sharded. Read them between steps only."""
        state = {f"model.{name}": tensor for name, tensor in self.named_tensors().items()}
        if self._optimizer is not None:
            state |= self._optimizer.state_dict()
        if self._experts is not None:
            state["expert_loads"] = self._experts.loads_LE
        return state | {"steps_done": self._steps_done}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`. Learning rate, schedule and AdamW's other settings are this engine's own."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
        self.check_base()
        if self._optimizer is not None:
            self._optimizer.seek(self.steps_done)

    def _pass_through(
        self,
        rows: Sequence[TensorDict],
        finish: Callable[[Microbatch, tuple[Tensor, ...]], Tensor | None],
        *,
        trains: bool = False,
    ) -> None:
        """Take a microbatch for each of these `rows` through all stages. The last one calls `finish` with the outputs
        for all its trained tokens, which gives the loss if the model `trains`."""
        check, self._parity = self._parity, None  # train-9: the next pass may come after a step
        for each in self._pipeline.passes(rows, self._microbatch, trains=trains):
            if each.is_backward:
                self._begin(self._part(each.batch)[0])
                each.output.backward(each.gradient)
            else:
                each.output = self._output(each, finish, check)
            del each  # frees its tensors before the next pass
        if not trains and isinstance(self._model, FSDPModule):
            self._model.reset_iter_state()  # or the next pass would reuse the gathered parameters
        if check is not None:
            try:
                check.agree(self.steps_done)
            except GoalyError:
                self._model.zero_grad()
                raise

    def _output(
        self,
        each: Pass,
        finish: Callable[[Microbatch, tuple[Tensor, ...]], Tensor | None],
        check: "ParityCheck | None",
    ) -> Tensor | None:
        """This stage's output of a forward pass."""
        outputs = self._outputs(each.batch, each.arrived)
        if not self._pipeline.stage.is_last:
            return outputs[0]
        if check is not None:
            check.compare(each.batch, outputs[0], self.steps_done)
        return finish(each.batch, outputs)

    def _outputs(self, batch: Microbatch, hidden_1TD: Tensor | None = None) -> tuple[Tensor, ...]:
        """The head's outputs for all trained tokens, given the hidden states of the previous stage if there is one;
        before the last stage, the hidden states of this one."""
        from goaly.models.attention import document_masks

        context = self._parallel.context
        part, own = self._part(batch)
        masks = (
            document_masks(self._model, batch.positions_1T)
            if context is None
            else context.documents(batch.positions_1T)
        )
        self._begin(part)
        given = part.tokens_1T if hidden_1TD is None else hidden_1TD
        hidden_1TD = self._model(given, positions=part.positions_1T, attention_masks=masks)
        assert hidden_1TD is not None
        if not self._pipeline.stage.is_last:
            return (hidden_1TD,)
        logprobs = self.settings.logprob_chunk, self.settings.temperature
        outputs = self._model.lm_head(hidden_1TD, part.predicting_P, part.targets_P, *logprobs, **self._more(part))
        if context is None or own is None:
            return outputs
        return context.joined(outputs, own, len(batch.cells_P))  # models-8

    def _more(self, part: Microbatch) -> dict[str, Any]:
        """Further arguments of the head for these tokens."""
        return {}

    def _part(self, batch: Microbatch) -> tuple[Microbatch, Tensor | None]:
        """The tokens that this rank computes, and the places of their trained tokens if they are not all."""
        context = self._parallel.context
        if context is None:
            return batch, None
        return batch.part(context.share(batch.tokens_1T.shape[1]).to(self._parallel.device))

    def _begin(self, part: Microbatch) -> None:
        """Tell the layers about the tokens of the next forward or backward pass (train-3)."""
        if self._experts is not None:
            self._experts.begin(part, replays=self._replays)

    @torch.no_grad()
    def column(self, rows: TensorDict) -> Tensor:
        """The head's first output at the trained tokens as a column `[R, L]` f32; 0 at all others."""
        microbatches = rows.split(self.settings.microbatch_rows)
        column_RL = torch.zeros(rows.batch_size)
        parts = iter(column_RL.split(self.settings.microbatch_rows))

        def keep(batch: Microbatch, outputs: tuple[Tensor, ...]) -> None:
            next(parts).view(-1)[batch.cells_P.cpu()] = outputs[0].float().cpu()

        self._pass_through(microbatches, keep)
        return self._pipeline.from_last(column_RL)

    def _microbatch(self, rows: TensorDict) -> Microbatch:
        progress()
        return microbatch(rows, multiple_of=self._row_multiple).to(self._parallel.device)

    def _divide_by(self, count: float, *, instead_of: int) -> float:
        """Scale the gradients to the denominator `count`, and return the factor; 1 if nothing was counted."""
        factor = instead_of / count if count else 1.0
        gradients = [local(parameter.grad) for parameter in self._model.parameters() if parameter.grad is not None]
        torch._foreach_mul_(gradients, factor)
        return factor

    def _across_ranks(self, parts: list[dict[str, Tensor]], operation: Any) -> dict[str, float]:
        """Reduce the last stage's values over the microbatches, and over the ranks with different rows."""
        found: dict[str, float] = {}
        if parts and parts[0]:
            stacked = torch.stack([torch.stack([value.double() for value in part.values()]) for part in parts])
            joined = stacked.sum(0) if operation == dist.ReduceOp.SUM else stacked.amax(0)
            if self._parallel.dp_group is not None:
                dist.all_reduce(joined, operation, self._parallel.dp_group)
            found = dict(zip(parts[0], joined.tolist(), strict=True))
        return self._pipeline.from_last(found)

    def _check_finite(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if not math.isfinite(value):
                self._model.zero_grad()
                at = f"policy version {self.steps_done}"
                raise FloatingPointError(f"{self._head.of} {name} is {value} at {at}")  # train-2
