"""What the order of training does to the lengths that are trained, and what it costs in idle generation.

    python -m bench.distribution [--steps N] [--json FILE] [--plot FILE]

Drives the backlog itself (admission, ledger, order, batches) with real trajectories; only the generator and the trainer
are simulated, in virtual time. 40 % of the prompts have short answers, 50 % medium ones, and 10 % answers that are 20
times as long as the short ones, so that a long group is under way for some 18 steps. Training takes half the time of
generation: what generation waits for is the schedule. Every arm is given the very same prompts, and none has a last
step: the run is looked at after `--steps` steps, while its long groups are under way.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
import torch

from bench.chart import line_chart
from bench.report import options
from goaly.backlog.distribution import Distance
from goaly.backlog.events import Ticket
from goaly.backlog.group_queue import GroupQueue
from goaly.backlog.settings import BacklogSettings
from goaly.reward.settings import AdvantageSettings
from goaly.trajectory import Group, Outcome, Trajectory, Turn, token_data
from tests import virtual_time

PROMPT_TOKENS = 8
KINDS = {40: 0.4, 160: 0.5, 800: 0.1}
"""Tokens of an answer, give or take a fifth, and the share of the prompts that have such answers. Each kind lies in an
octave of its own, so the total variation by octave is that by kind."""
TOKEN_SECONDS = 0.01
STEPS_AT_ONCE = 4
"""Steps' worth of sequences that the generator decodes at once."""
SETTINGS = BacklogSettings(groups_per_step=16, group_size=2, max_staleness=8, row_length=1024)
DRAIN_STEPS = 40
"""Steps at the end that the results leave out: the lengths of their groups are not all known."""
ARMS = {
    "window 1 (strict FIFO)": replace(SETTINGS, window=1),
    "window 16": replace(SETTINGS, window=16),
    "window 64": replace(SETTINGS, window=64),
    "window 256": replace(SETTINGS, window=256),
    "completion": replace(SETTINGS, order="completion"),
    "completion, weighted": replace(SETTINGS, order="completion", length_correction="inverse_propensity"),
}


@dataclass
class Simulation:
    """A run of so many steps under one setting."""

    settings: BacklogSettings
    steps: int
    seed: int = 0
    metrics: list[dict[str, float]] = field(default_factory=list)
    busy_seconds: float = 0.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.final_counts: dict[str, int] = {}
        self.queue = GroupQueue(self.settings, AdvantageSettings(), dp_ranks=1, pad_token=0)
        self.slots = STEPS_AT_ONCE * self.settings.groups_per_step * self.settings.group_size
        mean_tokens = sum(tokens * share for tokens, share in KINDS.items())
        samples = self.settings.groups_per_step * self.settings.group_size
        self.train_seconds = samples * mean_tokens * TOKEN_SECONDS / self.slots / 2
        self.published: list[float] = []
        self._free = asyncio.Semaphore(self.slots)

    @property
    def idle_share(self) -> float:
        """The share of the generator's slots that nothing was decoded in."""
        return max(0.0, 1 - self.busy_seconds / (self.slots * self.seconds))

    def run(self) -> "Simulation":
        """Simulate it, to the last step."""
        virtual_time.run(self._run())
        return self

    async def _run(self) -> None:
        collecting = asyncio.create_task(self._collect())
        await self._train()
        self.seconds = asyncio.get_running_loop().time()
        collecting.cancel()
        await asyncio.wait([collecting])
        self.final_counts = self.queue.settle()

    async def _collect(self) -> None:
        async with asyncio.TaskGroup() as groups:
            while (ticket := await self.queue.admit()) is not None:
                groups.create_task(self._group(ticket))

    async def _train(self) -> None:
        for _ in range(self.steps):
            batch = await self.queue.next_batch()
            assert batch is not None
            await asyncio.sleep(self.train_seconds)
            self.queue.trained(batch.id, batch.id + 1)
            self.published.append(asyncio.get_running_loop().time())
            self.metrics.append(batch.metrics)

    async def _group(self, ticket: Ticket) -> None:
        random = Random(f"{self.seed}/{ticket.index}")
        tokens = random.choices(list(KINDS), list(KINDS.values()))[0]
        lengths = [round(tokens * random.uniform(0.8, 1.2)) for _ in range(self.settings.group_size)]
        async with asyncio.TaskGroup() as episodes:
            tasks = [episodes.create_task(self._sample(index, length)) for index, length in enumerate(lengths)]
        samples = tuple(task.result() for task in tasks)
        self.queue.report(Group(ticket=ticket.index, prompt_id=str(ticket.index), source=f"{tokens}", samples=samples))

    async def _sample(self, index: int, length: int) -> Trajectory:
        loop = asyncio.get_running_loop()
        async with self._free:
            began = loop.time()
            try:
                await asyncio.sleep(length * TOKEN_SECONDS)
            finally:
                self.busy_seconds += loop.time() - began
        times = began + TOKEN_SECONDS * np.arange(length)
        versions = np.searchsorted(self.published, times, side="right")  # weights are applied as they are published
        return trajectory(index, versions)


def trajectory(index: int, versions: np.ndarray) -> Trajectory:
    """Sample `index` of a group: a prompt, and a token by each of these policy versions. Every other one passes."""
    length = PROMPT_TOKENS + len(versions)
    written = torch.arange(length) >= PROMPT_TOKENS
    rewards = torch.zeros(length)
    rewards[-1] = float(index % 2)
    columns = {
        "tokens": torch.ones(length, dtype=torch.int64),
        "trained": written,
        "sampler_logprobs": torch.where(written, -0.5, 0.0),
        "sampler_versions": torch.cat([torch.full((PROMPT_TOKENS,), -1), torch.from_numpy(versions)]).int(),
        "rewards": rewards,
    }
    return Trajectory(
        tokens=token_data(columns),
        prompt_id="",
        sample_index=index,
        turns=(Turn(author="policy", start=PROMPT_TOKENS, stop=length),),
        environment="",
        outcome=Outcome.COMPLETE,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What one setting came to."""

    name: str
    over_run: Distance
    """Mean of the distances after each step; with weights where the arm has them."""
    at_end: Distance
    """Mean of those after each of the last steps, a fifth of all."""
    greatest_tv: float
    idle_share: float
    age_mean: float
    age_max: float
    max_age: int | None
    """The bound; None where there is none."""
    curve: list[Distance]
    """After each step."""


def measure(name: str, settings: BacklogSettings, steps: int, seed: int = 0) -> Arm:
    """Simulate this setting and say what it came to after so many steps."""
    simulation = Simulation(settings, steps + DRAIN_STEPS, seed).run()
    curve = [step.weighted or step.so_far for step in simulation.queue.known_steps[:steps]]
    assert len(curve) == steps, f"{name}: {len(curve)} steps are known"
    ages = simulation.metrics[:steps]
    return Arm(
        name=name,
        over_run=mean(curve),
        at_end=mean(curve[-(steps // 5) :]),
        greatest_tv=max(step.tv for step in curve),
        idle_share=simulation.idle_share,
        age_mean=fmean(step["age/mean"] for step in ages),
        age_max=max(step["age/max"] for step in ages),
        max_age=settings.max_age,
        curve=curve,
    )


def mean(distances: Sequence[Distance]) -> Distance:
    """The mean of each number."""
    return Distance(**{name: fmean(getattr(one, name) for one in distances) for name in asdict(distances[0])})


def table(arms: Sequence[Arm]) -> str:
    """The arms as lines of text."""
    lines = [
        "                                over the run        |         at the end",
        "arm                         TV  by kind  W1 tokens  |      TV  by kind  W1 tokens  |  greatest TV"
        "  generator idle  age mean  age max  bound",
    ]
    for arm in arms:
        bound = "none" if arm.max_age is None else str(arm.max_age)
        lines.append(
            f"{arm.name:22}  {_row(arm.over_run)}  |  {_row(arm.at_end)}  |  {arm.greatest_tv:11.3f}"
            f"  {arm.idle_share:14.1%}  {arm.age_mean:8.2f}  {arm.age_max:7.0f}  {bound:>5}"
        )
    return "\n".join(lines)


def record(arm: Arm) -> dict[str, Any]:
    """The arm as JSON has it: its curve as three lists, to six digits."""
    curve = {name: [float(f"{getattr(one, name):.6g}") for one in arm.curve] for name in asdict(arm.curve[0])}
    return {**asdict(arm), "curve": curve}


def _row(distance: Distance) -> str:
    return f"{distance.tv:6.4f}  {distance.octave_tv:7.4f}  {distance.w1:9.2f}"


def main() -> None:
    """Measure, print, and write what was asked for."""
    arguments = options(__doc__, "json", "plot", steps=300).parse_args()
    arms = [measure(name, settings, arguments.steps) for name, settings in ARMS.items()]
    print(table(arms))
    if arguments.json:
        arguments.json.write_text(json.dumps([record(arm) for arm in arms]) + "\n")
    if arguments.plot:
        chart = line_chart(
            # Strict FIFO is 0 throughout.
            {arm.name: [(step, one.w1) for step, one in enumerate(arm.curve, 1)] for arm in islice(arms, 1, None)},
            title="Distance between the lengths launched and trained so far",
            x_label="step",
            y_label="Wasserstein-1, tokens (of 176 on average)",
            floor=0.01,
        )
        arguments.plot.write_text(chart)


if __name__ == "__main__":
    main()
