"""How close forecasts come to real runs: predictions that are written before the runs that they are about.

    python -m bench.plan [--json FILE] [--runs FILE] [--only NAMES] [--minutes M] [key=value ...]

A few calibration runs, with loads, bounds and batches that no arm has, give the profiles
(`goaly.simulator.run_profile`): one of a single replica on a core of its own, one of two replicas that share both
cores with the trainer. Lengths and waits of an arm are stated, because they are its load and not a measurement. All
predictions are written into the `--runs` file first; then each arm runs once. A finished run is a line of that file
and is not repeated, and no prediction is made again once an arm has run.

Arms: answers of 40 tokens on average whose longest have 2, 5 or 20 times as many (`bench/tail.py`), at staleness bounds
of 0, 1, 2 and 8; batches of 4 to 16 groups; 1 and 2 replicas; agents whose environments take a second or more
(`AGENT`); a trainer that waits half a second before each step; a generator that decodes 8 sequences at most. Runs are
short, and so an arm's own chance is part of the error.

`median_error` and `worst_error` are those of seconds a step, as a share of the measured ones; `staleness_error` is the
greatest difference of the mean age in versions. `pairs_right` counts the pairs of arms in `PAIRS` of which the one that
the forecasts call faster is faster.
"""

import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from apps.grpo.main import train
from bench.loop import measure_arm, room_for
from bench.report import append, exit_on_terminate, finished, options, show, write
from bench.tail import EpisodeFunction, drawn, lengths, tail_episode
from goaly.base.config import RUN_CONFIG, load, to_yaml
from goaly.models.tiny_model import write_tiny_model
from goaly.plan.run_config import RunConfig
from goaly.prompts.prompt import Message, Prompt
from goaly.rollout.episode import EpisodeContext
from goaly.run.run import Run
from goaly.simulator.forecast import simulate
from goaly.simulator.profile import Distribution, EpisodesProfile, Profile, StatedEpisodes
from goaly.simulator.run_profile import profile_of_runs
from goaly.simulator.simulated_run import SimulatedRun
from goaly.trajectory import Trajectory

AGENT = "agent"
AGENT_TURNS, AGENT_TOKENS = 3, 24
SHORTEST_WAIT, LONGEST_WAIT = 0.5, 3.0
"""Seconds of an agent's environment between two turns."""
SLOW_SECONDS = 0.5
"""How long a slow trainer waits before each step."""
SHARED = ("generator.replicas=2", "hosts.bind={}")
"""Two replicas, which share the cores with the trainer."""
QUANTILES = 400
WARM_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run: an arm, or one that calibrates."""

    name: str
    load: str
    """A tail, or AGENT."""
    staleness: int
    groups: int = 8
    group_size: int = 8
    steps: int = 26
    is_shared: bool = False
    """Whether two replicas share the cores with the trainer."""
    is_slow: bool = False
    """Whether the trainer waits before each step."""
    max_running: int = 128

    @property
    def overrides(self) -> tuple[str, ...]:
        """Its settings."""
        return (
            f"steps={self.steps}",
            f"backlog.max_staleness={self.staleness}",
            f"backlog.groups_per_step={self.groups}",
            f"backlog.group_size={self.group_size}",
            f"backlog.window={self.groups}",
            f"generator.max_running={self.max_running}",
            *(SHARED if self.is_shared else ()),
        )


CALIBRATIONS = (
    Case(name="calibrate/1", load="10", staleness=4, groups=8, steps=40),
    Case(name="calibrate/2", load="10", staleness=0, groups=12),
    Case(name="calibrate/3", load="3", staleness=3, groups=14, steps=30),
    Case(name="calibrate/4", load="10", staleness=4, groups=8, steps=40, is_shared=True),
    Case(name="calibrate/5", load="10", staleness=0, groups=12, is_shared=True),
)


def tails() -> list[Case]:
    """The arms of each tail and bound."""
    steps = {0: 24, 1: 24, 2: 26, 8: 40}
    return [
        Case(name=f"tail {tail}, bound {bound}", load=tail, staleness=bound, steps=steps[bound])
        for tail in ("2", "5", "20")
        for bound in steps
    ]


ARMS = (
    *tails(),
    Case(name="4 groups, tail 5", load="5", staleness=2, groups=4),
    Case(name="16 groups, tail 5", load="5", staleness=2, groups=16),
    Case(name="4 groups, tail 20", load="20", staleness=1, groups=4),
    Case(name="16 groups, tail 20", load="20", staleness=1, groups=16),
    Case(name="2 replicas, tail 2, bound 0", load="2", staleness=0, is_shared=True),
    Case(name="2 replicas, tail 5, bound 2", load="5", staleness=2, is_shared=True),
    Case(name="2 replicas, tail 20, bound 8", load="20", staleness=8, steps=40, is_shared=True),
    Case(name="agent, bound 0", load=AGENT, staleness=0, groups=4, group_size=4, steps=12),
    Case(name="agent, bound 2", load=AGENT, staleness=2, groups=4, group_size=4, steps=20),
    Case(name="agent, bound 8", load=AGENT, staleness=8, groups=4, group_size=4, steps=40),
    Case(name="slow trainer, tail 5", load="5", staleness=2, is_slow=True),
    Case(name="slow trainer, tail 20", load="20", staleness=8, steps=34, is_slow=True),
    Case(name="narrow generator, tail 5", load="5", staleness=2, steps=20, max_running=8),
    Case(name="narrow generator, tail 20", load="20", staleness=1, steps=16, max_running=8),
)

PAIRS = (
    *((f"tail {tail}, bound 0", f"tail {tail}, bound 1") for tail in ("2", "5", "20")),
    *((f"tail {tail}, bound 1", f"tail {tail}, bound 8") for tail in ("2", "5", "20")),
    ("tail 2, bound 0", "2 replicas, tail 2, bound 0"),
    ("tail 5, bound 2", "2 replicas, tail 5, bound 2"),
    ("tail 20, bound 8", "2 replicas, tail 20, bound 8"),
    ("agent, bound 0", "agent, bound 2"),
    ("agent, bound 2", "agent, bound 8"),
    ("tail 5, bound 2", "narrow generator, tail 5"),
)
"""Pairs that a user would choose between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A line of the file: a prediction, or a finished run."""

    kind: str
    """`calibration`, `prediction` or `run`"""
    name: str
    at: float
    """Seconds since 1970, when it was written."""
    step_seconds: float
    staleness: float
    low: float = 0.0
    high: float = 0.0
    """The interval of a prediction's seconds a step."""
    profile: str = ""
    """The runs that a prediction's profile is from."""
    machine: dict[str, Any] = field(default_factory=dict)


def episode_of(load_name: str) -> EpisodeFunction:
    """The episode of a load."""
    return agent_episode if load_name == AGENT else tail_episode(float(load_name))


async def agent_episode(prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
    """Turns of equally many tokens, between which an environment works."""
    key, said = f"{prompt.id} {context.sample_index}", list(prompt.messages)
    for turn in range(AGENT_TURNS):
        answer = await context.chat.say(said, max_tokens=AGENT_TOKENS, stop_token_ids=())
        if turn < AGENT_TURNS - 1:
            said += [answer, Message(role="user", content="?")]
            await asyncio.sleep(wait(drawn(f"{key} {turn}")))
    return context.chat.finish(float(drawn(f"reward {key}") < 0.5))


def wait(chance: float) -> float:
    """The seconds that an environment works in this share of cases or for less."""
    return SHORTEST_WAIT * (LONGEST_WAIT / SHORTEST_WAIT) ** chance


def stated(load_name: str, prompt_tokens: float) -> EpisodesProfile:
    """The lengths and waits of a load, with prompts as long as those of the calibration."""
    prompt = Distribution(mean=prompt_tokens)
    if load_name != AGENT:
        answers = Distribution(samples=tuple(float(one) for one in lengths(float(load_name), QUANTILES)))
        return EpisodesProfile(stated=StatedEpisodes(prompt_tokens=prompt, answer_tokens=answers))
    waits = Distribution(samples=tuple(wait((place + 0.5) / QUANTILES) for place in range(QUANTILES)))
    return EpisodesProfile(
        stated=StatedEpisodes(
            turns=Distribution(mean=AGENT_TURNS),
            prompt_tokens=prompt,
            observation_tokens=Distribution(mean=8.0),
            answer_tokens=Distribution(mean=AGENT_TOKENS),
            environment_seconds=waits,
        )
    )


def predicted(case: Case, config: RunConfig, profile: Profile) -> Record:
    """The prediction of an arm."""
    measured = [one for group in profile.episodes.groups for one in group]
    prompts = statistics.fmean(one.prompt_tokens[0] for one in measured)
    loop = profile.loop
    if case.is_slow:
        loop = replace(loop, batch_seconds=loop.batch_seconds + SLOW_SECONDS)
    forecast = simulate(replace(profile, episodes=stated(case.load, prompts), loop=loop), SimulatedRun.of(config))
    return Record(
        kind="prediction",
        name=case.name,
        at=time.time(),
        step_seconds=forecast.step_seconds.mean,
        staleness=forecast.staleness_mean.mean,
        low=forecast.step_seconds.low,
        high=forecast.step_seconds.high,
        profile=profile.source,
    )


def measured(case: Case, config: RunConfig, place: Path, kind: str) -> Record:
    """One real run of a case."""

    async def slow(run: Run) -> None:
        step = run.trainer.step

        async def slow_step(batch: Any) -> dict[str, float]:
            await asyncio.sleep(SLOW_SECONDS)
            return await step(batch)

        run.trainer.step = slow_step  # pyrefly: ignore[bad-assignment]
        await train(run)

    found = measure_arm(
        config, case.load, episode_of(case.load), case.name, place, train_loop=slow if case.is_slow else train
    )
    (place / RUN_CONFIG).write_text(to_yaml(config))
    return Record(
        kind=kind,
        name=case.name,
        at=time.time(),
        step_seconds=found.step_seconds,
        staleness=found.age_mean,
        machine=found.machine,
    )


def numbers(records: Sequence[Record]) -> dict[str, Any]:
    """The errors of all arms that have run."""
    predictions = {one.name: one for one in records if one.kind == "prediction"}
    runs = {one.name: one for one in records if one.kind == "run"}
    arms = {
        name: {
            "predicted": predictions[name].step_seconds,
            "interval": [predictions[name].low, predictions[name].high],
            "measured": run.step_seconds,
            "error": abs(predictions[name].step_seconds / run.step_seconds - 1),
            "predicted_staleness": predictions[name].staleness,
            "measured_staleness": run.staleness,
            "busy_cores": run.machine.get("busy_cores"),
        }
        for name, run in runs.items()
    }
    errors = [arm["error"] for arm in arms.values()]
    pairs = {
        f"{one} / {other}": _is_right(one, other, predictions, runs) for one, other in PAIRS if {one, other} <= {*runs}
    }
    return {
        "runs": len(arms),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "staleness_error": max(abs(one["predicted_staleness"] - one["measured_staleness"]) for one in arms.values()),
        "in_interval": sum(one["interval"][0] <= one["measured"] <= one["interval"][1] for one in arms.values()),
        "pairs": len(pairs),
        "pairs_right": sum(pairs.values()),
        "arms": arms,
        "pairs_by_name": pairs,
    }


def _is_right(one: str, other: str, predictions: Mapping[str, Record], runs: Mapping[str, Record]) -> bool:
    called, was = (found[one].step_seconds < found[other].step_seconds for found in (predictions, runs))
    return called == was


def main() -> None:
    """Calibrate, predict, run, and compare."""
    exit_on_terminate()
    parser = options(
        __doc__, "json", config="configs/grpo/tiny.yaml", runs=Path("docs/results/plan.jsonl"), minutes=600.0, only=""
    )
    parser.add_argument("--model", type=Path, help="a Hugging Face folder in place of a tiny model with random weights")
    parser.add_argument("overrides", nargs="*", help="key=value settings of every run")
    arguments = parser.parse_args()
    ends = time.monotonic() + 60 * arguments.minutes
    folder = Path(tempfile.mkdtemp(prefix="bench-plan-"))
    model = arguments.model or write_tiny_model(folder / "model")
    arms = [one for one in ARMS if not arguments.only or one.name in arguments.only.split(";")]

    def config(case: Case) -> RunConfig:
        room = room_for("5" if case.load == AGENT else case.load, model, folder)
        argv = ["--config", arguments.config, "telemetry.progress=off", *case.overrides]
        argv += [f"model.path={model}"] * (not any(one.startswith("model.path") for one in room)) + [*room]
        return load(RunConfig, [*argv, *arguments.overrides], prog="bench.plan", description="").config

    try:
        records = finished(arguments.runs, Record)
        known = {(one.kind, one.name) for one in records}
        if not any(kind == "run" for kind, _ in known):
            waiting = [case for case in arms if ("prediction", case.name) not in known]
            folders: dict[bool, list[Path]] = {False: [], True: []}
            for case in CALIBRATIONS if waiting else ():
                place = folder / case.name.replace("/", "-")
                append(arguments.runs, measured(case, config(case), place, "calibration"))
                folders[case.is_shared].append(place)
            profiles = {is_shared: profile_of_runs(places) for is_shared, places in folders.items() if places}
            for case in waiting:
                append(arguments.runs, predicted(case, config(case), profiles[case.is_shared]))
        for case in arms:
            if ("run", case.name) in known or time.monotonic() > ends:
                continue
            place = folder / case.name.replace(" ", "-").replace(",", "")
            record = measured(case, config(case), place, "run")
            append(arguments.runs, record)
            print(f"{case.name:32s} {record.step_seconds:.3f} s a step, age {record.staleness:.2f}", flush=True)
            shutil.rmtree(place)
    finally:
        shutil.rmtree(folder)
    records = finished(arguments.runs, Record)
    if not any(one.kind == "run" for one in records):
        return
    found = numbers(records)
    show({key: value for key, value in found.items() if not isinstance(value, dict)})
    write(arguments.json, {**found, "records": [asdict(one) for one in records]})


if __name__ == "__main__":
    main()
