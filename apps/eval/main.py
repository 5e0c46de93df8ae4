"""Evaluate a policy on held-out prompts: pass@1, pass@k, avg@k. START HERE: this file is the evaluation.

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
    from goaly.prompts.evaluation import Answered, EvalResult, SampleFunction, Verifier


async def evaluation(config: EvalConfig) -> "list[Answered]":
    """Ask the policy the held-out prompts, and judge what it says."""
    from goaly.generate.request import Sampling
    from goaly.prompts.evaluation import ask
    from goaly.prompts.mixture import held_out
    from goaly.prompts.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer(config.model.path, config.chat)
    sampling = Sampling.of(config.sampling, tokenizer.stop_token_ids)
    prompts = held_out(config.prompts, config.count)
    async with judge(config) as verify, policy(config) as sample:
        return await ask(sample, tokenizer, prompts, verify, config.samples_per_prompt, sampling)


@asynccontextmanager
async def policy(config: EvalConfig) -> "AsyncIterator[SampleFunction]":
    """The policy's engine, as a function that samples."""
    from apps.eval.quiet import hushed

    with hushed():
        from goaly.generate.engine import Engine
        from goaly.generate.loop import EngineLoop

        engine = await asyncio.to_thread(Engine, config.generator, config.model, seed=config.generator.seed)
    generator = config.generator
    loop = EngineLoop(engine, apply_mode=generator.apply, max_running=generator.max_running, fill=lambda: 0)
    numbers = count()
    try:
        yield lambda tokens, sampling: loop.generate(f"sample-{next(numbers)}", tokens, sampling)
    finally:
        await loop.stop()
        engine.close()


@asynccontextmanager
async def judge(config: EvalConfig) -> "AsyncIterator[Verifier]":
    """The verifier, in processes of its own."""
    from goaly.prompts.prompt import Prompt
    from goaly.reward.verifiers import RewardTimeout, VerifierPool

    async def verify(prompt: Prompt, response: str) -> float:
        try:
            return await pool.score(prompt, response)
        except RewardTimeout:
            if config.reward.on_time_limit == "fail":
                raise
            return 0.0

    pool = VerifierPool(config.reward)
    await pool.start()
    try:
        yield verify
    finally:
        await pool.close()


def table(results: "Mapping[str, EvalResult]") -> str:
    """The results as lines of text, a row for each."""
    first = next(iter(results.values()))
    heads = [f"pass@{k}" for k in first.pass_at] + [
        f"avg@{first.samples_per_prompt}",
        "prompts",
        "length",
        "p95",
        "max",
    ]
    width = max(len(name) for name in results) + 2
    lines = [" " * width + "".join(f"{head:>9}" for head in heads)]
    for name, result in results.items():
        cells = [f"{value:.3f}" for value in (*result.pass_at.values(), result.average)] + [str(result.prompts)]
        if result.lengths is not None:
            cells += [f"{result.lengths.mean:.1f}", str(result.lengths.p95), str(result.lengths.longest)]
        lines.append(f"{name:<{width}}" + "".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines) + "\n"


def main(loaded: Loaded[EvalConfig]) -> int:
    """Evaluate, print a table, and write the JSON file if there is to be one."""
    config = loaded.config
    if loaded.dry_run:
        sys.stdout.write(to_yaml(config))
        return 0
    import torch

    from goaly.prompts.evaluation import summaries_by, summary

    torch.set_num_threads(config.generator.threads)
    started = time.monotonic()
    answered = asyncio.run(evaluation(config))
    results = {"all": summary(answered)}
    if config.by is not None:
        results |= {f"{config.by}={key}": result for key, result in summaries_by(answered, config.by).items()}
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
    run_cli(main, EvalConfig, prog="python -m apps.eval.main", description="Evaluate a policy on held-out prompts.")
