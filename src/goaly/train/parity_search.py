"""Finds the operation that makes a trainer's log-prob differ from the sampler's (`parity_check.py`).

One rank computes the microbatch again by itself: a trainer of one rank, or a copy of the whole model that the first of
several ranks builds from the parameters that all of them gather. If it gives the sampler's log-probs, the ranks compute
the microbatch again together, and the operations of each are compared with those of the one. If it does not, it
computes the document alone and a token at a time, as a sampler does, and its own operations are compared. Then a
sampler with its weights computes the document (`generate/sampler_search.py`), and the two are compared.

All ranks take part, so none may leave the search before the others. The caller limits its time.

Shape suffixes: T tokens of a microbatch.
"""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from goaly.errors import ParityError
from goaly.models.bitwise_attention import GrowingDocument
from goaly.models.operations import Outputs, by_token, first_other, joined, of_tokens, recorded
from goaly.train.parity_check import Difference

if TYPE_CHECKING:
    from goaly.generate.settings import GeneratorSettings
    from goaly.train.engine import TrainEngine

logger = logging.getLogger(__name__)
UNNAMED = "No operation is named: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The finding of one rank that has the whole model."""

    said: str
    """Empty if it computes the sampler's log-probs."""
    tokens: list[int]
    """The document before the token that differs."""
    outputs: Outputs
    """Those of its operations, of these tokens."""


def search(engine: "TrainEngine", at: Difference, sampler: "GeneratorSettings | None" = None) -> str:
    """The first operation that computes other bits, or why none is named. If it may be the sampler's, it is searched
    for in a sampler with these settings. Every rank must call it."""
    is_one = engine.settings.ranks == 1
    try:
        if is_one and sampler is None:
            return _within_one(engine, at)
        alone = _alone(engine, at, sampler)
        if isinstance(alone, str):
            return UNNAMED + alone
        if is_one:
            return alone.said
        if alone.said:
            return f"One rank of a trainer says: {alone.said}"
        return f"One rank of a trainer computes the sampler's bits. {_among_ranks(engine, at, alone)}"
    except Exception as error:
        logger.exception("the search for the operation that differs failed")
        return f"{UNNAMED}the search failed with {type(error).__name__}: {error}"


def _alone(engine: "TrainEngine", at: Difference, sampler: "GeneratorSettings | None") -> Alone | str:
    """What the first rank finds with the whole model, or why it finds nothing."""
    box: list[Any] = [None]
    is_one = engine.settings.ranks == 1
    with tempfile.TemporaryDirectory(prefix="goaly-parity-") as temporary:
        path = Path(temporary) / "model"
        try:
            engine.save_for_one(path)
            if is_one:
                box = [_with_outputs(engine, at, _within_one(engine, at))]
            elif dist.get_rank() == 0:
                box = [_of_one(engine.alone(path), at)]
            if isinstance(box[0], Alone) and box[0].said and sampler is not None:
                box = [_with_sampler(engine, path, box[0], sampler)]
        except Exception as error:  # the other ranks wait for this one
            logger.exception("one rank alone cannot search for the operation that differs")
            box = [f"one rank alone failed with {type(error).__name__}: {error}"]
    if not is_one:
        dist.broadcast_object_list(box, 0)
    return box[0]


def _of_one(engine: "TrainEngine", at: Difference) -> Alone:
    said = ""
    try:
        engine.compare([at.rows])
    except ParityError as error:
        said = f"{error} {engine.find_operation()}"
    return _with_outputs(engine, at, said)


def _with_sampler(engine: "TrainEngine", path: Path, alone: Alone, sampler: "GeneratorSettings") -> Alone:
    """The finding with that of a sampler which has the weights at this path."""
    from goaly.generate.sampler_search import SearchedSampler, operation_of

    asked = SearchedSampler(
        model=engine.model_for_one(path),
        generator=sampler,
        tokens=alone.tokens,
        outputs=alone.outputs,
    )
    return replace(alone, said=f"{alone.said} {operation_of(asked)}")


def _within_one(engine: "TrainEngine", at: Difference) -> str:
    """What the operations of one rank that differs from the sampler say."""
    operation = first_difference(engine, at)
    if operation is None:
        return (
            "The trainer computes the same bits when it has the document alone and a token at a time, as a sampler "
            "does: the sampler had other weights, another version of a library or another kind of CPU."
        )
    return f"The first operation whose output depends on how the document is computed is {operation}."


def _with_outputs(engine: "TrainEngine", at: Difference, said: str) -> Alone:
    row, column = divmod(at.cell, at.rows.batch_size[1])
    document = at.rows[row : row + 1, column - at.position : column + 1]
    outputs, _ = engine.operations(document)
    tokens = document["tokens"][0, :-1].tolist()
    outputs = of_tokens(outputs, 0, at.position)
    return Alone(said=said, tokens=tokens, outputs=outputs)


def _among_ranks(engine: "TrainEngine", at: Difference, alone: Alone) -> str:
    """The first operation with other bits on one of the ranks than on one that is alone."""
    settings = engine.settings
    outputs, logprobs_P = engine.operations(at.own_rows)
    mine = None
    if engine.dp_rank == at.dp_rank:
        own, whole = _of_document(engine, at, outputs, alone.outputs)
        name = first_other(own, whole, rank=dist.get_rank() % settings.tp, ranks=settings.tp)
        again = logprobs_P is not None and float(logprobs_P[at.number]) != at.sampler
        mine = name, again
    found: list[Any] = [None] * settings.ranks
    dist.all_gather_object(found, mine)
    names = [*alone.outputs, None]
    named = {rank: one[0] for rank, one in enumerate(found) if one is not None}
    first = min(named, key=lambda rank: names.index(named[rank]))
    if named[first] is not None:
        return f"The first operation whose output on trainer rank {first} is not that rank's is {named[first]}."
    if any(one is not None and one[1] for one in found):
        return "All operations of the trainer's ranks before lm_head do, too, so it is lm_head."
    return f"{UNNAMED}the trainer's ranks compute the sampler's bits, too, when they compute the same rows again."


def _of_document(engine: "TrainEngine", at: Difference, mine: Outputs, whole: Outputs) -> tuple[Outputs, Outputs]:
    """The outputs of this rank's tokens of the document before the token that differs, and the same tokens' outputs
    among those of the `whole` document."""
    tokens = next(iter(mine.values()))[0].shape[1]
    start, end = at.predicting + 1 - at.position, at.predicting + 1
    place_T = engine.places(tokens)
    here = ((place_T >= start) & (place_T < end)).nonzero().flatten()
    return _at(mine, here), _at(whole, place_T[here] - start)


def _at(outputs: Outputs, places: torch.Tensor) -> Outputs:
    return {name: tuple(part.cpu()[:, places] for part in parts) for name, parts in outputs.items()}


@torch.no_grad()
def first_difference(engine: "TrainEngine", at: Difference) -> str | None:
    """The first operation of one rank that computes other bits for this token, or for one before it in the document,
    when the document is computed alone and a token at a time."""
    from goaly.models.attention import document_masks

    model, batch = engine.begun(at.rows)
    end = at.predicting + 1
    start = end - at.position
    with recorded(model) as packed:
        masks = document_masks(model, batch.positions_1T)
        model(batch.tokens_1T, positions=batch.positions_1T, attention_masks=masks)
    growing = GrowingDocument(end - start)
    steps = []
    for token in range(start, end):
        place = slice(token, token + 1)
        with recorded(model) as step, choices_at(model, place):
            model(
                batch.tokens_1T[:, place],
                positions=batch.positions_1T[:, place],
                attention_masks=growing.next(1),
            )
        steps.append(step)
    of_document = of_tokens(by_token(packed), start, end)
    alone = joined([of_tokens(by_token(step), 0, 1) for step in steps])
    if (name := first_other(of_document, alone)) is not None:
        return name
    number = at.number
    place, target = batch.targets_P.new_zeros(1), batch.targets_P[number : number + 1]
    beside = engine.head(packed["norm"][0], batch.predicting_P, batch.targets_P)[0][number]
    return None if float(engine.head(steps[-1]["norm"][0], place, target)[0]) == float(beside) else "lm_head"


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
