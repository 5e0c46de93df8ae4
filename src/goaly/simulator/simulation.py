"""One simulated run: the collecting and the training loop in virtual time, over the real schedule.

Tickets start groups on the least busy worker; its places bound the episodes that run at once. An episode asks an
engine for each answer, waits for its environment between them, and for its verifier at the end. The training loop forms
a batch as soon as the schedule has one, trains it, copies the weights and offers them to the engines.

    simulator-2: Two simulations of the same profile, run and seed are equal.
"""

import statistics
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

from goaly.generate.replica_choice import least_loaded
from goaly.simulator.clock import Clock
from goaly.simulator.engine import Engine, Sequence
from goaly.simulator.episode_draws import DrawnEpisode, EpisodeDraws
from goaly.simulator.profile import Profile
from goaly.simulator.schedule import FinishedGroup, FormedBatch, Schedule
from goaly.simulator.simulated_run import SimulatedRun
from goaly.simulator.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """The state of the run when a step has ended; seconds are since the start."""

    at: float
    tokens: int
    ages: Counter[int]
    queued: int
    trainer_seconds: float
    """Seconds in which the trainer has trained and copied weights."""
    engine_seconds: float
    """Seconds in which engines have decoded, the mean of all."""
    running_seconds: float
    """Sequences that run in all engines, integrated over time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The speeds of parts, as multiples of those of the profile."""

    trainer: float = 1.0
    generator: float = 1.0
    episodes: float = 1.0
    updates: float = 1.0


@dataclass(slots=True, eq=False, kw_only=True)
class _Group(FinishedGroup):
    """A group under way."""

    worker: "_Worker"
    left: int
    """Episodes that have not ended."""
    min_version: int
    engine: int | None = None
    """The engine that its requests go to."""
    prompt_version: int | None = None
    """The version under which its engine has computed the prompt."""


class _Episode:
    __slots__ = ("context", "drawn", "group", "turn", "version")

    def __init__(self, drawn: DrawnEpisode, group: _Group):
        self.drawn = drawn
        self.group = group
        self.turn = 0
        self.context = 0
        """Tokens before the next answer, without those that are new."""
        self.version = 0
        """The version of the engine at its last answer."""


class _Worker:
    """A rollout worker: places for episodes, and a router of its own."""

    __slots__ = ("groups", "loads", "places", "turn", "waiting")

    def __init__(self, places: int, engines: int, first: int):
        self.places = places
        self.waiting: deque[_Episode] = deque()
        self.groups = 0
        self.loads = [0] * engines
        self.turn = first

    def choose(self) -> int:
        """The engine of a group that has none."""
        engine = least_loaded(self.loads, self.turn)
        self.turn = engine + 1
        return engine


class Simulation:
    """A run of one seed."""

    def __init__(self, profile: Profile, run: SimulatedRun, seed: int, speeds: Speeds | None = None):
        speeds = speeds or Speeds()
        self._profile, self._run = profile, run
        self._slower = 1 / speeds.episodes
        self._stage_seconds = profile.updates.stage_seconds / speeds.updates
        self._loop_seconds = profile.loop.step_seconds / speeds.updates
        self._random = np.random.default_rng(seed)
        times = profile.engine_at(run.generator)
        self._clock = Clock()
        self._draws = EpisodeDraws(profile.episodes, run.backlog.group_size, self._random)
        self._schedule = Schedule(run)
        self._changed: list[Engine] = []
        speed = self._drawn_speed(times.uncertainty) * speeds.generator
        self._engines = [
            Engine(
                self._clock,
                times,
                run.generator,
                pull_seconds=profile.updates.pull_seconds / speeds.updates,
                apply_seconds=profile.updates.apply_seconds / speeds.updates,
                speed=speed,
                ended=self._answered,
                busy_changed=self._engine_busy,
                changed=self._changed.append,
            )
            for _ in range(run.generator.replicas)
        ]
        training = profile.training_at(run.trainer)
        self._trainer = Trainer(
            self._clock,
            training,
            self._random,
            speed=self._drawn_speed(training.uncertainty) * speeds.trainer,
            slowdown=profile.loop.trainer_slowdown,
            ended=self._trained,
        )
        rollout = run.rollout
        self._workers = [
            _Worker(rollout.most_episodes, len(self._engines), number % len(self._engines))
            for number in range(rollout.workers)
        ]
        self._cached_turns = run.generator.prefix_caching
        self._keeps = run.generator.on_update == "keep"
        self._batch: FormedBatch | None = None
        self._wants_batch = True
        self._busy_engines = 0
        self._staging_seconds = 0.0
        self.states: list[SimulatedStep] = []

    def run(self) -> list[SimulatedStep]:
        """Simulate all steps; the state at the start and after each of them."""
        self._note()
        self._admit()
        self._between()
        self._clock.run(lambda: len(self.states) <= self._run.steps, self._between)
        return self.states

    @property
    def preempted(self) -> int:
        """How often an engine's cache was full."""
        return sum(engine.preempted for engine in self._engines)

    def _drawn_speed(self, uncertainty: float) -> float:
        """A speed that the profile leaves possible, as a share of its own."""
        return max(0.05, 1 + float(self._random.standard_normal()) * uncertainty)

    def _between(self) -> None:
        while self._changed:
            self._changed.pop().schedule()

    # collecting

    def _admit(self) -> None:
        while (ticket := self._schedule.admit()) is not None:
            drawn = self._draws.group()
            worker = min(self._workers, key=lambda one: one.groups)
            worker.groups += 1
            oldest = self._schedule.min_versions[ticket]
            group = _Group(ticket=ticket, worker=worker, left=len(drawn), min_version=oldest)
            episodes = [_Episode(one, group) for one in drawn]
            self._clock.after(self._profile.loop.ticket_seconds, self._start_group, episodes)

    def _start_group(self, episodes: list[_Episode]) -> None:
        worker = episodes[0].group.worker
        worker.waiting.extend(episodes)
        self._start_waiting(worker)

    def _start_waiting(self, worker: _Worker) -> None:
        while worker.places and worker.waiting:
            worker.places -= 1
            episode = worker.waiting.popleft()
            self._clock.after(episode.drawn.overhead_seconds * self._slower, self._ask, episode)

    def _ask(self, episode: _Episode) -> None:
        """Ask the group's engine for the episode's next answer."""
        group = episode.group
        if group.engine is None:
            group.engine = group.worker.choose()
        engine = self._engines[group.engine]
        group.worker.loads[group.engine] += 1
        turn = episode.drawn.turns[episode.turn]
        held, uncached = episode.context + turn.prompt_tokens, turn.prompt_tokens
        if not self._cached_turns:
            uncached = held
        elif episode.turn == 0:
            if group.prompt_version is not None and (self._keeps or group.prompt_version == engine.version):
                held = uncached = 0  # shared with the samples before it
            group.prompt_version = engine.version
        elif not self._keeps and episode.version != engine.version:
            uncached = held
        answer = Sequence(
            episode, context=held, uncached=uncached, tokens=turn.answer_tokens, min_version=group.min_version
        )
        engine.submit(answer)

    def _answered(self, answer: Sequence) -> None:
        episode: _Episode = answer.owner
        group, turn = episode.group, episode.drawn.turns[episode.turn]
        assert group.engine is not None
        group.worker.loads[group.engine] -= 1
        for version, tokens in answer.sampled:
            group.tokens_by_version[version] += tokens
        episode.turn += 1
        episode.context += turn.prompt_tokens + turn.answer_tokens
        episode.version = self._engines[group.engine].version
        is_last = episode.turn == len(episode.drawn.turns)
        after = self._judge if is_last else self._ask
        seconds = turn.environment_seconds * self._slower + self._profile.loop.answer_seconds
        self._clock.after(seconds, after, episode)

    def _judge(self, episode: _Episode) -> None:
        self._clock.after(episode.drawn.verifier_seconds * self._slower, self._end_episode, episode)

    def _end_episode(self, episode: _Episode) -> None:
        group = episode.group
        worker = group.worker
        worker.places += 1
        self._start_waiting(worker)
        group.lengths.append(episode.drawn.tokens)
        group.left -= 1
        if group.left == 0:
            worker.groups -= 1
            self._clock.after(self._profile.loop.group_seconds, self._end_group, group)

    def _end_group(self, group: _Group) -> None:
        if self._run.backlog.dynamic_sampling and not self._draws.has_signal():
            self._schedule.reject(group.ticket)
            self._admit()
        else:
            self._schedule.finish(group)
        self._next_batch()

    # training

    def _next_batch(self) -> None:
        if self._wants_batch and (batch := self._schedule.form()) is not None:
            self._wants_batch = False
            self._batch = batch
            self._clock.after(self._profile.loop.batch_seconds, self._train, batch.rank_tokens)

    def _train(self, rank_tokens: int) -> None:
        self._slow_engines(self._profile.loop.engine_slowdown)
        self._trainer.step(rank_tokens)

    def _slow_engines(self, factor: float) -> None:
        for engine in self._engines:
            if engine.slowdown != factor:
                engine.slow_down(factor)

    def _engine_busy(self, change: int) -> None:
        self._busy_engines += change
        self._trainer.load(self._busy_engines / len(self._engines))

    def _trained(self) -> None:
        self._slow_engines(1.0)
        self._staging_seconds += self._stage_seconds
        self._clock.after(self._stage_seconds, self._staged)

    def _staged(self, _: object) -> None:
        self._schedule.trained()
        for engine in self._engines:
            engine.offer(self._schedule.policy_version)
        self._admit()
        self._clock.after(self._loop_seconds, self._report)

    def _report(self, _: object) -> None:
        self._note()
        self._wants_batch = True
        self._next_batch()

    def _note(self) -> None:
        """Note the state after a step, or at the start."""
        batch = self._batch
        for engine in self._engines:
            engine.advance()
        state = SimulatedStep(
            at=self._clock.now,
            tokens=0 if batch is None else batch.tokens,
            ages=Counter() if batch is None else batch.ages,
            queued=0 if batch is None else batch.queued,
            trainer_seconds=self._trainer.busy_seconds + self._staging_seconds,
            engine_seconds=statistics.fmean(engine.busy_seconds for engine in self._engines),
            running_seconds=sum(engine.running_seconds for engine in self._engines),
        )
        self.states.append(state)
