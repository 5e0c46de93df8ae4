"""The advantages of live turns: siblings are compared with each other, single turns with the baseline of their key.

Nothing is divided by a deviation: one turn has none, and a few say little about it.
"""

from collections import defaultdict

import torch
from torch import Tensor

from goaly.live.collection import HINT
from goaly.live.turn_samples import LIVE
from goaly.reward.advantages import Scored


def turn_rewards(batch: Scored) -> list[Tensor]:
    """For each token of a turn the turn's reward, minus the mean of the batch's answers to the same prompt if there are
    several, or else minus the expected reward of its key. `advantages.name` of a live run."""
    rewards: dict[tuple[int, int], float] = {}
    siblings: defaultdict[str, list[float]] = defaultdict(list)
    for number, (sample, rewards_T) in enumerate(zip(batch.samples, batch.rewards, strict=True)):
        for place, note in enumerate(_turns(sample.notes)):
            reward = float(rewards_T[note["start"] : note["stop"]].sum())
            rewards[number, place] = reward
            if note["by"] != HINT:
                siblings[note["siblings"]].append(reward)
    found = []
    for number, (sample, rewards_T) in enumerate(zip(batch.samples, batch.rewards, strict=True)):
        values_T = torch.zeros_like(rewards_T)
        for place, note in enumerate(_turns(sample.notes)):
            reward, others = rewards[number, place], siblings[note["siblings"]]
            if note["by"] == HINT:
                compared = reward  # a teacher alone judges it
            elif len(others) == 1:
                compared = note["baseline"]
            else:
                compared = reward if len({*others}) == 1 else sum(others) / len(others)  # rounding makes no signal
            values_T[note["start"] : note["stop"]] = reward - compared
        found.append(values_T)
    return found


def _turns(notes):  # type: ignore[no-untyped-def]
    return [note for note in notes if note.get("kind") == LIVE]
