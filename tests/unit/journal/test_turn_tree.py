"""An episode's tree of turns, found again from its trajectories."""

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.journal.turn_tree import turns_of
from goaly.trajectory import Outcome, Trajectory, Turn, token_data


def trajectory(turns: Sequence[tuple[str, list[int], bool]]) -> Trajectory:
    """A trajectory of turns (author, tokens, trained)."""
    tokens = [token for _, its, _ in turns for token in its]
    trained = torch.tensor([one for _, its, one in turns for _ in its])
    made, stop = [], 0
    for author, its, _ in turns:
        made.append(Turn(author=author, start=stop, stop=stop + len(its)))
        stop += len(its)
    columns = {
        "tokens": torch.tensor(tokens),
        "trained": trained,
        "sampler_logprobs": torch.where(trained, -0.5, 0.0),
        "sampler_versions": torch.where(trained, 0, -1).int(),
        "rewards": torch.zeros(len(tokens)),
    }
    facts = {"prompt_id": "p", "sample_index": 0, "environment": "", "outcome": Outcome.COMPLETE}
    return Trajectory(tokens=token_data(columns), turns=tuple(made), **facts)


def shape(*trajectories: Trajectory) -> list[tuple[int | None, int]]:
    """Parent and trajectory of each turn."""
    return [(turn.parent, turn.trajectory) for turn in turns_of(trajectories)]


PROMPT = ("prompt", [1, 2], False)


def test_trajectories_share_the_turns_up_to_where_they_part() -> None:
    one = trajectory([PROMPT, ("policy", [3], True), ("environment", [4], False), ("policy", [5], True)])
    two = trajectory([PROMPT, ("policy", [3], False), ("environment", [6], False), ("policy", [5], True)])
    assert shape(one, two) == [(None, 0), (1, 0), (2, 0), (3, 0), (2, 1), (5, 1)]


def test_a_shared_answer_is_that_of_the_trajectory_that_trains_it() -> None:
    context = trajectory([PROMPT, ("policy", [3], False), ("environment", [4], False), ("policy", [5], True)])
    trains = trajectory([PROMPT, ("policy", [3], True), ("environment", [6], False), ("policy", [5], True)])
    assert shape(context, trains)[1] == (1, 1)


def test_equal_answers_that_are_both_trained_are_siblings() -> None:
    one = trajectory([PROMPT, ("policy", [3], True)])
    assert shape(one, one) == [(None, 0), (1, 0), (1, 1)]


def test_tokens_that_no_turn_names_are_turns_too() -> None:
    one = trajectory([PROMPT, ("policy", [3], True), ("environment", [4], False)])
    unnamed = Trajectory(
        tokens=one.tokens,
        turns=(one.turns[1],),
        prompt_id="p",
        sample_index=0,
        environment="",
        outcome=Outcome.COMPLETE,
    )
    assert [(turn.author, turn.span) for turn in turns_of([unnamed])] == [
        ("prompt", slice(0, 2)),
        ("policy", slice(2, 3)),
        ("environment", slice(3, 4)),
    ]


ANSWERS = st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=2), st.integers(0, 1)), min_size=1)


@settings(max_examples=40)
@given(st.lists(ANSWERS.map(tuple), min_size=1, max_size=5))
def test_each_path_of_the_tree_is_a_trajectory_and_each_trained_turn_is_there_once(branches: list[tuple]) -> None:
    made = [
        trajectory([PROMPT, *(("policy", tokens, bool(trained)) for tokens, trained in turns)]) for turns in branches
    ]
    tree = {turn.number: turn for turn in turns_of(made)}
    trained = sum(bool(trained) for turns in branches for _, trained in turns)
    assert sum(bool(made[one.trajectory].tokens["trained"][one.span].any()) for one in tree.values()) == trained
    paths = []
    for turn in tree.values():
        path, at = [], turn
        while True:
            path.append(made[at.trajectory].tokens["tokens"][at.span].tolist())
            if at.parent is None:
                break
            at = tree[at.parent]
        paths.append([token for tokens in reversed(path) for token in tokens])
    assert all(one.tokens["tokens"].tolist() in paths for one in made)
