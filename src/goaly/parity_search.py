"""Finds the operation with which trainer and sampler give a token other log-probs, for `goaly.parity`.

The trainer's ranks keep what their operations give the token's document among the packed rows. Then one rank of a
trainer computes the document alone, and the sampler's ranks compute it as a prompt, in one step and a token at a time.
All of them build the same modules with the same weights, so an operation has the same name everywhere. On each side the
first one is named that has other bits than on the one rank.

Shape suffixes: T tokens of a pass, K experts of a token, R rows of tokens and experts, grouped by expert, G outputs.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from goaly.generate.settings import GeneratorSettings
from goaly.models.families import architecture, read_config
from goaly.models.settings import ModelSettings
from goaly.run.rendezvous import in_ranks
from goaly.train.microbatch import microbatch
from goaly.train.rank_thread import join_process_group
from goaly.train.settings import TrainerSettings
from goaly.trajectory import TensorDict
from goaly.weights.dtensor_layout import local

if TYPE_CHECKING:
    from goaly.train.train_engine import TrainEngine

Outputs = Mapping[str, tuple[torch.Tensor, ...]]
"""The outputs of each operation by its name: those of a layer come after those of its parts."""
EXPERTS = ".routed_experts.inner_experts"
CHECKPOINTED = "_checkpoint_wrapped_module."
"""Part of the names in a model whose activations are recomputed."""
FOUND = "found"
"""The file of the token in the folder of a search."""
GIB = 1 << 30
UPDATED = 1
"""The version of the halved weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differing:
    """A token whose log-prob is not the sampler's."""

    dp_rank: int
    row: int
    """Among those of its rank."""
    column: int
    version: int
    """Of the policy that sampled it."""
    document: TensorDict
    """Its document up to the token, as a row."""
    trainer: float
    sampler: float

    @property
    def before(self) -> int:
        """The tokens of the document before it."""
        return self.document.batch_size[1] - 1


def keep_first(engine: "TrainEngine", rows: TensorDict, logprobs_RL: torch.Tensor, folder: Path, rank: int) -> bool:
    """Whether one of these log-probs differs on any rank. The first one that does is written to the folder, with what
    the operations of each rank that has it give its document. Every rank must call it."""
    found = [_first(engine.dp_rank, rows, logprobs_RL)]
    if engine.settings.ranks > 1:
        (mine,), found = found, [None] * engine.settings.ranks
        dist.all_gather_object(found, mine)
    at = next((one for one in found if one is not None), None)
    if at is None:
        return False
    size = engine.settings.microbatch_rows
    number, row = divmod(at.row, size)
    part = rows.split(size)[number]
    with _recorded(engine.decoder) as recorded:
        engine.logprobs(part)
    outputs = _by_token(recorded, has_all_experts=engine.settings.ep == 1)
    if engine.dp_rank == at.dp_rank:
        batch = microbatch(part)
        (place,) = batch.predicting_P[batch.cells_P == row * part.batch_size[1] + at.column].tolist()
        torch.save(_of_tokens(outputs, place + 1 - at.before, place + 1), folder / f"trainer {rank}")
    if rank == 0:
        torch.save(at, folder / FOUND)
    return True


def search(model: ModelSettings, trainer: TrainerSettings, generator: GeneratorSettings, folder: Path) -> str:
    """The token that `keep_first` has written to the folder, and the operations that compute other bits for it."""
    at: Differing = torch.load(folder / FOUND, weights_only=False)
    alone_settings = replace(trainer, pp=1, fsdp=1, tp=1, ep=1, microbatch_rows=1)
    in_ranks(_alone, 1, (model, alone_settings, at, folder))
    one_step = with_cache_of(model, replace(generator, max_running=1, max_step_tokens=at.before), at.before)
    ways = {"in one step": one_step, "a token at a time": replace(one_step, max_step_tokens=1)}
    for way, settings in ways.items():
        in_ranks(_sampled, generator.tp, (model, settings, at, way, folder))
    whole, logprob = torch.load(folder / "alone", weights_only=False)
    said = [
        f"The first token is {int(at.document['tokens'][0, -1])} at position {at.before} of its document, of policy "
        f"version {at.version}: the trainer's log-prob is {at.trainer!r}, the sampler's {at.sampler!r}. One trainer "
        f"rank that computes the document alone gives it {logprob!r}."
    ]
    sides = {"trainer": ("trainer", trainer.tp, "among packed rows")}
    sides |= {way: ("sampler", generator.tp, way) for way in ways}
    for side, (whose, ranks, how) in sides.items():
        files = {int(file.name.removeprefix(side)): file for file in folder.glob(f"{side} *")}
        others = {rank: _first_other(torch.load(file), whole, rank % ranks, ranks) for rank, file in files.items()}
        if named := {rank: name for rank, name in others.items() if name is not None}:
            rank = min(named, key=lambda rank: [*whole].index(named[rank]))
            said.append(
                f"The first operation whose output on {whose} rank {rank}, which computes it {how}, is not that of the "
                f"one rank is {named[rank]}."
            )
    if len(said) == 1:
        said.append(
            "No operation before lm_head computes other bits: it is lm_head, or the sampler differs only beside other "
            "requests, or routes otherwise."
        )
    return " ".join(said)


def with_cache_of(model: ModelSettings, generator: GeneratorSettings, tokens: int) -> GeneratorSettings:
    """The generator with a cache for this number of tokens, but for one whole sequence at least."""
    shape = architecture(read_config(model.path))
    heads = 2 * shape.layers * max(1, shape.kv_heads // generator.tp)
    each = heads * shape.head_dim * getattr(torch, model.dtype).itemsize
    held = max(tokens, generator.max_context + 64)
    return replace(generator, kv_cache_gib=held * each / GIB)


def halve(weights: Mapping[str, torch.Tensor]) -> int:
    """Make a new version of weights, which has the same bits in any type and on any ranks; its number."""
    by_address = {part.data_ptr(): part for part in map(local, weights.values()) if part.is_floating_point()}
    torch._foreach_mul_(list(by_address.values()), 0.5)
    return UPDATED


def _first(dp_rank: int, rows: TensorDict, logprobs_RL: torch.Tensor) -> Differing | None:
    places = (rows["trained"] & (logprobs_RL != rows["sampler_logprobs"])).nonzero()
    if not len(places):
        return None
    row, column = places[0].tolist()
    document = rows[row : row + 1, column - int(rows["positions"][row, column]) : column + 1].clone()
    document["trained"] = torch.arange(document.batch_size[1])[None] == document.batch_size[1] - 1
    return Differing(
        dp_rank=dp_rank,
        row=row,
        column=column,
        version=int(rows["sampler_versions"][row, column]),
        document=document,
        trainer=float(logprobs_RL[row, column]),
        sampler=float(rows["sampler_logprobs"][row, column]),
    )


def _alone(rank: int, model: ModelSettings, trainer: TrainerSettings, at: Differing, folder: Path) -> None:
    from goaly.train.train_engine import TrainEngine

    join_process_group(trainer.threads, trainer.ranks)
    engine = TrainEngine(model, trainer, trains=False)
    if at.version == UPDATED:
        engine.steps_done = halve(engine.named_tensors())
    with _recorded(engine.decoder) as outputs:
        logprobs_RL = engine.logprobs(at.document)
    torch.save((_of_tokens(_by_token(outputs), 0, at.before), float(logprobs_RL[0, -1])), folder / "alone")


def _sampled(
    rank: int, model: ModelSettings, generator: GeneratorSettings, at: Differing, way: str, folder: Path
) -> None:
    """Write what the operations of a sampler's rank give the document, a prompt that its steps compute."""
    from goaly.generate.request import Sampling
    from goaly.generate.vllm_engine import VllmEngine

    torch.set_num_threads(generator.threads)  # vLLM allows it no more later
    engine = VllmEngine(generator, model)
    if at.version == UPDATED:
        engine.apply(lambda: halve(engine.named_tensors()))
    engine.add("searched", at.document["tokens"][0, :-1].tolist(), Sampling(max_tokens=1))
    steps = []
    for start in range(0, at.before, generator.max_step_tokens):
        with _recorded(engine.decoder) as outputs:
            engine.step()
        of_step = _by_token(outputs, has_all_experts=generator.ep == 1)
        steps.append(_of_tokens(of_step, 0, min(generator.max_step_tokens, at.before - start)))
    while engine.running:  # with `generator.async_scheduling` the last step has not been read
        engine.step()
    joined = {name: tuple(torch.cat(p, 1) for p in zip(*(s[name] for s in steps), strict=True)) for name in steps[0]}
    torch.save(joined, folder / f"{way} {rank}")
    if generator.tp > 1:
        dist.barrier()


@contextmanager
def _recorded(decoder: Any) -> Iterator[Outputs]:
    """The outputs of the decoder's modules in the pass that is made inside."""
    outputs: dict[str, tuple[torch.Tensor, ...]] = {}

    def record(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            outputs[name] = output if isinstance(output, tuple) else (output,)

        return hook

    handles = [
        module.register_forward_hook(record(name.replace(CHECKPOINTED, "")))
        for name, module in decoder.named_modules()
        if name
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _by_token(outputs: Outputs, *, has_all_experts: bool = True) -> Outputs:
    """The outputs that have a part for each token: `[1, T, …]`, and those of experts as `[1, T, K, G]`, which takes a
    rank that `has_all_experts`. Ranks that divide a tensor must all make this call."""
    whole = {
        name: tuple(part.full_tensor() if isinstance(part, DTensor) else part for part in parts)
        for name, parts in outputs.items()
    }
    tokens = next(iter(whole.values()))[0].shape[1]  # of the embedding, or the first norm of a later stage
    found = {}
    for name, parts in whole.items():
        if parts[0].shape[:2] == (1, tokens):
            found[name] = parts
        elif name.endswith(EXPERTS) and has_all_experts:
            experts_TK = whole[name.removesuffix(EXPERTS) + ".router"][1][0]
            place_R = torch.argsort(experts_TK.flatten(), stable=True)
            rows_RG = torch.empty_like(parts[0]).index_copy_(0, place_R, parts[0])
            found[name] = (rows_RG.view(1, *experts_TK.shape, -1),)
    return found


def _of_tokens(outputs: Outputs, start: int, stop: int) -> Outputs:
    return {name: tuple(part[:, start:stop].cpu().clone() for part in parts) for name, parts in outputs.items()}


def _first_other(mine: Outputs, whole: Outputs, rank: int, ranks: int) -> str | None:
    """The first operation with other bits than in `whole`. Each output may be one of the ranks' equal parts."""
    for name, expected in whole.items():
        for one, other in zip(mine.get(name, ()), expected, strict=False):
            divided = [dim for dim, size in enumerate(one.shape) if other.shape[dim] != size]
            if not torch.equal(one, other.chunk(ranks, divided[0])[rank] if divided else other):
                return name
    return None
