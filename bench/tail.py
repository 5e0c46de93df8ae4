"""Answers of a stated length: a load for `bench.loop` whose tail is a parameter and whose work is always the same.

The length of each sample is drawn from its prompt and index alone, so that every arm of a benchmark generates and
trains the same number of tokens, whatever the policy does.
"""

import math
from collections.abc import Callable, Coroutine
from hashlib import blake2b
from typing import Any

from goaly.prompts.prompt import Prompt
from goaly.rollout.episode import Episode, EpisodeContext
from goaly.trajectory import Trajectory

MEAN, SHORTEST = 40, 4
"""Tokens of an answer."""

EpisodeFunction = Callable[[Prompt, EpisodeContext], Coroutine[Any, Any, Trajectory | list[Trajectory]]]


def tail_episode(longest_over_mean: float) -> EpisodeFunction:
    """An episode whose answers have 40 tokens on average and this many times as many at most; rewards are 0 or 1."""
    longest = round(longest_over_mean * MEAN)
    power = _power(longest)

    async def episode(prompt: Prompt, context: EpisodeContext) -> Trajectory:
        question = context.render(prompt)
        chance = drawn(f"{prompt.id} {context.sample_index}")
        tokens = round(_quantile(chance, power, longest))
        answer = await context.policy.sample(question, max_tokens=tokens, stop_token_ids=())
        reward = float(drawn(f"reward {prompt.id} {context.sample_index}") < 0.5)
        return Episode(prompt, question, context.sample_index).wrote(answer).finish(reward)

    return episode


def lengths(longest_over_mean: float, count: int) -> list[int]:
    """So many quantiles of the lengths of `tail_episode`, each as likely as the others."""
    longest = round(longest_over_mean * MEAN)
    power = _power(longest)
    return [round(_quantile((place + 0.5) / count, power, longest)) for place in range(count)]


def drawn(key: str) -> float:
    """A number between 0 and 1, the same for the same key."""
    return int.from_bytes(blake2b(key.encode(), digest_size=7).digest(), "big") / (1 << 56)


def _quantile(chance: float, power: float, longest: float) -> float:
    """The length below which this share of answers lies, for a density of length ** -power from SHORTEST to longest."""
    if math.isclose(power, 1.0, abs_tol=1e-6):
        return SHORTEST * (longest / SHORTEST) ** chance
    ends = SHORTEST ** (1 - power), longest ** (1 - power)
    return (ends[0] + chance * (ends[1] - ends[0])) ** (1 / (1 - power))


def _mean(power: float, longest: float) -> float:
    steps = 2000
    return sum(_quantile((step + 0.5) / steps, power, longest) for step in range(steps)) / steps


def _power(longest: float) -> float:
    """The power at which answers have MEAN tokens on average."""
    low, high = -8.0, 8.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean(middle, longest) > MEAN else (low, middle)
    return (low + high) / 2
