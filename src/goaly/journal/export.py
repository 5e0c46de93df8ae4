"""Writes the trajectories of a run's log as text, for programs.

`RUN/rollouts.jsonl` gets a line for each trajectory that entered the queue, in this order, also of a run that goes on:

    ticket, prompt_id, sample   the ticket of the group, the prompt, and the number of the sample
    source, answer              the prompt's source and answer
    environment, outcome        the environment, and how the episode ended
    reward, rewards             the sum, and [position, reward] of every token with a reward
    length, trained             token counts
    versions                    [policy version, tokens] runs over the whole sequence; -1 for tokens not sampled
    turns                       [author, start, stop]
    prompt, response            as text
    notes                       what the script noted, such as commands and grades of a coding agent; only if it did
    tokens, logprobs            as sampled; only with `--tokens`
"""

import json
import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from goaly.journal.records import Drawn, Snapshot
from goaly.journal.run_folder import RunFolder
from goaly.journal.run_log import first_version, records
from goaly.prompts.prompt import Prompt
from goaly.trajectory import Group, Trajectory

ROLLOUTS_FILE = "rollouts.jsonl"


def journal(run: RunFolder, *, tokens: bool = False) -> Iterator[dict[str, Any]]:
    """The entries of a run's trajectories; `tokens`: with token ids and log-probs."""
    chat = run.tokenizer()
    prompts: dict[int, Prompt] = {}
    for record in records(run.log):
        match record:
            case Snapshot():  # the draws before it may be deleted
                prompts |= {one.ticket: one.prompt for one in record.records if isinstance(one, Drawn)}
            case Drawn():
                prompts[record.ticket] = record.prompt
            case Group():
                drawn = prompts.pop(record.ticket, None)
                answer = None if drawn is None else drawn.answer
                for sample in record.samples:
                    ids = sample.tokens["tokens"].tolist()
                    answer_at = sample.turns[0].stop if sample.turns else 0
                    texts = {"prompt": chat.decode(ids[:answer_at]), "response": chat.decode(ids[answer_at:])}
                    entry = journal_entry(sample, ticket=record.ticket, tokens=tokens, **texts)
                    yield entry | {"source": record.source, "answer": answer}


def journal_entry(
    trajectory: Trajectory, *, ticket: int, prompt: str, response: str, tokens: bool = False
) -> dict[str, Any]:
    """The journal entry of a trajectory."""
    rewards = trajectory.tokens["rewards"].tolist()
    entry = {
        "ticket": ticket,
        "prompt_id": trajectory.prompt_id,
        "sample": trajectory.sample_index,
        "environment": trajectory.environment,
        "outcome": str(trajectory.outcome),
        "reward": trajectory.reward,
        "rewards": [[position, reward] for position, reward in enumerate(rewards) if reward],
        "length": len(trajectory),
        "trained": trajectory.trained_tokens,
        "versions": run_lengths(trajectory.tokens["sampler_versions"].tolist()),
        "turns": [[turn.author, turn.start, turn.stop] for turn in trajectory.turns],
        "prompt": prompt,
        "response": response,
    }
    if trajectory.notes:
        entry["notes"] = list(trajectory.notes)
    if tokens:
        entry["tokens"] = trajectory.tokens["tokens"].tolist()
        entry["logprobs"] = trajectory.tokens["sampler_logprobs"].tolist()
    return entry


def run_lengths(values: Iterable[int]) -> list[list[int]]:
    """`[value, count]` of every run of equal values."""
    return [[value, sum(1 for _ in same)] for value, same in groupby(values)]


def export(run: RunFolder, *, tokens: bool = False) -> str:
    """Write `rollouts.jsonl`, and return what was written."""
    file, count = run.path / ROLLOUTS_FILE, 0
    unfinished = file.with_suffix(".new")
    try:
        with unfinished.open("w", encoding="utf-8") as out:
            for entry in journal(run, tokens=tokens):
                out.write(json.dumps(entry, ensure_ascii=False) + "\n")
                count += 1
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
    begins = first_version(run.log)
    only = f"; the log begins at policy version {begins}, older records were deleted" if begins else ""
    return f"{count} trajectories in {file}{only}\n"
