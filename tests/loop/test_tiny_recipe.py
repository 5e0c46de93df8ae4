"""A recipe for a large model runs on a CPU with one switch, on data in the published formats."""

import json
from pathlib import Path

import pytest

from tests.program import ended

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
def test_the_recipe_with_experts_trains_and_evaluates_on_two_ranks_each(tmp_path: Path):
    dapo = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": f"What is {n} + 1? End with Answer: $Answer", "role": "user"}],
            "reward_model": {"ground_truth": str(n + 1), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"id-{n}"},
        }
        for n in range(8)
    ]
    aime = [{"ID": "2024-I-1", "Problem": "1+1?", "Solution": "", "Answer": 2, "question": "1+1?", "answer": "2"}]
    for name, records in (("dapo", dapo), ("aime", aime)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    files = [f"evaluation.sets.{name}.files=[{tmp_path / 'aime.jsonl'}]" for name in ("aime24", "aime25")]
    settings = ["--config", str(ROOT / "configs/grpo/qwen3_30b_a3b.yaml"), "model.tiny=true", "steps=2"]
    settings += [f"run_dir={tmp_path / 'run'}", f"prompts.files=[{tmp_path}/dapo.jsonl]", *files]
    done = ended("apps.grpo.main", *settings, below=tmp_path, seconds=800)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["policy_version"] for step in steps] == [1, 2]
    fresh = [abs(step["sampler_kl"]) for step in steps if step["age/max"] == 0]
    assert fresh
    assert max(fresh) < 1e-4  # rounding in bfloat16, which also moves choices of experts
    first = json.loads((tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()[0])
    assert {"evaluation/aime24/avg@2", "evaluation/aime25/avg@2"} <= set(first)
    assert (tmp_path / "run" / "policy" / "config.json").is_file()
