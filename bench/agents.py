"""Agents whose environments are slow now and then: a thousand sessions at once on the real loop.

    python -m bench.agents [--steps N] [--rounds N] [--json FILE] [key=value ...]

A session has 2 to 6 turns. Between them its environment works: in 40 % of the sessions for less than 30 ms in all, in
10 % for more than 0.6 s, and for 12 s at most. That is agentic work, a thousand times faster. Sessions that take longer
have more turns. Delays are drawn from the prompt, so every arm has the same. Arms, on the same cores:

    async         generation runs ahead, by a window that holds a thousand sessions
    barrier       each batch is sampled, then trained, then the next: `backlog.max_staleness=0`
    wide barrier  the same with a thousand sessions in a batch: rarer updates, for the same number of sessions

`speedup_vs_barrier` is async / barrier in trained tokens per second; `utilization` is async's tokens per second over
those of the same run without training. Both are medians over the rounds. `sessions` compares the first round's trained
sessions of async with all that were launched up to the last one of them, by their number of turns: a run that left slow
ones out would train shorter ones. Their `staleness` is that of their oldest token.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.loop import Measured, measure_alone, measure_arm
from bench.machine import Machine
from bench.tail import drawn
from goaly.config import load
from goaly.config.schema import plain
from goaly.journal.episodes import LoggedEpisode, read_log
from goaly.journal.run_folder import RunFolder
from goaly.prompts.prompt import Message, Prompt
from goaly.rollout.episode import EpisodeContext
from goaly.run.config import RunConfig
from goaly.trajectory import Trajectory

SHORT, LONG, LONGEST = 0.03, 0.6, 12.0
"""Seconds of an environment's work: the bounds of the profile."""
TOKENS = 16
"""Of each turn."""
SESSIONS = 1_000
GROUP_SIZE, GROUPS_PER_STEP = 8, 8
WINDOW = SESSIONS // GROUP_SIZE
SETTINGS = (
    f"backlog.group_size={GROUP_SIZE}",
    f"backlog.groups_per_step={GROUPS_PER_STEP}",
    f"backlog.window={WINDOW}",
    "backlog.row_length=1024",
    "generator.max_context=256",
    "generator.max_running=256",
)
ARMS: Mapping[str, tuple[str, ...]] = {
    "async": ("backlog.max_staleness=24",),
    "barrier": ("backlog.max_staleness=0",),
    "wide barrier": ("backlog.max_staleness=0", f"backlog.groups_per_step={WINDOW}"),
}


def delay(key: str) -> float:
    """The seconds that the environment of this session works."""
    share = drawn(key)
    if share < 0.4:
        return SHORT * share / 0.4
    if share < 0.9:
        return SHORT * (LONG / SHORT) ** ((share - 0.4) / 0.5)
    return LONG * (LONGEST / LONG) ** ((share - 0.9) / 0.1)


def turns(seconds: float) -> int:
    """The number of turns of a session whose environment works so long."""
    return 2 if seconds < SHORT else 3 if seconds < LONG else 6


async def episode(prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
    """Turns of the policy, and an environment that takes its time between them."""
    key = f"{prompt.id} {context.sample_index}"
    seconds, said = delay(key), list(prompt.messages)
    count = turns(seconds)
    for turn in range(count):
        answer = await context.chat.say(said, max_tokens=TOKENS, stop_token_ids=())
        if turn < count - 1:
            said += [answer, Message(role="user", content="?")]
            await asyncio.sleep(seconds / (count - 1))
    return context.chat.finish(float(drawn(f"reward {key}") < 0.5))


def numbers(runs: Sequence[Measured], alone: Sequence[float], batch_tokens: float) -> dict[str, Any]:
    """Medians, by arm, and the ratios. `alone`: seconds of a step's generation without training, of each round."""

    def speeds(arm: str) -> list[float]:
        return [run.tokens_per_second for run in runs if run.arm == arm]

    def over(arm: str) -> float:
        return statistics.median(ours / theirs for ours, theirs in zip(speeds("async"), speeds(arm), strict=True))

    utilization = [speed * seconds / batch_tokens for speed, seconds in zip(speeds("async"), alone, strict=True)]
    ages = [run.age_mean for run in runs if run.arm == "async"]
    return {
        "speedup_vs_barrier": over("barrier"),
        "speedup_vs_wide_barrier": over("wide barrier"),
        "utilization": statistics.median(utilization),
        "age_mean": statistics.median(ages),
        "tokens_per_second": {arm: statistics.median(speeds(arm)) for arm in ARMS},
    }


def sessions(facts: Sequence[LoggedEpisode]) -> dict[str, Any]:
    """How many sessions were trained, their shares by turns, as launched and as trained, and their staleness."""
    trained = [one for one in facts if one.step is not None]
    last = max(one.ticket for one in trained)
    launched = {f"{one.prompt_id} {sample}" for one in facts if one.ticket <= last for sample in range(GROUP_SIZE)}
    shares = {
        "launched": Counter(turns(delay(key)) for key in launched),
        "trained": Counter(one.turns for one in trained),
    }
    oldest = sorted(one.staleness[1] for one in trained if one.staleness is not None)
    return {
        "trained": len(trained),
        "shares": {name: {n: counts[n] / counts.total() for n in sorted(counts)} for name, counts in shares.items()},
        "staleness": {"median": oldest[len(oldest) // 2], "p95": oldest[len(oldest) * 95 // 100], "max": oldest[-1]},
    }


def main() -> None:
    """Measure, print, and write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/grpo/tiny.yaml")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value settings of every arm")
    arguments = parser.parse_args()
    machine = Machine.now()
    folder = Path(tempfile.mkdtemp(prefix="bench-agents-"))
    base = ["--config", arguments.config, "telemetry.progress=off", *SETTINGS]

    def config(*overrides: str) -> RunConfig:
        argv = [*base, *overrides, *arguments.overrides]
        return load(RunConfig, argv, prog="bench.agents", description="").config

    runs: list[Measured] = []
    alone: list[float] = []
    try:
        for number in range(arguments.rounds):
            place = folder / f"alone-{number}"
            settings = config(*ARMS["async"], f"steps={arguments.steps}")
            alone.append(measure_alone(settings, episode, place)[0])
            print(f"alone {alone[-1]:.3f} s a step", flush=True)
            for arm, settings in ARMS.items():
                few = f"steps={arguments.steps if arm == 'async' else max(12, arguments.steps // 8)}"
                place = folder / f"{arm}-{number}".replace(" ", "-")
                runs.append(measure_arm(config(*settings, few), "agents", episode, arm, place))
                print(f"{arm:12} {runs[-1].tokens_per_second:.0f} tokens/s", flush=True)
        lines = (folder / "async-0" / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        found = sessions(read_log(RunFolder(folder / "async-0", plain(config(*ARMS["async"])))).episodes)
    finally:
        shutil.rmtree(folder)
    tokens = statistics.fmean(step["step/tokens"] for step in steps)
    found = {**numbers(runs, alone, tokens), "sessions": found}
    print(json.dumps(found, indent=1))
    if arguments.json:
        record = {**found, "machine": machine.record(), "last_step": steps[-1]}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
