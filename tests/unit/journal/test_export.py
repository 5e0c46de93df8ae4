"""The journal: golden entry, exact run lengths."""

from dataclasses import replace
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from goaly.journal.export import journal_entry, run_lengths
from goaly.trajectory import Outcome, Trajectory, Turn, token_data


def trajectory() -> Trajectory:
    return Trajectory(
        tokens=token_data(
            {
                "tokens": torch.tensor([5, 6, 7, 8, 1]),
                "trained": torch.tensor([False, False, True, True, True]),
                "sampler_logprobs": torch.tensor([0.0, 0.0, -0.5, -0.25, -1.0]),
                "sampler_versions": torch.tensor([-1, -1, 3, 3, 4], dtype=torch.int32),
                "rewards": torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]),
            }
        ),
        prompt_id="p1",
        sample_index=2,
        turns=(Turn(author="policy", start=2, stop=5),),
        environment="arithmetic",
        outcome=Outcome.COMPLETE,
    )


ENTRY = {
    "ticket": 9,
    "prompt_id": "p1",
    "sample": 2,
    "environment": "arithmetic",
    "outcome": "complete",
    "reward": 1.0,
    "rewards": [[4, 1.0]],
    "length": 5,
    "trained": 3,
    "versions": [[-1, 2], [3, 2], [4, 1]],
    "turns": [["policy", 2, 5]],
    "prompt": "1+1",
    "response": "2",
}


def test_an_entry_says_what_was_written_rewarded_and_by_which_versions():
    assert journal_entry(trajectory(), ticket=9, prompt="1+1", response="2") == ENTRY


def test_tokens_and_logprobs_are_exact_where_asked_for() -> None:
    exact = {"tokens": [5, 6, 7, 8, 1], "logprobs": [0.0, 0.0, -0.5, -0.25, -1.0]}
    assert journal_entry(trajectory(), ticket=9, prompt="1+1", response="2", tokens=True) == ENTRY | exact


def test_an_entry_has_what_the_script_noted() -> None:
    noted = replace(trajectory(), notes=({"command": "ls", "after": 1},))
    entry = journal_entry(noted, ticket=9, prompt="1+1", response="2")
    assert entry == ENTRY | {"notes": [{"command": "ls", "after": 1}]}


@given(st.lists(st.integers(-1, 2)))
def test_run_lengths_unroll_to_the_values_and_neighbours_differ(values: list[int]):
    runs = run_lengths(values)
    assert [value for value, count in runs for _ in range(count)] == values
    assert all(one[0] != two[0] for one, two in pairwise(runs))
