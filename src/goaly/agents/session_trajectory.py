"""The trajectory of one leaf of a session's tree."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from goaly.agents.turn import RecordedTurn
from goaly.generate.finite_logprobs import without_non_finite
from goaly.generate.request import Finish
from goaly.trajectory import (
    ENVIRONMENT,
    EXPERT_CHOICES,
    FORM_WEIGHTS,
    NO_VERSION,
    POLICY,
    PROMPT,
    Outcome,
    TensorDict,
    Trajectory,
    Turn,
)


def trajectory_of(
    leaf: RecordedTurn,
    credits: Sequence[float],
    reward: float,
    *,
    prompt_id: str,
    sample_index: int,
    environment: str,
    truncated: bool,
    notes: Sequence[Mapping[str, Any]] = (),
) -> Trajectory:
    """The tokens from the root to this leaf. Only its own turns are trained and get their process rewards (agents-3);
    the reward sits on the last trained token. `truncated`: whether a limit ended its session."""
    path, own = leaf.path(), {turn.number: turn for turn in own_turns(leaf)}
    tokens_T = torch.tensor(leaf.path_tokens(), dtype=torch.int64)
    length = len(tokens_T)
    trained_T, rewards_T = np.zeros(length, bool), np.zeros(length, np.float32)  # writes a part faster than torch
    logprobs_T, versions_T = np.zeros(length, np.float32), np.full(length, NO_VERSION, np.int32)
    weights_T = np.ones(length, np.float32)
    last_trained = -1
    turns: list[Turn] = []
    stop = 0
    for turn in path:
        turns.append(Turn(author=ENVIRONMENT if turns else PROMPT, start=stop, stop=stop + len(turn.context)))
        start = turns[-1].stop
        stop = start + len(turn.tokens)
        calls = tuple(str(call["function"]["name"]) for call in turn.answer.tool_calls or ())
        turns.append(Turn(author=POLICY, start=start, stop=stop, calls=calls, malformed=turn.malformed))
        if turn.number not in own:
            continue
        if turn.trained:
            trained_T[start:stop] = True
            logprobs_T[start:stop] = turn.logprobs.numpy()
            versions_T[start:stop] = turn.versions.numpy()
            if turn.form_weights is not None:
                weights_T[start:stop] = turn.form_weights.numpy()
            last_trained = stop - 1 if stop > start else last_trained
        rewards_T[stop - 1] = credits[turn.number]
    rewards_T[last_trained] += reward
    columns = {
        "tokens": tokens_T,
        "trained": torch.from_numpy(trained_T),
        "sampler_logprobs": torch.from_numpy(logprobs_T),
        "sampler_versions": torch.from_numpy(versions_T),
        "rewards": torch.from_numpy(rewards_T),
    }
    if any(turn.form_weights is not None for turn in own.values()):
        columns[FORM_WEIGHTS] = torch.from_numpy(weights_T)
    choices = [own[number].choices for number in sorted(own)]
    if known := [one for one in choices if one is not None]:
        rest = known[0].new_zeros(length - sum(map(len, known)), *known[0].shape[1:])
        columns[EXPERT_CHOICES] = torch.cat([*known, rest])  # trajectory-2
    return Trajectory(
        tokens=TensorDict(without_non_finite(columns), batch_size=[length]),
        prompt_id=prompt_id,
        sample_index=sample_index,
        turns=tuple(turns),
        environment=environment,
        outcome=Outcome.TRUNCATED if truncated or leaf.finish is Finish.LENGTH else Outcome.COMPLETE,
        notes=notes,
    )


def own_turns(leaf: RecordedTurn) -> Iterator[RecordedTurn]:
    """The turns that are trained in the trajectory of this leaf, from the last to the first: the leaf, and each parent
    as long as it was continued first by the turn after it."""
    turn: RecordedTurn | None = leaf
    while turn is not None:
        yield turn
        turn = turn.goes_on
