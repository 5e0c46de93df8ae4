"""What the operations of a torchtitan decoder give, in the order in which they end, for comparisons bit by bit.

Trainer and sampler build the same modules, so their operations have the same names.

Shape suffixes: T tokens of a pass, K experts of a token, R rows of tokens and experts, grouped by expert, G outputs.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Outputs = Mapping[str, tuple[torch.Tensor, ...]]
"""The outputs of each operation by its name: those of a layer come after those of its parts."""
EXPERTS = ".routed_experts.inner_experts"
CHECKPOINTED = "_checkpoint_wrapped_module."
"""Part of the names in a model whose activations are recomputed."""


@contextmanager
def recorded(model: Any) -> Iterator[Outputs]:
    """The outputs of the model's modules in the pass that is made inside."""
    outputs: dict[str, tuple[torch.Tensor, ...]] = {}

    def record(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            outputs[name] = output if isinstance(output, tuple) else (output,)

        return hook

    handles = [
        module.register_forward_hook(record(name.replace(CHECKPOINTED, "")))
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def by_token(outputs: Outputs, *, has_all_experts: bool = True) -> Outputs:
    """The outputs that have a part for each token: `[1, T, …]`, and those of experts as `[1, T, K, G]`, which takes a
    rank that `has_all_experts`. Ranks that divide a tensor must all make this call."""
    whole = {name: tuple(map(_whole, parts)) for name, parts in outputs.items()}
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


def of_tokens(outputs: Outputs, start: int, stop: int) -> Outputs:
    """The outputs of the tokens `[start, stop)`."""
    return {name: tuple(part[:, start:stop].cpu().clone() for part in parts) for name, parts in outputs.items()}


def joined(passes: Sequence[Outputs]) -> Outputs:
    """The outputs of the tokens of several passes, one after the other."""
    return {
        name: tuple(torch.cat(parts, 1) for parts in zip(*(one[name] for one in passes), strict=True))
        for name in passes[0]
    }


def first_other(mine: Outputs, whole: Outputs, *, rank: int = 0, ranks: int = 1) -> str | None:
    """The first operation with other bits than in `whole`, if there is one. Each output may be one of the equal parts
    that so many ranks have."""
    for name, expected in whole.items():
        for one, other in zip(mine.get(name, ()), expected, strict=False):
            if not torch.equal(one, _part(other, one.shape, rank, ranks)):
                return name
    return None


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _part(whole: torch.Tensor, shape: torch.Size, rank: int, ranks: int) -> torch.Tensor:
    """The rank's part of an output that has this shape on each rank."""
    for dim, (all_of_it, of_rank) in enumerate(zip(whole.shape, shape, strict=True)):
        if all_of_it != of_rank:
            return whole.chunk(ranks, dim)[rank]
    return whole
