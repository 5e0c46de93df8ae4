"""vLLM's engine in processes that are the ranks of one replica."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from goaly.generate.request import Sample, Sampling


def become_rank(rank: int, ranks: int, port: int) -> None:
    """Let this process form a process group with the others."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()}, MASTER_ADDR="127.0.0.1")


def sampled(engine: Any, prompts: list[list[int]], *, max_tokens: int) -> list[Sample]:
    """An answer to each prompt."""
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, Sampling(max_tokens=max_tokens, seed=number))
    ended: dict[str, Sample] = {}
    while engine.running:
        ended |= dict(engine.step())
    return [ended[str(number)] for number in range(len(prompts))]


def load(engine: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Put the rank's parts of these weights into the engine, as version 1."""
    from goaly.weights.dtensor_layout import layout_of, local
    from goaly.weights.layout import region, view

    live = engine.named_tensors()
    assert live.keys() == weights.keys()
    held = {name: local(tensor) for name, tensor in live.items()}

    def fill() -> int:
        for shard in layout_of(live):
            view(held, shard).copy_(region(weights[shard.name], shard.offset, shard.shape))
        return 1

    engine.apply(fill)
