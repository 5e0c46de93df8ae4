"""Evaluate a policy on named sets of prompts: pass@1, pass@k, avg@k. START HERE: this file is the evaluation.

    python -m apps.eval.main --config configs/eval/tiny.yaml path=runs/sft-tiny

Generates with goaly's own engine in this process, or asks an API elsewhere (`endpoint.url`). With `agent` it scores
an agent that uses the policy, or the episodes of a script.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from apps.eval.attempt_files import resolved, write_attempts, write_patches
from apps.eval.config import EvalConfig
from goaly.base.atomic_files import writing
from goaly.base.config import Loaded, run_cli, to_yaml
from goaly.base.errors import ConfigError, RunFailed, first_error
from goaly.reward.verifier_trial import trial

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings go to stdout, where the table belongs

if TYPE_CHECKING:
    from goaly.rollout.evaluation import EvalResult
    from goaly.rollout.evaluation_attempts import Answered, Verifier


async def evaluation(config: EvalConfig) -> "dict[str, list[Answered]]":
    """Try the problems of every set with the policy, and score the answers."""
    from apps.eval.policy import solver
    from goaly.rollout.evaluation import ProblemSets
    from goaly.rollout.evaluation_attempts import attempted

    sets = ProblemSets(config.evaluation, config.prompts).chosen()
    answered = {}
    async with judge(config) as verify, solver(config, verify) as (solve, sampled):
        for one in sets:
            sampling = sampled(one.settings.sampled(config.sampling))
            samples = one.settings.samples_per_prompt
            answered[one.name] = await attempted(solve, one.prompts, samples, sampling, config.generator.seed)
    return answered


@asynccontextmanager
async def judge(config: EvalConfig) -> "AsyncIterator[Verifier]":
    """The verifier, which runs in child processes."""
    from goaly.reward.verifier_pool import Judge

    pool = Judge(config.reward, config.evaluation.verifiers)
    await pool.start()
    try:
        yield pool.score
    finally:
        await pool.close()


def results_of(config: EvalConfig, answered: "Mapping[str, list[Answered]]") -> "dict[str, EvalResult]":
    """The result of every set, and with `by` those of its parts."""
    from goaly.rollout.evaluation import warn_of_long_prompts
    from goaly.rollout.evaluation_attempts import summaries_by, summary

    results = {}
    for name, answers in answered.items():
        pass_at = config.evaluation.named[name].pass_at
        results[name] = summary(answers, pass_at)
        warn_of_long_prompts(name, results[name])
        if config.by is not None:
            parts = summaries_by(answers, config.by, pass_at)
            results |= {f"{name} {config.by}={key}": result for key, result in parts.items()}
    return results


def table(results: "Mapping[str, EvalResult]") -> str:
    """The results as a table, one row for each. A score that a result does not have is shown as `-`."""
    scores = sorted({score for result in results.values() for score in result.scores}, key=_score_order)
    heads = [*scores, "prompts", "length", "p95", "max"]
    width = max(len(name) for name in results) + 2
    lines = [" " * width + "".join(f"{head:>9}" for head in heads)]
    for name, result in results.items():
        cells = [f"{result.scores[score]:.3f}" if score in result.scores else "-" for score in scores]
        cells.append(str(result.prompts))
        if result.lengths is not None:
            cells += [f"{result.lengths.mean:.1f}", str(result.lengths.p95), str(result.lengths.longest)]
        lines.append(f"{name:<{width}}" + "".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines) + "\n"


def _score_order(score: str) -> tuple[bool, int]:
    kind, _, k = score.partition("@")
    return kind != "pass", int(k)


def main(loaded: Loaded[EvalConfig]) -> int:
    """Evaluate, print a table, and write the JSON file if `output` names one."""
    config = loaded.config
    if problems := trial(config.reward, config.evaluation.verifiers_by_key()).result():
        raise ConfigError(problems)
    if loaded.dry_run:
        sys.stdout.write(to_yaml(config))
        return 0
    started = time.monotonic()
    try:
        answered = asyncio.run(evaluation(config))
    except BaseExceptionGroup as group:
        if not isinstance(error := first_error(group), RunFailed):
            raise
        sys.stderr.write(f"the evaluation failed: {error}\n")
        return 1
    results = results_of(config, answered)
    sys.stdout.write(table(results))
    if config.output is not None:
        content = {
            "path": config.policy_name,
            "seconds": round(time.monotonic() - started, 1),
            "results": {name: asdict(result) for name, result in results.items()},
            "rewards": {name: {one.prompt.id: one.rewards for one in found} for name, found in answered.items()},
        }
        if config.coding is not None:
            content["resolved"] = {name: resolved(found) for name, found in answered.items()}
        with writing(f"output={config.output}"):
            Path(config.output).parent.mkdir(parents=True, exist_ok=True)
            Path(config.output).write_text(json.dumps(content, indent=2) + "\n")
    if config.attempts is not None:
        with writing(f"attempts={config.attempts}"):
            write_attempts(Path(config.attempts), answered)
    if config.predictions is not None:
        with writing(f"predictions={config.predictions}"):
            write_patches(Path(config.predictions), answered, config.policy_name)
    return 0


if __name__ == "__main__":
    run_cli(
        main, EvalConfig, prog="python -m apps.eval.main", description="Evaluate a policy on named sets of prompts."
    )
