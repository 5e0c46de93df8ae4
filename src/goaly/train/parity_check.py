"""Compares the log-probs of a training step with those of the sampler, in a run with `model.numerics=bitwise`.

A token that the current parameters sampled has the log-prob that they give it now. So all tokens of the trainer's
version are compared, as long as the batch has changed no parameter: in its first minibatch. With
`backlog.max_staleness=0` these are all tokens of that minibatch. Tokens of older versions cannot be compared.

The ranks compare while they compute, and agree after the last microbatch. So all of them raise the same error at the
same place, and can search for the operation together (`parity_search.py`).

Shape suffixes: T tokens of a microbatch, P trained tokens among them.

Invariants
    PC-1  Every trained token that the current parameters sampled is compared before the batch's first optimizer step.
    PC-2  A difference ends the run. The error names the token, both log-probs, how many tokens differ, and the first
          operation that computes other bits.
    PC-3  A difference on any rank is an error on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from goaly.errors import ParityError
from goaly.train.microbatch import Microbatch
from goaly.trajectory import TensorDict

TOKENS, DIFFERING = "parity/tokens", "parity/differing_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A token whose log-prob is not the sampler's, and where its rank computed it."""

    dp_rank: int
    microbatch: int
    """The number of its microbatch among those of its rank."""
    number: int
    """Its number among the trained tokens of the microbatch."""
    predicting: int
    """The place in T of the token that predicts it."""
    cell: int
    """Its place in the flattened rows."""
    token: int
    position: int
    """In its document."""
    trainer: float
    sampler: float
    rows: TensorDict
    """The rows of its microbatch."""
    own_rows: TensorDict
    """The rows of the microbatch with the same number on the rank that has this record."""

    def __str__(self) -> str:
        return (
            f"The first is token {self.token} at position {self.position} of its document: the trainer's log-prob is "
            f"{self.trainer!r}, the sampler's {self.sampler!r}."
        )


class ParityCheck:
    """Compares a pass over microbatches, and keeps the first token that differs."""

    def __init__(self, dp_rank: int, ranks: int, alike: int):
        """Of so many `ranks`, `alike` ones have the same rows in each pipeline stage."""
        self._dp_rank = dp_rank
        self._ranks = ranks
        self._alike = alike
        self.difference: Difference | None = None
        """The first one, the same on every rank, once `agree` has raised."""

    def begin(self, microbatches: Sequence[TensorDict]) -> None:
        """Compare these microbatches of this rank from now on."""
        self._microbatches = microbatches
        self._seen = 0
        self._counts = torch.zeros(2, dtype=torch.int64)
        self._first: Difference | None = None

    def compare(self, batch: Microbatch, logprobs_P: torch.Tensor, version: int) -> None:
        """Compare the next microbatch, where this version sampled the tokens."""
        sampler_P, versions_P = batch.columns["sampler_logprobs"], batch.columns["sampler_versions"]
        compared_P = versions_P == version  # PC-1
        logprobs_P = logprobs_P.detach()
        differs_P = compared_P & (logprobs_P != sampler_P)
        self._counts += torch.stack([compared_P.sum(), differs_P.sum()]).cpu()
        if self._first is None and bool(differs_P.any()):
            number = int(differs_P.nonzero()[0])
            predicting = int(batch.predicting_P[number])
            rows = self._microbatches[self._seen]
            self._first = Difference(
                dp_rank=self._dp_rank,
                microbatch=self._seen,
                number=number,
                predicting=predicting,
                cell=int(batch.cells_P[number]),
                token=int(batch.targets_P[number]),
                position=int(batch.positions_1T[0, predicting]) + 1,
                trainer=float(logprobs_P[number]),
                sampler=float(sampler_P[number]),
                rows=rows,
                own_rows=rows,
            )
        self._seen += 1

    def agree(self, version: int) -> dict[str, float]:
        """The counts over all ranks after the last microbatch; raises a ParityError if a token differs on any rank
        (PC-2, PC-3). Every rank must call it."""
        found = [self._first]
        if self._ranks > 1:
            dist.all_reduce(self._counts)
        tokens, differing = (-(-count // self._alike) for count in self._counts.tolist())  # one alike may differ alone
        if differing:
            if self._ranks > 1:
                found = [None] * self._ranks
                dist.all_gather_object(found, self._first)
            first = next(one for one in found if one is not None)
            self.difference = replace(first, own_rows=self._microbatches[first.microbatch])
            raise ParityError(
                f"trainer and sampler differ at {differing} of {tokens} tokens of policy version {version}. {first}"
            )
        return {TOKENS: float(tokens), DIFFERING: 0.0}
