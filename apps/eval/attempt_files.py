"""Files about an evaluation's attempts of agents: a line for each, patches of coding agents, resolved tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `--help` does not wait for torch
    from goaly.rollout.evaluation_attempts import Answered

    Sets = Mapping[str, Sequence[Answered]]


def write_attempts(path: Path, answered: Sets) -> None:
    """Write a line for each attempt."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for name, found in answered.items():
            for one in found:
                for number, (reward, notes) in enumerate(zip(one.rewards, one.notes, strict=True)):
                    failed = {"failed": why} if (why := getattr(reward, "why", None)) else {}
                    line = {"set": name, "prompt": one.prompt.id, "attempt": number, "reward": reward, **failed}
                    file.write(json.dumps({**line, "notes": list(notes)}) + "\n")


def write_patches(path: Path, answered: Sets, model: str) -> None:
    """Write the patches in SWE-bench's form: one file, or one for each attempt at the tasks. An attempt that failed has
    none."""
    from goaly.coding.predictions import Prediction, write_predictions

    path.parent.mkdir(parents=True, exist_ok=True)
    attempts = max(len(one.rewards) for found in answered.values() for one in found)
    for number in range(attempts):
        patches = {
            one.prompt.id: patch
            for found in answered.values()
            for one in found
            if number < len(one.notes) and (patch := _noted(one.notes[number], "patch")) is not None
        }
        file = path if attempts == 1 else path.with_suffix(f".{number + 1}{path.suffix}")
        made = (
            Prediction(instance_id=name, model_name_or_path=model, model_patch=patch) for name, patch in patches.items()
        )
        write_predictions(file, made)


def resolved(found: Sequence[Answered]) -> list[str]:
    """The ids of the tasks that an attempt has resolved."""
    return [one.prompt.id for one in found if any(_noted(notes, "resolved") for notes in one.notes)]


def _noted(notes: Sequence[Mapping[str, Any]], key: str) -> Any:
    """The last value of a key in an attempt's notes; None if it has none."""
    values: Iterator[Any] = (note[key] for note in reversed(notes) if key in note)
    return next(values, None)
