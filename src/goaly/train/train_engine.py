"""The policy's engine on one rank, or that of a frozen reference: log-probs, training steps, and what compares them
with the sampler's. Its base and their invariants are in `model_engine.py`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from goaly.base.errors import GoalyError
from goaly.losses.kl import k3
from goaly.losses.objective import PROXIMAL, Objective
from goaly.models.definition import versioned_tensors
from goaly.models.settings import ModelSettings
from goaly.train.earlier_policies import EarlierPolicies
from goaly.train.microbatch import Microbatch
from goaly.train.model_engine import ModelEngine
from goaly.train.parallel_model import Head
from goaly.train.settings import TrainerSettings
from goaly.trajectory import EXPERT_CHOICES, PackedRows, TensorDict


class TrainEngine(ModelEngine):
    """The policy, or with `trains=False` a frozen reference: gives the log-probs of the trained tokens."""

    _not_finite = "train {} is {} at policy version {}"
    _replays = True

    def __init__(
        self,
        model: ModelSettings,
        settings: TrainerSettings,
        *,
        trains: bool = True,
        offload: bool = False,
        earlier_policies: int = 0,
    ):
        """With bitwise numerics it keeps so many `earlier_policies` to compare their samples, too."""
        super().__init__(model, settings, trains=trains, offload=offload)
        self._parity = None
        self._compares = False
        """Whether the next pass over trained tokens is compared with the sampler's log-probs."""
        self._compared = 0
        """Tokens of the batch that have been compared, on all ranks."""
        if model.numerics == "bitwise":
            from goaly.train.parity_check import ParityCheck

            self._parity = ParityCheck(settings.ranks, settings.tp, reports=self.leads)
        live = versioned_tensors(self._model) | {"steps_done": self._steps_done}
        self._earlier = EarlierPolicies(live, earlier_policies, getattr(torch, model.dtype))

    @property
    def policy_version(self) -> int:
        """The version of the current parameters."""
        return self.steps_done

    def train_step(self, packed: PackedRows, objective: Objective) -> dict[str, float]:
        """Take an optimizer step for each minibatch of a batch; the metrics of the global batch."""
        minibatches = packed.split()
        check = self._parity if objective.was_sampled else None
        self._compared = 0
        if check is not None:
            version = self.policy_version
            for earlier in self._earlier.versions:
                if earlier != version:  # a step that failed has kept it
                    self._compare_sampled_by(earlier, packed.rows)
            self._earlier.keep(version)
        for minibatch in minibatches[1:]:
            if objective.needs_proximal:
                self._compares = check is not None
                minibatch.rows[PROXIMAL] = self.logprobs(minibatch.rows)  # no step of this batch is done yet
            elif check is not None:
                self._compare_sampled_by(self.policy_version, minibatch.rows)
        self._compares = check is not None
        metrics = self._train(minibatches, objective, objective.denominator)
        return metrics if check is None else metrics | check.metrics(self._compared, packed.batch_trained_tokens)

    @torch.no_grad()
    def _compare_sampled_by(self, version: int, rows: TensorDict) -> None:
        """Compare the trained tokens of these rows that this version sampled, with its parameters (train-9)."""
        trained_RL = rows["trained"] & (rows["sampler_versions"] == version)
        microbatches = rows.replace({"trained": trained_RL}).split(self.settings.microbatch_rows)
        wanted = torch.tensor([bool(one["trained"].any()) for one in microbatches], dtype=torch.uint8)
        if self.settings.ranks > 1:
            dist.all_reduce(wanted, dist.ReduceOp.MAX)
        if wanted.any():
            with self._at(version):
                self._compares = True
                compared = [one for one, is_wanted in zip(microbatches, wanted, strict=True) if is_wanted]
                self._pass_through(compared, lambda *_: None)

    def _at(self, version: int) -> AbstractContextManager[None]:
        """Let the engine have the parameters of this version, which is its own or a kept one."""
        return nullcontext() if version == self.policy_version else self._earlier.loaded(version)

    def logprobs(self, rows: TensorDict) -> torch.Tensor:
        """Log-probs `[R, L]` f32 of the trained tokens; 0 at all others."""
        return self._column(rows)

    def effect_of_replay(self, rows: TensorDict) -> dict[str, float]:
        """The policy's divergence from the sampler at the first microbatch's tokens, with the sampler's choices of
        experts and with its own; every rank must call it."""
        rows = rows[: self.settings.microbatch_rows]
        trained_RL = rows["trained"]
        sums = {"tokens": trained_RL.sum()}
        for routing, given in (("own", rows.exclude(EXPERT_CHOICES)), ("replay", rows)):
            divergence_P = k3(rows["sampler_logprobs"][trained_RL], self.logprobs(given)[trained_RL])
            sums[f"experts/kl_{routing}"] = divergence_P.double().sum()
        on_device = {name: total.to(self._parallel.device) for name, total in sums.items()}
        summed = self._across_ranks([on_device], dist.ReduceOp.SUM)
        tokens = summed.pop("tokens")
        return {name: total / max(tokens, 1) for name, total in summed.items()}

    def _pass_through(
        self,
        rows: Sequence[TensorDict],
        finish: Callable[[Microbatch, tuple[torch.Tensor, ...]], torch.Tensor | None],
        *,
        trains: bool = False,
    ) -> None:
        check = self._parity if self._compares else None
        if check is not None:
            check.begin()
        super()._pass_through(rows, finish, trains=trains)
        if check is not None:
            self._compares = False  # train-9: the next pass may come after a step
            try:
                self._compared += check.agree(self.policy_version)
            except GoalyError:
                self._model.zero_grad()
                raise

    def _outputs(self, batch: Microbatch, hidden_1TD: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        outputs = super()._outputs(batch, hidden_1TD)
        if self._compares and self._parity is not None and self._pipeline.stage.is_last:
            self._parity.compare(batch, outputs[0], self.policy_version)
        return outputs

    def _head(self) -> Head:
        from goaly.train.logprob_head import LOGPROBS

        return LOGPROBS

    def _apply_head(self, hidden_1TD: torch.Tensor, batch: Microbatch) -> tuple[torch.Tensor, ...]:
        settings = self.settings
        return self._model.lm_head(
            hidden_1TD, batch.predicting_P, batch.targets_P, settings.logprob_chunk, settings.temperature
        )
