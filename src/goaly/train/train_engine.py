"""The policy's engine on one rank, or that of a frozen reference: log-probs, training steps, and what compares them
with the sampler's. Its base and their invariants are in `model_engine.py`."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from goaly.losses.kl import k3
from goaly.losses.objective import PROXIMAL, Objective
from goaly.losses.value_loss import ValueLoss
from goaly.models.definition import versioned_tensors
from goaly.models.settings import ModelSettings
from goaly.train.earlier_policies import EarlierPolicies
from goaly.train.microbatch import Microbatch
from goaly.train.model_engine import ModelEngine
from goaly.train.parity_check import ParityCheck
from goaly.train.settings import TrainerSettings
from goaly.trajectory import EXPERT_CHOICES, LATER_TOP, TOP_TOKENS, PackedRows, TensorDict


class TrainEngine(ModelEngine):
    """The policy, or with `trains=False` a frozen reference: gives the log-probs of the trained tokens."""

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
        """With bitwise numerics it keeps the last `earlier_policies` versions to compare their samples, too."""
        from goaly.train.logprob_head import LOGPROBS

        super().__init__(model, settings, LOGPROBS, trains=trains, offload=offload)
        self._check = self._used = None
        self._top_k = 0
        """The most likely tokens that the next pass finds at each place."""
        if model.numerics == "bitwise":
            self._check = ParityCheck(settings.ranks, settings.tp, reports=self.leads)
        live = versioned_tensors(self._model) | {"steps_done": self._steps_done}
        self._earlier = EarlierPolicies(live, earlier_policies, getattr(torch, model.dtype))

    @property
    def policy_version(self) -> int:
        """The version of the current parameters."""
        return self.steps_done

    def _minibatches(self, packed: PackedRows, objective: Objective | ValueLoss) -> list[PackedRows]:
        """The minibatches, compared with their sampler's log-probs. The first one is compared in its own step."""
        minibatches = super()._minibatches(packed, objective)
        self._used = check = self._check if objective.was_sampled else None
        if check is not None:
            check.compared = 0
            for earlier in self._earlier.versions:
                if earlier != self.policy_version:  # a step that failed has kept it
                    self._compare_sampled_by(earlier, packed.rows, check)
            self._earlier.keep(self.policy_version)
        for minibatch in minibatches[1:]:
            if objective.needs_proximal:
                self._parity = check and check.begin()
                minibatch.rows[PROXIMAL] = self.logprobs(minibatch.rows)  # no step of this batch is done yet
            elif check is not None:
                self._compare_sampled_by(self.policy_version, minibatch.rows, check)
        self._parity = check and check.begin()
        return minibatches

    def _batch_metrics(self, packed: PackedRows) -> dict[str, float]:
        compared = {} if self._used is None else self._used.metrics(packed.batch_trained_tokens)
        return super()._batch_metrics(packed) | compared

    @torch.no_grad()
    def _compare_sampled_by(self, version: int, rows: TensorDict, check: ParityCheck) -> None:
        """Compare the trained tokens of these rows that this version sampled, with its parameters (train-9)."""
        trained_RL = rows["trained"] & (rows["sampler_versions"] == version)
        microbatches = rows.replace({"trained": trained_RL}).split(self.settings.microbatch_rows)
        wanted = torch.tensor([bool(one["trained"].any()) for one in microbatches], dtype=torch.uint8)
        if self.settings.ranks > 1:
            dist.all_reduce(wanted, dist.ReduceOp.MAX)
        if wanted.any():
            with nullcontext() if version == self.policy_version else self._earlier.loaded(version):
                self._parity = check.begin()
                compared = [one for one, is_wanted in zip(microbatches, wanted, strict=True) if is_wanted]
                self._pass_through(compared, lambda *_: None)

    def logprobs(self, rows: TensorDict) -> Tensor:
        """Log-probs `[R, L]` f32 of the trained tokens; 0 at all others."""
        return self.column(rows)

    @torch.no_grad()
    def judgement(self, rows: TensorDict, top_k: int = 0) -> dict[str, Tensor]:
        """As a teacher: the columns `[R, L]` and `[R, L, K]` of its log-probs of the trained tokens of these rows, and
        of its `top_k` most likely tokens with theirs."""
        keys = ("teacher_logprobs", *(LATER_TOP if top_k else ()))
        sizes = {key: (*rows.batch_size, *([top_k] if key in LATER_TOP else [])) for key in keys}
        columns = {key: torch.zeros(size) for key, size in sizes.items()}
        first = 0

        def keep(batch: Microbatch, outputs: tuple[Tensor, ...]) -> None:
            nonlocal first
            cells_P = batch.cells_P.cpu() + first * rows.batch_size[1]
            for column, output in zip(columns.values(), (outputs[0], *outputs[2:]), strict=True):
                column.flatten(0, 1)[cells_P] = output.float().cpu()
            first += self.settings.microbatch_rows

        self._top_k = top_k
        try:
            self._pass_through(rows.split(self.settings.microbatch_rows), keep)
        finally:
            self._top_k = 0
        found = self._pipeline.from_last(columns)
        return {key: column.to(LATER_TOP.get(key, column.dtype)) for key, column in found.items()}

    def _more(self, part: Microbatch) -> dict[str, Any]:
        if self._top_k:
            return {"top_k": self._top_k}
        return {"others_PK": part.columns[TOP_TOKENS].long()} if TOP_TOKENS in part.columns else {}

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
