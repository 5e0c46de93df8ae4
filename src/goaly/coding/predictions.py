"""Patches of an agent in SWE-bench's form, a line of JSON for each: its own harness can grade them, and ours its."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from goaly.base.atomic_files import put_file
from goaly.base.config.wording import show


class PredictionProblem(ValueError):
    """A file of predictions that cannot be read; the message names the line, the key and what would be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """An agent's patch for one task."""

    instance_id: str
    """Id of the task."""
    model_name_or_path: str
    model_patch: str
    """The change as a patch in git's form; empty for none."""


_KEYS = tuple(Prediction.__dataclass_fields__)


def write_predictions(path: Path, predictions: Iterable[Prediction]) -> None:
    """Write a file of predictions, in place of an old one."""
    lines = (json.dumps(asdict(prediction)) for prediction in predictions)
    put_file(path, "".join(f"{line}\n" for line in lines).encode())


def read_predictions(path: Path) -> dict[str, Prediction]:
    """The predictions of a JSONL file, or of a JSON list, by their tasks; PredictionProblem if one is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PredictionProblem(f"{path}: cannot be read: {error}") from None
    found: dict[str, Prediction] = {}
    for where, record in _records(path, text):
        prediction = _prediction(where, record)
        if prediction.instance_id in found:
            raise PredictionProblem(f"{where}: {prediction.instance_id} has a prediction already; must have one")
        found[prediction.instance_id] = prediction
    return found


def _records(path: Path, text: str) -> Iterable[tuple[str, Any]]:
    try:
        if text.lstrip().startswith("["):
            return [(f"{path}, entry {number}", record) for number, record in enumerate(json.loads(text), 1)]
        lines = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
        return [(f"{path}, line {number}", json.loads(line)) for number, line in lines]
    except json.JSONDecodeError as error:
        raise PredictionProblem(f"{path}: not JSON: {error}") from None


def _prediction(where: str, record: Any) -> Prediction:
    if not isinstance(record, dict):
        raise PredictionProblem(f"{where}: must be an object with {', '.join(_KEYS)}")
    if unknown := [key for key in record if key not in _KEYS]:
        raise PredictionProblem(f"{where}: `{unknown[0]}`: no such key; there are {', '.join(_KEYS)}")
    values = dict(record)
    values["model_patch"] = "" if values.get("model_patch", "") is None else values.get("model_patch")  # no answer
    for key in _KEYS:
        if not isinstance(values.get(key), str):
            raise PredictionProblem(f"{where}: `{key}`={show(values.get(key))}: must be a text")
    if not values["instance_id"]:
        raise PredictionProblem(f"{where}: `instance_id` is empty; must be a task's id")
    return Prediction(**values)
