"""Requests of the check of `goaly.parity`, a cache that is too small for them, and the update of the weights.

The requests have a common prompt in groups of `SHARED`. Most answers are short, of heavy-tailed lengths. The first
`LONG` requests go on to the longest sequence that is allowed, and run at once, so a cache of half of their tokens
cannot hold them. The second group's prompt is half as long as a sequence may be. What the check computes is bounded by
the number of requests and a few times the longest sequence.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from goaly.generate.request import Sampling
from goaly.generate.settings import GeneratorSettings
from goaly.models.architecture import architecture, read_config
from goaly.models.settings import ModelSettings
from goaly.weights.dtensor_layout import local

GIB = 1 << 30
SHARED = 4
"""Number of successive requests with the same prompt, as the samples of a group."""
LONG = 3
"""Answers that end at the longest sequence that is allowed."""
SHORT = 512
"""The most tokens of the other prompts and answers."""
UPDATED = 1
"""The version of the halved weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """A request of the check."""

    name: str
    prompt: list[int]
    sampling: Sampling

    @property
    def tokens(self) -> int:
        """Those of the whole sequence."""
        return len(self.prompt) + self.sampling.max_tokens


def mixed_requests(
    count: int, *, vocabulary: int, longest: int, temperature: float = 1.0, seed: int = 0
) -> list[CheckedRequest]:
    """Seeded requests, whose sequences have at most `longest` tokens; some have as many."""
    draw = random.Random(seed)
    asked: list[CheckedRequest] = []
    for number in range(count):
        if number % SHARED == 0:
            drawn = min(SHORT, int(8 * draw.paretovariate(0.7)))
            length = longest // 2 if number == SHARED else min(longest // 2, drawn)
            prompt = [draw.randrange(vocabulary) for _ in range(length)]
        room = longest - len(prompt)
        drawn = min(SHORT, int(8 * draw.paretovariate(0.8)))
        length = room if number < LONG else max(1, min(room, drawn))
        sampling = Sampling(max_tokens=length, temperature=temperature, seed=draw.randrange(1 << 30))
        asked.append(CheckedRequest(name=f"{seed}-{number}", prompt=prompt, sampling=sampling))
    return asked


def cramped(model: ModelSettings, generator: GeneratorSettings, asked: Sequence[CheckedRequest]) -> GeneratorSettings:
    """The generator with a cache for half of the longest sequences of these requests, but for one whole sequence at
    least, and with short steps: requests are preempted and prompts are computed in parts."""
    at_once = sorted(one.tokens for one in asked)[-min(LONG, generator.max_running) :]
    steps = replace(generator, max_step_tokens=2 * generator.max_running)
    return with_cache_of(model, steps, sum(at_once) // 2)


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
