"""Agents whose environments are slow now and then: a thousand sessions at once on the real loop.

    python -m bench.agents [--model FOLDER] [--tokens N] [--steps N] [--rounds N] [--arms NAMES] [--runs FILE]
                           [--json FILE] [key=value ...]

A session has 2 to 6 turns of `--tokens` tokens. Between them its environment works: in 40 % of the sessions for less
than 30 ms in all, in 10 % for more than 0.6 s, and for 12 s at most. That is agentic work, a thousand times faster.
Sessions that take longer have more turns. Delays are drawn from the prompt, so every arm has the same.

The policy is random and so small that generation is the longer half of a step, as it is in such runs: 80 to 90 % of
their time, their authors report. `seconds_a_step` has both halves alone: if training were the longer one, generation
would have to wait for it, whatever the loop does. `--model` is another policy. Arms, on the same cores:

    alone         generation without training
    async         generation runs ahead, by a window that holds a thousand sessions
    barrier       each batch is sampled, then trained, then the next: `backlog.max_staleness=0`
    wide barrier  the same with a thousand sessions in a batch: rarer updates, for the same number of sessions

`speedup_vs_barrier` is async / barrier in trained tokens per second, of the medians over the rounds; `utilization` is
async's tokens per second over those of generation alone, the median over the rounds. The arms with a barrier take
minutes, and run in the first round only. `sessions` compares the first round's trained sessions of async with all that
were launched up to the last one of them, by their number of turns: a run that left slow ones out would train shorter
ones. Their `staleness` is that of their oldest token.

A run must be long against the longest session: the first window waits for its slowest sessions, whatever the cores can
do. Staleness is at most 32 steps, beside the window: with 24, finished groups that wait behind a slow one take so many
of the tickets that fewer than a thousand sessions run. `running` is the median number of sessions under way.

Every finished run is a line of the `--runs` file, and is not repeated; `--arms` names the arms to measure now.
"""

import asyncio
import json
import shutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.loop import measure_alone, measure_arm, with_context
from bench.report import Machine, append, finished, options, write
from bench.tail import EpisodeFunction, drawn
from goaly.base.config import load
from goaly.base.config.schema import plain
from goaly.journal.logged_episodes import LoggedEpisode, read_log
from goaly.journal.run_folder import RunFolder
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.plan.run_config import RunConfig
from goaly.prompts.prompt import Message, Prompt
from goaly.rollout.episode import EpisodeContext
from goaly.trajectory import Trajectory

SHORT, LONG, LONGEST = 0.03, 0.6, 12.0
"""Seconds of an environment's work: the bounds of the profile."""
SESSIONS = 1_000
GROUP_SIZE, GROUPS_PER_STEP = 8, 16
WINDOW = SESSIONS // GROUP_SIZE
SETTINGS = (
    f"backlog.group_size={GROUP_SIZE}",
    f"backlog.groups_per_step={GROUPS_PER_STEP}",
    f"backlog.window={WINDOW}",
    "generator.max_running=256",
    "generator.kv_cache_gib=1.0",
)
MODEL = TinyModel(dim=32, layers=1, heads=1, kv_heads=1, hidden_dim=64)
MOST_TURNS = 6
BESIDE_ANSWERS = 16
"""More tokens than a turn has beside its answer."""
BARRIER_STEPS = 12
ALONE, ASYNC = "alone", "async"
ARMS: Mapping[str, tuple[str, ...]] = {
    ASYNC: ("backlog.max_staleness=32",),
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
    return 2 if seconds < SHORT else 3 if seconds < LONG else MOST_TURNS


def session(tokens: int) -> EpisodeFunction:
    """An episode of turns with this many tokens of the policy, and an environment that takes its time between them."""

    async def episode(prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
        key = f"{prompt.id} {context.sample_index}"
        seconds, said = delay(key), list(prompt.messages)
        count = turns(seconds)
        for turn in range(count):
            answer = await context.chat.say(said, max_tokens=tokens, stop_token_ids=())
            if turn < count - 1:
                said += [answer, Message(role="user", content="?")]
                await asyncio.sleep(seconds / (count - 1))
        return context.chat.finish(float(drawn(f"reward {key}") < 0.5))

    return episode


def settings(tokens: int, model: Path, folder: Path) -> list[str]:
    """The settings of every arm, with a copy of the model if its context is too short for turns of this many tokens."""
    room = max(256, MOST_TURNS * (tokens + BESIDE_ANSWERS))
    path = with_context(room, model, folder)
    return [*SETTINGS, f"generator.max_context={room}", f"backlog.row_length={max(1024, room)}", f"model.path={path}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One run of an arm."""

    round: int
    arm: str
    step_seconds: float
    machine: dict[str, Any]
    train_seconds: float = 0.0
    tokens_per_second: float = 0.0
    step_tokens: float = 0.0
    age_mean: float = 0.0
    running: float = 0.0
    sessions: dict[str, Any] = field(default_factory=dict)
    last_step: dict[str, float] = field(default_factory=dict)


def schedule(rounds: int) -> Iterator[tuple[int, str]]:
    """The runs of N rounds, by round and arm."""
    for number in range(rounds):
        yield from ((number, ALONE), (number, ASYNC))
    yield from ((0, arm) for arm in ARMS if arm != ASYNC)


def numbers(runs: Sequence[Finished]) -> dict[str, Any]:
    """Medians, by arm, and the ratios."""
    speeds = {arm: [run.tokens_per_second for run in runs if run.arm == arm] for arm in ARMS}
    medians = {arm: statistics.median(found) for arm, found in speeds.items()}
    alone = {run.round: run.step_seconds for run in runs if run.arm == ALONE}
    of_async = [run for run in runs if run.arm == ASYNC]
    training = statistics.median(run.train_seconds for run in runs if run.arm == ALONE)
    utilization = [run.tokens_per_second * alone[run.round] / run.step_tokens for run in of_async]
    return {
        "speedup_vs_barrier": medians[ASYNC] / medians["barrier"],
        "speedup_vs_wide_barrier": medians[ASYNC] / medians["wide barrier"],
        "utilization": statistics.median(utilization),
        "utilization_by_round": utilization,
        "seconds_a_step": {
            "generation alone": statistics.median(alone.values()),
            "training alone": training,
            ASYNC: statistics.median(run.step_seconds for run in of_async),
        },
        "age_mean": statistics.median(run.age_mean for run in of_async),
        "running": statistics.median(run.running for run in of_async),
        "tokens_per_second": medians,
        "sessions": of_async[0].sessions,
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


def measure(config: RunConfig, tokens: int, number: int, arm: str, place: Path) -> Finished:
    """One run of an arm, with these settings and turns of this many tokens, in this folder."""
    machine = Machine.now()
    if arm == ALONE:
        seconds, training = measure_alone(config, session(tokens), place)
        then = machine.record()
        return Finished(round=number, arm=arm, step_seconds=seconds, train_seconds=training, machine=then)
    found = measure_arm(config, "agents", session(tokens), arm, place)
    steps = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return Finished(
        round=number,
        arm=arm,
        step_seconds=found.step_seconds,
        machine=machine.record(),
        tokens_per_second=found.tokens_per_second,
        step_tokens=statistics.fmean(step["step/tokens"] for step in steps),
        age_mean=found.age_mean,
        running=GROUP_SIZE * statistics.median(step["backlog/running"] for step in steps),
        sessions=sessions(read_log(RunFolder(place, plain(config))).episodes) if arm == ASYNC else {},
        last_step=steps[-1],
    )


def main() -> None:
    """Measure, print, and write the numbers where asked."""
    parser = options(__doc__, "json", config="configs/grpo/tiny.yaml", tokens=64, steps=120, rounds=3)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--arms", default=",".join((ALONE, *ARMS)))
    parser.add_argument("--runs", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value settings of every arm")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-agents-"))
    file = arguments.runs or folder / "runs.jsonl"
    model = arguments.model or write_tiny_model(folder / "model", MODEL)
    of_all = settings(arguments.tokens, model, folder)

    def config(arm: str) -> RunConfig:
        steps = arguments.steps if arm in (ALONE, ASYNC) else BARRIER_STEPS
        argv = ["--config", arguments.config, "telemetry.progress=off", *of_all, *ARMS[ASYNC if arm == ALONE else arm]]
        return load(
            RunConfig, [*argv, f"steps={steps}", *arguments.overrides], prog="bench.agents", description=""
        ).config

    try:
        known = {(run.round, run.arm) for run in finished(file, Finished)}
        for number, arm in schedule(arguments.rounds):
            if (number, arm) in known or arm not in arguments.arms.split(","):
                continue
            run = measure(config(arm), arguments.tokens, number, arm, folder / f"{arm}-{number}".replace(" ", "-"))
            append(file, run)
            print(f"{arm:12} {run.step_seconds:.3f} s a step, {run.tokens_per_second:.0f} tokens/s", flush=True)
        runs = finished(file, Finished)
    finally:
        shutil.rmtree(folder)
    if {run.arm for run in runs} < {ALONE, *ARMS}:
        return
    found = numbers(runs)
    print(json.dumps(found, indent=1))
    of_async = [run for run in runs if run.arm == ASYNC]
    facts = {"turn_tokens": arguments.tokens, "machine": of_async[0].machine, "last_step": of_async[0].last_step}
    record = {**found, **facts}
    write(arguments.json, record)


if __name__ == "__main__":
    main()
