"""One engine in virtual time: running sequences share it, and all get a token with each decode step.

The number of decode steps since the start, a real number, is the engine's own clock. A sequence that starts at step s
and has n tokens ends at step s + n, however the speed changes in between. So an event costs the logarithm of the number
of running sequences, and no event is made for a token.

    simulator-1: A sequence starts only while fewer than `generator.max_running` run, its weights are new enough for its
        ticket, and the key-value cache has room for its context. If the cache fills up while sequences grow, the one
        that started last is preempted, and computed again later, as vLLM does.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from goaly.generate.settings import GeneratorSettings
from goaly.simulator.clock import Clock
from goaly.simulator.profile import EngineTimes

ROOM_TOKENS = 16
"""Free tokens of the cache for each running sequence without which no other one starts: vLLM's smallest block."""
ROUNDING = 1e-6
"""Decode steps that a sum of real numbers may be off."""


class Sequence:
    """One answer that an engine samples."""

    __slots__ = ("context", "is_running", "left", "min_version", "number", "owner", "sampled", "started", "uncached")

    def __init__(self, owner: Any, *, context: int, uncached: int, tokens: int, min_version: int):
        """`context` is the number of tokens before the answer, of which `uncached` have to be computed."""
        self.owner = owner
        self.context = context
        self.uncached = uncached
        self.left = tokens
        self.min_version = min_version
        self.is_running = False
        self.number = 0
        """Its place in the order in which sequences came to the engine."""
        self.started = 0.0
        """The decode step at which it started."""
        self.sampled: list[tuple[int, float]] = []
        """Policy versions, and how many of its tokens each has sampled."""


class Engine:
    """A replica of the generator."""

    def __init__(
        self,
        clock: Clock,
        times: EngineTimes,
        settings: GeneratorSettings,
        *,
        pull_seconds: float,
        apply_seconds: float,
        speed: float,
        ended: Callable[[Sequence], None],
        busy_changed: Callable[[int], None],
        changed: "Callable[[Engine], None]",
    ):
        """`speed` is that of this engine as a share of the profile's. `ended` gets each sequence that is complete;
        `busy_changed` gets 1 when the engine has something to decode, and -1 when it has nothing any more.
        `changed` gets the engine when it has to be scheduled again."""
        self._clock = clock
        self._pull_seconds = pull_seconds
        self._apply_seconds = apply_seconds
        self._ended = ended
        self._busy_changed = busy_changed
        self._changed = changed
        most = settings.most_running
        self._step_seconds = [times.step_seconds(max(1, running)) / speed for running in range(most + 1)]
        self._most = most
        self._per_request = times.seconds_per_request / speed
        prefill = times.prefill_tokens_per_second
        self._per_prompt_token = 1 / (prefill * speed) if prefill else 0.0
        per_gib = times.kv_tokens_per_gib
        self._kv_tokens = None if per_gib is None else per_gib * settings.kv_cache_gib
        self._on_update = settings.on_update
        self.version = 0
        self._offered = 0
        self._is_pulling = False
        self._waits_for_drain: int | None = None
        self.slowdown = 1.0
        self._now = 0.0
        self._steps = 0.0
        """Decode steps until `_now`."""
        self._debt = 0.0
        """Seconds until it decodes again: prompts and weights are computed and copied meanwhile."""
        self._running: list[tuple[float, int, Sequence]] = []
        """By the decode step at which they end."""
        self._started_last: list[Sequence] = []
        self._waiting: list[tuple[int, Sequence]] = []
        self._too_new: list[tuple[int, int, Sequence]] = []
        """Sequences that wait for weights, by version."""
        self._count = 0
        self._is_busy = False
        self._numbers = self._starts = 0
        self._kv_offset = 0.0
        """Tokens in the cache, less `_steps` for each running sequence."""
        self._applied: list[tuple[float, int]] = [(0.0, 0)]
        """The decode step from which on each version decodes."""
        self._scheduled = 0
        self._needs_schedule = False
        self.busy_seconds = 0.0
        self.running_seconds = 0.0
        """The number of running sequences, integrated over time."""
        self.preempted = 0

    @property
    def running(self) -> int:
        """Sequences that it decodes."""
        return self._count

    @property
    def kv_tokens(self) -> float:
        """Tokens in its key-value cache."""
        return self._kv_offset + self._count * self._steps

    def advance(self) -> None:
        """Decode until now."""
        passed = self._clock.now - self._now
        if passed <= 0:
            return
        self._now = self._clock.now
        paid = min(self._debt, passed)
        self._debt -= paid
        if self._count:
            self.busy_seconds += passed
            self.running_seconds += passed * self._count
            self._steps += (passed - paid) / (self._step_seconds[self._count] * self.slowdown)

    def submit(self, sequence: Sequence) -> None:
        """Decode this sequence as soon as there is room."""
        self.advance()
        self._numbers += 1
        sequence.number = self._numbers
        if sequence.min_version > self.version:
            heappush(self._too_new, (sequence.min_version, sequence.number, sequence))
        else:
            heappush(self._waiting, (sequence.number, sequence))
            self._fill()

    def slow_down(self, factor: float) -> None:
        """Take so many times as long from now on."""
        self.advance()
        self.slowdown = factor
        self._change()

    def offer(self, version: int) -> None:
        """Pull and apply this version, unless a newer one comes before the pull begins."""
        self._offered = version
        if not self._is_pulling:
            self._pull()

    def _pull(self) -> None:
        self._is_pulling = True
        self._clock.after(self._pull_seconds, self._pulled, self._offered)

    def _pulled(self, version: int) -> None:
        self.advance()
        if self._on_update == "drain" and self._count:
            self._waits_for_drain = version
        else:
            self._apply(version)

    def _apply(self, version: int) -> None:
        self._waits_for_drain = None
        self._debt += self._apply_seconds
        if self._on_update == "recompute":
            self._debt += self.kv_tokens * self._per_prompt_token
        self.version = version
        self._applied.append((self._steps, version))
        while self._too_new and self._too_new[0][0] <= version:
            _, number, sequence = heappop(self._too_new)
            heappush(self._waiting, (number, sequence))
        self._is_pulling = False
        if self._offered > version:
            self._pull()
        self._fill()

    def _fill(self) -> None:
        """Start waiting sequences (simulator-1)."""
        self._change()
        if self._waits_for_drain is not None:
            return
        while self._waiting and self._count < self._most:
            sequence = self._waiting[0][1]
            if self._count and not self._has_room(sequence.context):
                break
            heappop(self._waiting)
            self._start(sequence)
        self._tell_busy()

    def _has_room(self, context: int) -> bool:
        if self._kv_tokens is None:
            return True
        return self.kv_tokens + context + ROOM_TOKENS * (self._count + 1) <= self._kv_tokens

    def _tell_busy(self) -> None:
        if self._is_busy != bool(self._count):
            self._is_busy = not self._is_busy
            self._busy_changed(1 if self._is_busy else -1)

    def _start(self, sequence: Sequence) -> None:
        self._debt += self._per_request + sequence.uncached * self._per_prompt_token
        self._count += 1
        self._kv_offset += sequence.context - self._steps
        sequence.started, sequence.is_running = self._steps, True
        self._starts += 1
        heappush(self._running, (self._steps + sequence.left, self._starts, sequence))
        if self._kv_tokens is not None:
            self._started_last.append(sequence)
            if len(self._started_last) > 4 * self._most:
                self._started_last = [one for one in self._started_last if one.is_running]

    def _stop(self, sequence: Sequence) -> None:
        """Take a sequence out, with the tokens that it has got."""
        self._count -= 1
        self._kv_offset -= sequence.context - sequence.started
        sequence.is_running = False
        end = self._steps
        for since, version in reversed(self._applied):
            if end > since:
                sequence.sampled.append((version, end - max(since, sequence.started)))
                end = since
            if since <= sequence.started:
                break

    def _change(self) -> None:
        if not self._needs_schedule:
            self._needs_schedule = True
            self._changed(self)

    def schedule(self) -> None:
        """Plan the next end of a sequence, or the next preemption."""
        self._needs_schedule = False
        self._scheduled += 1
        while self._running and not self._running[0][2].is_running:
            heappop(self._running)
        if not self._count:
            return
        steps = self._running[0][0] - self._steps
        if self._kv_tokens is not None and self._count > 1:
            steps = min(steps, (self._kv_tokens - self.kv_tokens) / self._count)
        seconds = self._debt + max(steps, 0.0) * self._step_seconds[self._count] * self.slowdown
        self._clock.at(self._clock.now + seconds, self._wake, self._scheduled)

    def _wake(self, scheduled: int) -> None:
        if scheduled != self._scheduled:
            return
        self.advance()
        self._change()
        ended = []
        limit = self._steps + ROUNDING
        while self._running and (self._running[0][0] <= limit or not self._running[0][2].is_running):
            end, _, sequence = heappop(self._running)
            if sequence.is_running and end == sequence.started + sequence.left:
                self._stop(sequence)
                ended.append(sequence)
        if not ended:
            self._preempt()
        if not self._count and self._waits_for_drain is not None:
            self._apply(self._waits_for_drain)
        for sequence in ended:
            self._ended(sequence)
        self._fill()

    def _preempt(self) -> None:
        """Take the sequence out that started last, if the cache is full; it waits before all others."""
        if self._kv_tokens is None or self._count < 2 or self.kv_tokens < self._kv_tokens - self._count * ROUNDING:
            return
        while not (sequence := self._started_last.pop()).is_running:
            pass
        self._stop(sequence)
        self.preempted += 1
        got = int(self._steps - sequence.started + ROUNDING)
        sequence.context += got
        sequence.left = max(1, sequence.left - got)
        sequence.uncached = sequence.context
        heappush(self._waiting, (sequence.number, sequence))
