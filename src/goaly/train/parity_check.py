"""Compares the log-probs of a training step with those of the sampler, in a run with `model.numerics=bitwise`.

A token that the current parameters sampled has the log-prob that they give it now. So all tokens of the trainer's
version are compared, as long as the batch has changed no parameter: in its first minibatch. With
`backlog.max_staleness=0` these are all tokens of that minibatch. Tokens of older versions cannot be compared.

Shape suffixes: T tokens of a microbatch, P trained tokens among them.

Invariants
    PC-1  Every trained token that the current parameters sampled is compared before the batch's first optimizer step.
    PC-2  A difference ends the run. The error names the token, both log-probs, how many tokens of the microbatch
          differ, and the first operation whose output depends on how the document is computed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from goaly.errors import ParityError
from goaly.models.bitwise_attention import GrowingDocument
from goaly.models.operations import by_token, first_other, recorded
from goaly.train.microbatch import Microbatch

Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Log-probs and entropies of targets, of hidden states, the places of those that predict them, and the targets."""
TOKENS, DIFFERING = "parity/tokens", "parity/differing_tokens"


class ParityCheck:
    """Counts the tokens of a batch that were compared."""

    def __init__(self, model: Any, head: Head | None):
        """`model` is the trainer's, and `head` its last part; None: this rank cannot compute with it by itself."""
        self._model = model
        self._head = head
        self._tokens = 0

    def compare(self, batch: Microbatch, logprobs_P: torch.Tensor, version: int) -> None:
        """Raise a ParityError if a token of this version has another log-prob than the sampler's (PC-2)."""
        sampler_P, versions_P = batch.columns["sampler_logprobs"], batch.columns["sampler_versions"]
        compared_P = versions_P == version  # PC-1
        self._tokens += int(compared_P.sum())
        logprobs_P = logprobs_P.detach()
        differs_P = compared_P & (logprobs_P != sampler_P)
        if bool(differs_P.any()):
            first = int(differs_P.nonzero()[0])
            token, at = int(batch.targets_P[first]), int(batch.predicting_P[first])
            position = int(batch.positions_1T[0, at]) + 1
            raise ParityError(
                f"trainer and sampler differ at {int(differs_P.sum())} of {int(compared_P.sum())} tokens of policy "
                f"version {version}. The first is token {token} at position {position} of its document: the trainer's "
                f"log-prob is {float(logprobs_P[first])!r}, the sampler's {float(sampler_P[first])!r}. "
                f"{self._where(batch, first)}"
            )

    def take(self) -> dict[str, torch.Tensor]:
        """The counts since the last call; no batch with a difference gets here."""
        counts = {TOKENS: torch.tensor(self._tokens), DIFFERING: torch.tensor(0)}
        self._tokens = 0
        return counts

    def _where(self, batch: Microbatch, first: int) -> str:
        if self._head is None:
            return "`python -m goaly.parity` with the run's config finds the operation."
        operation = first_difference(self._model, self._head, batch, first)
        if operation is None:
            return (
                "The trainer computes the same bits when it has the document alone and a token at a time, as a sampler "
                "does: the sampler had other weights, another version of a library or another kind of CPU."
            )
        return f"The first operation whose output depends on how the document is computed is {operation}."


@torch.no_grad()
def first_difference(model: Any, head: Head, batch: Microbatch, first: int) -> str | None:
    """The first operation that computes other bits for this one of the trained tokens, or for one before it in the
    document, when the document is computed alone and a token at a time."""
    from goaly.models.attention import document_masks

    at = int(batch.predicting_P[first])
    start = at - int(batch.positions_1T[0, at])
    document = slice(start, at + 1)
    with recorded(model) as packed:
        masks = document_masks(model, batch.positions_1T)
        model(batch.tokens_1T, positions=batch.positions_1T, attention_masks=masks)
    growing = GrowingDocument(at + 1 - start)
    steps = []
    for token in range(start, at + 1):
        place = slice(token, token + 1)
        with recorded(model) as step, choices_at(model, place):
            model(
                batch.tokens_1T[:, place],
                positions=batch.positions_1T[:, place],
                attention_masks=growing.next(1),
            )
        steps.append(step)
    of_document = {name: tuple(part[:, document] for part in parts) for name, parts in by_token(packed).items()}
    by_step = [by_token(step) for step in steps]
    alone = {
        name: tuple(torch.cat(parts, 1) for parts in zip(*(step[name] for step in by_step), strict=True))
        for name in of_document
    }
    if (name := first_other(of_document, alone)) is not None:
        return name
    place, target = batch.targets_P.new_zeros(1), batch.targets_P[first : first + 1]
    beside = head(packed["norm"][0], batch.predicting_P, batch.targets_P)[0][first]
    return None if float(head(steps[-1]["norm"][0], place, target)[0]) == float(beside) else "lm_head"


@contextmanager
def choices_at(model: Any, place: slice) -> Iterator[None]:
    """Let passes over these tokens of the last pass go to the experts that are replayed for them."""
    layers = [layer for layer in model.modules() if getattr(layer, "choices_BLK", None) is not None]
    whole = [(layer.choices_BLK, layer.replayed_BL1) for layer in layers]
    for layer in layers:
        layer.choices_BLK, layer.replayed_BL1 = layer.choices_BLK[:, place], layer.replayed_BL1[:, place]
    try:
        yield
    finally:
        for layer, of_all in zip(layers, whole, strict=True):
            layer.choices_BLK, layer.replayed_BL1 = of_all
