"""Evaluate a policy on named sets of prompts: pass@1, pass@k, avg@k. START HERE: this file is the evaluation.

    python -m apps.eval.main --config configs/eval/tiny.yaml path=runs/sft-tiny

Generates with goaly's own engine, in this process.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from apps.eval.config import EvalConfig
from goaly.config import Loaded, run_cli, to_yaml

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings go to stdout, where the table belongs

if TYPE_CHECKING:
    from goaly.evaluation.result import Answered, EvalResult, SampleFunction, Verifier


async def evaluation(config: EvalConfig) -> "dict[str, list[Answered]]":
    """Sample the policy's answers to the problems of every set, and score them."""
    from goaly.evaluation.result import sample_and_verify
    from goaly.evaluation.sets import ProblemSets
    from goaly.generate.request import Sampling
    from goaly.prompts.tokenizer import ChatTokenizer

    sets = ProblemSets(config.evaluation, config.prompts).chosen()
    tokenizer = ChatTokenizer(config.model.path, config.chat)
    answered = {}
    async with judge(config) as verify, policy(config) as sample:
        for one in sets:
            sampling = Sampling.of(one.settings.sampled(config.sampling), tokenizer.stop_token_ids)
            samples = one.settings.samples_per_prompt
            answered[one.name] = await sample_and_verify(
                sample, tokenizer, one.prompts, verify, samples, sampling, seed=config.generator.seed
            )
    return answered


@asynccontextmanager
async def policy(config: EvalConfig) -> "AsyncIterator[SampleFunction]":
    """A function that samples from the policy, by an engine in this process."""
    from apps.eval.quiet import hushed

    with hushed():
        from goaly.generate.engine import Engine
        from goaly.generate.engine_loop import EngineLoop

        engine = await asyncio.to_thread(Engine, config.generator, config.model, seed=config.generator.seed)
    loop = EngineLoop(engine, config.generator, lambda: 0)
    numbers = count()
    try:
        yield lambda tokens, sampling: loop.generate(f"sample-{next(numbers)}", tokens, sampling)
    finally:
        await loop.stop()
        engine.close()


@asynccontextmanager
async def judge(config: EvalConfig) -> "AsyncIterator[Verifier]":
    """The verifier, which runs in child processes."""
    from goaly.reward.verifiers import Judge

    pool = Judge(config.reward, config.evaluation.verifiers)
    await pool.start()
    try:
        yield pool.score
    finally:
        await pool.close()


def results_of(config: EvalConfig, answered: "Mapping[str, list[Answered]]") -> "dict[str, EvalResult]":
    """The result of every set, and with `by` those of its parts."""
    from goaly.evaluation.result import summaries_by, summary, warn_of_long_prompts

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
    if loaded.dry_run:
        sys.stdout.write(to_yaml(config))
        return 0
    import torch

    torch.set_num_threads(config.generator.threads)
    started = time.monotonic()
    results = results_of(config, asyncio.run(evaluation(config)))
    sys.stdout.write(table(results))
    if config.output is not None:
        content = {
            "path": config.model.path,
            "seconds": round(time.monotonic() - started, 1),
            "results": {name: asdict(result) for name, result in results.items()},
        }
        Path(config.output).parent.mkdir(parents=True, exist_ok=True)
        Path(config.output).write_text(json.dumps(content, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    run_cli(
        main, EvalConfig, prog="python -m apps.eval.main", description="Evaluate a policy on named sets of prompts."
    )
