"""The negative controls of the recipes' benchmark: each breaks one thing and keeps the size of the signal."""

import torch

from bench import controls
from goaly.generate.policy import Completion
from goaly.generate.request import Finish
from goaly.prompts.prompt import Message, Prompt
from goaly.reward import advantages
from goaly.reward.advantages import Scored
from goaly.reward.estimate import scored
from goaly.rollout.episode import Episode
from goaly.trajectory import Group, Trajectory

REWARDS = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0]]


def answer(prompt: Prompt, index: int, reward: float) -> Trajectory:
    tokens = torch.tensor([5, 6])
    written = Completion(
        prompt=(3, 4),
        tokens=tokens,
        logprobs=torch.zeros(2),
        versions=torch.zeros(2, dtype=torch.int32),
        finish=Finish.STOP,
        text="",
    )
    return Episode(prompt, [3, 4], index).wrote(written).finish(reward)


def batch() -> Scored:
    groups = []
    for ticket, rewards in enumerate(REWARDS):
        prompt = Prompt(id=str(ticket), source="s", messages=(Message(role="user", content="?"),))
        samples = tuple(answer(prompt, index, reward) for index, reward in enumerate(rewards))
        groups.append(Group(ticket=ticket, prompt_id=prompt.id, source="s", samples=samples))
    return scored(groups)


def test_the_flipped_control_reinforces_what_grpo_discourages() -> None:
    assert torch.equal(controls.flipped(batch()), -advantages.group(batch()))


def test_the_other_group_control_gives_each_sample_the_advantage_of_the_next_groups() -> None:
    right, wrong = advantages.group(batch()).view(3, 4), controls.other_group(batch()).view(3, 4)
    assert torch.equal(wrong, right[[1, 2, 0]])


def test_the_shuffled_control_keeps_each_groups_advantages_and_moves_them() -> None:
    right, wrong = advantages.group(batch()).view(3, 4), controls.shuffled(batch()).view(3, 4)
    assert torch.equal(wrong.sort().values, right.sort().values)
    assert not torch.equal(wrong, right)
