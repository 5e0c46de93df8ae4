"""Recipes for large models run on a CPU with one switch, on data in the published formats."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.loop.launched import REWARDED
from tests.program import ended

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
ROW_LENGTH = 256


def steps_of(recipe: str, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of two steps of this recipe, as a tiny run in `folder / "run"`."""
    dapo = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": f"What is {n} + 1? End with Answer: $Answer", "role": "user"}],
            "reward_model": {"ground_truth": str(n + 1), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"id-{n}"},
        }
        for n in range(8)
    ]
    longer_than_a_row = "1+" * ROW_LENGTH + "1?"
    aime24 = [{"ID": "2024-I-1", "Problem": longer_than_a_row, "Solution": "", "Answer": 2}]
    aime25 = [{"question": "1+1?", "answer": "2"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(aime24), folder / "aime24.parquet")
    for name, records in (("dapo", dapo), ("aime25", aime25)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    files = [f"evaluation.sets.{file.stem}.files=[{file}]" for file in sorted(folder.glob("aime*"))]
    settings = ["--config", str(ROOT / f"configs/grpo/{recipe}.yaml"), "model.tiny=true", "steps=2"]
    settings += [f"backlog.row_length={ROW_LENGTH}"]
    settings += [f"run_dir={folder / 'run'}", f"prompts.files=[{folder}/dapo.jsonl]", *files, *overrides]
    done = ended("apps.grpo.main", *settings, below=folder, seconds=800)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["policy_version"] for step in steps] == [1, 2]
    fresh = [abs(step["sampler_kl"]) for step in steps if step["age/max"] == 0]
    assert fresh
    assert max(fresh) < 1e-4  # rounding in bfloat16, which also moves choices of experts
    assert (folder / "run" / "policy" / "config.json").is_file()
    for line in (folder / "run" / "evaluations.jsonl").read_text().splitlines():
        scores = json.loads(line)
        assert {"evaluation/aime24/avg@2", "evaluation/aime25/avg@2"} <= set(scores)
        assert "evaluation/aime24/too_long" not in scores
    return steps


@pytest.mark.parametrize("recipe", ["qwen3_30b_a3b", "qwen3_32b"])
def test_a_recipe_trains_and_evaluates_on_two_ranks_each(tmp_path: Path, recipe: str):
    steps_of(recipe, tmp_path)


def test_a_dense_recipe_trains_with_two_replicas_and_samples_until_each_group_has_a_signal(tmp_path: Path):
    """A random policy never solves a problem, so the switch turns dynamic sampling off; this verifier tells its answers
    apart."""
    steps = steps_of("qwen3_8b", tmp_path, "backlog.dynamic_sampling=true", REWARDED)
    assert all(step["groups/without_signal"] == 0 for step in steps)
    assert all(step["grad_norm"] > 0 for step in steps)
