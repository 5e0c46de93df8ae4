"""Predictions in SWE-bench's form are read as they were written."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.coding.predictions import Prediction, PredictionProblem, read_predictions, write_predictions

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
MADE = st.builds(Prediction, instance_id=TEXTS.filter(bool), model_name_or_path=TEXTS, model_patch=TEXTS)
GOOD = {"instance_id": "a", "model_name_or_path": "tiny", "model_patch": "--- a\n"}


@settings(max_examples=30)
@given(made=st.lists(MADE, max_size=4, unique_by=lambda one: one.instance_id))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, made: list[Prediction]) -> None:
    file = tmp_path_factory.mktemp("predictions") / "predictions.jsonl"
    write_predictions(file, made)
    assert list(read_predictions(file).values()) == made


def test_a_json_list_is_read_and_no_patch_is_an_empty_one(tmp_path: Path) -> None:
    file = tmp_path / "predictions.json"
    file.write_text(json.dumps([GOOD, {**GOOD, "instance_id": "b", "model_patch": None}]))
    assert [one.model_patch for one in read_predictions(file).values()] == ["--- a\n", ""]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ([], "must be an object with instance_id, model_name_or_path, model_patch"),
        ({**GOOD, "patch": ""}, "`patch`: no such key"),
        ({**GOOD, "model_patch": 3}, "`model_patch`=3: must be a text"),
        ({"instance_id": "a", "model_patch": ""}, "`model_name_or_path`=null: must be a text"),
        ({**GOOD, "instance_id": ""}, "`instance_id` is empty"),
        (GOOD, "a has a prediction already"),
    ],
)
def test_a_wrong_line_is_named_with_its_key(tmp_path: Path, record: Any, says: str) -> None:
    file = tmp_path / "predictions.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(record)}\n")
    with pytest.raises(PredictionProblem) as caught:
        read_predictions(file)
    assert str(caught.value).startswith(f"{file}, line 3: ")
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["{", '{"instance_id": "a"', "[1"])
def test_a_damaged_file_is_one_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "predictions.jsonl"
    file.write_text(text)
    with pytest.raises(PredictionProblem, match="not JSON"):
        read_predictions(file)
