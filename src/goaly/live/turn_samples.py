"""The trajectories of a batch of turns, and the group that they make.

Turns of one path share a trajectory: each of the chosen ones is trained in the longest path through it, and all others
on the path are context. The trajectory's notes have the reward of each turn, and what it is compared with.
"""

from collections.abc import Sequence
from typing import Any

import torch

from goaly.agents.turn import RecordedTurn
from goaly.generate.finite_logprobs import without_non_finite
from goaly.generate.request import Finish
from goaly.live.collection import HINT
from goaly.live.hints import TeacherSees
from goaly.live.turn import LiveTurn
from goaly.trajectory import (
    ENVIRONMENT,
    FORM_WEIGHTS,
    NO_VERSION,
    POLICY,
    PROMPT,
    Group,
    Outcome,
    TensorDict,
    Trajectory,
    Turn,
)

LIVE = "live"
"""The source and environment of live groups, and the kind of their notes."""


def group_of(
    ticket: int,
    turns: Sequence[tuple[LiveTurn, RecordedTurn]],
    group_size: int,
    sees: TeacherSees = lambda turn, recorded: None,
) -> Group:
    """The group of these turns, with what a teacher sees before them; the number of episodes that it lacks counts as
    left."""
    samples = samples_of(turns, sees)
    malformed = sum(recorded.malformed for _, recorded in turns)
    return Group(
        ticket=ticket,
        prompt_id=f"{LIVE}-{ticket}",
        source=LIVE,
        samples=tuple(samples),
        counts={"agents/malformed_calls": malformed} if malformed else {},
        left=group_size - len(samples),
    )


def samples_of(
    turns: Sequence[tuple[LiveTurn, RecordedTurn]], sees: TeacherSees = lambda turn, recorded: None
) -> list[Trajectory]:
    """The trajectories in which each of these turns is trained once."""
    of_session: dict[str, dict[int, tuple[LiveTurn, RecordedTurn]]] = {}
    for known, recorded in turns:
        of_session.setdefault(known.session, {})[recorded.number] = known, recorded
    made: list[Trajectory] = []
    for left in of_session.values():
        for number in sorted(left, key=lambda number: -len(left[number][1].path())):
            if number not in left:
                continue
            path = left[number][1].path()
            chosen = {turn.number: left.pop(turn.number)[0] for turn in path if turn.number in left}
            sample = _sample(path, chosen, len(made))
            written = [turn for turn in sample.turns if turn.author == POLICY]
            for place, turn in enumerate(path):
                if turn.number in chosen and (context := sees(chosen[turn.number], turn)) is not None:
                    sample = sample.taught(context, written[place])
            made.append(sample)
    return made


def _sample(path: Sequence[RecordedTurn], chosen: dict[int, LiveTurn], sample_index: int) -> Trajectory:
    length = sum(len(turn.context) + len(turn.tokens) for turn in path)
    tokens_T = torch.zeros(length, dtype=torch.int64)
    trained_T, rewards_T = torch.zeros(length, dtype=torch.bool), torch.zeros(length)
    logprobs_T, versions_T = torch.zeros(length), torch.full((length,), NO_VERSION, dtype=torch.int32)
    weights_T = torch.ones(length)
    turns: list[Turn] = []
    notes: list[dict[str, Any]] = []
    stop = 0
    for number, turn in enumerate(path):
        turns.append(Turn(author=ENVIRONMENT if turns else PROMPT, start=stop, stop=stop + len(turn.context)))
        start, stop = turns[-1].stop, turns[-1].stop + len(turn.tokens)
        tokens_T[turns[-1].start : start] = torch.tensor(turn.context, dtype=torch.int64)
        tokens_T[start:stop] = turn.tokens
        calls = tuple(str(call["function"]["name"]) for call in turn.answer.tool_calls or ())
        turns.append(Turn(author=POLICY, start=start, stop=stop, calls=calls, malformed=turn.malformed))
        if (known := chosen.get(turn.number)) is None:
            continue
        assert known.reward is not None or known.by == HINT, f"turn {known.id} has no reward"  # live-23
        trained_T[start:stop] = True
        logprobs_T[start:stop], versions_T[start:stop] = turn.logprobs, turn.versions
        if turn.form_weights is not None:
            weights_T[start:stop] = turn.form_weights
        rewards_T[stop - 1] = known.reward or 0.0
        facts = {
            "turn": known.id,
            "key": known.key,
            "by": known.by,
            "siblings": known.siblings,
            "version": known.version,
        }
        notes.append(
            {"kind": LIVE, "after": number + 1, "start": start, "stop": stop, "baseline": known.baseline, **facts}
        )
    columns = {
        "tokens": tokens_T,
        "trained": trained_T,
        "sampler_logprobs": logprobs_T,
        "sampler_versions": versions_T,
        "rewards": rewards_T,
    }
    if any(turn.form_weights is not None for turn in path if turn.number in chosen):
        columns[FORM_WEIGHTS] = weights_T
    last = path[-1]
    return Trajectory(
        tokens=TensorDict(without_non_finite(columns), batch_size=[length]),
        prompt_id=next(iter(chosen.values())).session,
        sample_index=sample_index,
        turns=tuple(turns),
        environment=LIVE,
        outcome=Outcome.TRUNCATED if last.finish is Finish.LENGTH else Outcome.COMPLETE,
        notes=tuple(notes),
    )
