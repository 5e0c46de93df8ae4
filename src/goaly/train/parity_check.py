"""Compares the log-probs of a training step with those of the sampler, in a run with `model.numerics=bitwise`.

A token has the log-prob that the parameters give it which sampled it. Those of the trainer's version are compared in
the first pass over them: in the training pass of the batch's first minibatch, and for the others in the pass that gives
them their proximal policy, or in one of their own. For tokens of older versions the trainer keeps the parameters of as
many versions as a token can be old (`earlier_policies.py`), and makes a pass for each version that is in the batch. A
trainer that continues from a checkpoint has no parameters of the versions before it.

The ranks compare while they compute, and agree after the last microbatch. So all of them raise the same error at the
same place. `python -m goaly.parity` then finds the operation that computes other bits.

Shape suffixes: P trained tokens of a microbatch.

A difference ends the run. The error names the token, the version that sampled it, both log-probs, and how many tokens
differ. A difference on any rank is an error on every rank. A step reports the share of its tokens that it compared, and
the first one that compared fewer than all is logged. A token of a version that the trainer has not reached ends the
run: its stamp is wrong.

Invariant
    train-9: Every trained token is compared before the batch's first optimizer step, if the trainer has the parameters
        that sampled it.
"""

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from goaly.base.errors import ParityError, SchemaError
from goaly.train.microbatch import Microbatch

logger = logging.getLogger(__name__)

TOKENS, DIFFERING, SHARE = "parity/tokens", "parity/differing_tokens", "parity/share"


class ParityCheck:
    """Compares a pass over microbatches, and keeps the first token that differs."""

    def __init__(self, ranks: int, alike: int, *, reports: bool = False):
        """Of the `ranks`, `alike` ones have the same rows in each pipeline stage. One rank of all `reports`."""
        self._ranks = ranks
        self._alike = alike
        self._warns = reports
        self.compared = 0
        """Tokens of the batch that have been compared, on all ranks."""

    def begin(self) -> "ParityCheck":
        """This check, for the microbatches of a new pass."""
        self._counts = torch.zeros(3, dtype=torch.int64)
        self._first = ""
        return self

    def compare(self, batch: Microbatch, logprobs_P: Tensor, version: int) -> None:
        """Compare the next microbatch, where this version sampled the tokens."""
        sampler_P, versions_P = batch.columns["sampler_logprobs"], batch.columns["sampler_versions"]
        compared_P = versions_P == version  # train-9
        logprobs_P = logprobs_P.detach()
        differs_P = compared_P & (logprobs_P != sampler_P)
        self._counts += torch.stack([compared_P.sum(), differs_P.sum(), (versions_P > version).sum()]).cpu()
        if not self._first and bool(differs_P.any()):
            number = int(differs_P.nonzero()[0])
            position = int(batch.positions_1T[0, batch.predicting_P[number]]) + 1
            self._first = (
                f"The first is token {int(batch.targets_P[number])} at position {position} of its document: the "
                f"trainer's log-prob is {float(logprobs_P[number])!r}, the sampler's {float(sampler_P[number])!r}."
            )

    def agree(self, version: int) -> None:
        """Count the compared tokens of all ranks, after the last microbatch; ParityError if one differs on any rank,
        SchemaError if one is of a version that is still to come. Every rank must call it."""
        found = [self._first]
        if self._ranks > 1:
            dist.all_reduce(self._counts)
        # Rounded up: one of those that are alike may differ alone.
        tokens, differing, unknown = (-(-count // self._alike) for count in self._counts.tolist())
        if differing:
            if self._ranks > 1:
                found = [""] * self._ranks
                dist.all_gather_object(found, self._first)
            first = next(filter(None, found))
            raise ParityError(
                f"trainer and sampler differ at {differing} of {tokens} tokens of policy version {version}. {first}"
            )
        if unknown:
            raise SchemaError(f"sampler_versions: tokens of versions after {version}, the trainer's own: {unknown}")
        self.compared += tokens

    def metrics(self, trained: int) -> dict[str, float]:
        """The metrics of a step on a batch of `trained` tokens."""
        if self._warns and self.compared < trained:
            self._warns = False
            logger.warning(
                "model.numerics=bitwise: this step compared %d of its %d tokens. The trainer has no parameters of the "
                "policy versions that sampled the others: it began with a checkpoint after them, or they are older "
                "than `backlog.max_staleness` versions. %s has the share of each step.",
                self.compared,
                trained,
                SHARE,
            )
        return {TOKENS: float(self.compared), SHARE: self.compared / max(trained, 1), DIFFERING: 0.0}
