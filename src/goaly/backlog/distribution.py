"""The distance between trained and launched lengths, and weights that correct it. Pure.

Let G be `groups_per_step`. *Launched* up to step k are the first k * G tickets, in order of admission, that were not
dropped: the groups that k steps of strict FIFO would have trained. *Trained* up to step k are the groups of the first k
batches. Both hold k * G groups, so their length histograms compare directly, without estimates and without censoring:
the distances of step k are known once all its launched groups have finished. While a long group runs, no step becomes
known; when it ends, many do at once.

A length is the number of a sample's trained tokens. There are `BINS_PER_OCTAVE` bins for each doubling of the length.

In windowed FIFO the total variation after k steps is at most (window - 1) / (k * G) (proof: `docs/schedule.md`); in
strict FIFO every distance is exactly 0. Memory grows with the groups and steps since the oldest running ticket, and by
nine numbers for each known step. The weights of a batch have a mean of 1, and are exactly 1 if no correction applies.
Each step's distances are computed once and reported once, also when many steps become known together.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from goaly.backlog.settings import BacklogSettings

BINS_PER_OCTAVE = 4

Histogram = NDArray[np.float64]
Bins = NDArray[np.int64]
"""The length bin of each sample of a group."""


def length_bins(lengths: Sequence[int]) -> Bins:
    """The bin of each length; a length of 0 counts as 1."""
    return np.floor(BINS_PER_OCTAVE * np.log2(np.maximum(lengths, 1))).astype(np.int64)


def bin_count(longest: int) -> int:
    """The number of bins for lengths up to this one."""
    return int(length_bins([longest])[0]) + 1


def total_variation(first: Histogram, second: Histogram) -> float:
    """Total variation: half the summed absolute difference of the two distributions."""
    return float(np.abs(first / first.sum() - second / second.sum()).sum() / 2)


def wasserstein(first: Histogram, second: Histogram) -> float:
    """The Wasserstein-1 distance in tokens; each bin counts as its geometric middle."""
    middles = 2 ** ((np.arange(len(first)) + 0.5) / BINS_PER_OCTAVE)
    cumulative = np.cumsum(first / first.sum() - second / second.sum())
    return float(np.abs(cumulative[:-1]) @ np.diff(middles))


def inverse_propensity(launched: Histogram, trained: Histogram, bins: Bins, most: float) -> NDArray[np.float64]:
    """A weight for each group of a batch that corrects the trained distribution towards the launched one.

    `launched` and `trained` count groups by bin, `trained` with the weights they were trained with; `bins` are those of
    the batch's groups. The propensity of a bin is its share of the trained groups, this batch included, over its share
    of the launched ones; 1 if no launched group of the bin is known yet. A weight is the inverse propensity, between
    1 / `most` and `most`, scaled to a mean of 1.
    """
    with_batch = trained + np.bincount(bins, minlength=len(trained))
    if not launched.any():
        return np.ones(len(bins))
    wanted = (launched / launched.sum())[bins]
    got = (with_batch / with_batch.sum())[bins]
    weights = np.clip(np.where(wanted > 0, wanted / got, 1.0), 1 / most, most)
    return weights / weights.mean()


@dataclass(frozen=True, slots=True)
class Distance:
    """The distances between two histograms of lengths."""

    w1: float
    """Wasserstein-1, in tokens."""
    tv: float
    """Total variation."""
    octave_tv: float
    """Total variation between octaves, the resolution of the weights."""


def distance(first: Histogram, second: Histogram) -> Distance:
    """The distances between these histograms."""
    octaves = range(0, len(first), BINS_PER_OCTAVE)
    return Distance(
        w1=wasserstein(first, second),
        tv=total_variation(first, second),
        octave_tv=total_variation(np.add.reduceat(first, octaves), np.add.reduceat(second, octaves)),
    )


@dataclass(frozen=True, slots=True)
class KnownStep:
    """The distances between trained and launched lengths, up to one step and in this step."""

    so_far: Distance
    """Of all batches up to this one."""
    alone: Distance
    """Of this batch, compared with the one that strict FIFO would have trained."""
    weighted: Distance | None
    """Of all batches up to this one, each group with its weight; None without `length_correction`."""


@dataclass(frozen=True, slots=True)
class _Totals:
    """Samples by bin up to some step: plain counts, and counts with the weights they were trained with."""

    counted: Histogram
    weighted: Histogram

    def plain(self) -> list[list[float]]:
        """Both as plain values."""
        return [self.counted.tolist(), self.weighted.tolist()]


class LengthDistribution:
    """Follows the tickets of a run and measures the distance between trained and launched lengths."""

    def __init__(self, settings: BacklogSettings):
        self._groups_per_step = settings.groups_per_step
        self._most = settings.max_length_weight if settings.length_correction == "inverse_propensity" else None
        self._count = bin_count(settings.row_length)
        self._octaves = (self._count - 1) // BINS_PER_OCTAVE + 1
        self._ahead: deque[int] = deque()  # tickets that are not known to the launched totals yet
        self._dropped: set[int] = set()
        self._finished: dict[int, Bins] = {}  # of tickets in `_ahead`
        self._deliverable: dict[int, Bins] = {}
        self._launched = np.zeros(self._count)
        self._launched_groups = 0
        self._launched_octaves = np.zeros(self._octaves)
        self._trained = _Totals(np.zeros(self._count), np.zeros(self._count))
        self._trained_octaves = np.zeros(self._octaves)
        self._launched_steps: deque[Histogram] = deque()
        self._trained_steps: deque[_Totals] = deque()
        self._last = (np.zeros(self._count), np.zeros(self._count))
        self._known: list[KnownStep] = []
        self._known_before = 0
        """The number of known steps before those; a saved state has only the last ones."""
        self._reported = 0

    @property
    def known(self) -> Sequence[KnownStep]:
        """The steps with known distances, from the first on; after `load_state_dict` from the last one on."""
        return self._known

    def admit(self, index: int) -> None:
        """A ticket is admitted."""
        self._ahead.append(index)

    def finish(self, index: int, lengths: Sequence[int]) -> None:
        """The group of this ticket is complete, with samples of these lengths."""
        self._finished[index] = self._deliverable[index] = length_bins(lengths)
        self._advance()

    def drop(self, index: int) -> None:
        """This ticket will not be trained."""
        self._dropped.add(index)
        self._advance()

    def deliver(self, tickets: Sequence[int]) -> list[float]:
        """Take these tickets as the next batch, and return the weight of each."""
        groups = [self._deliverable.pop(ticket) for ticket in tickets]
        octaves = np.array([_octave(bins) for bins in groups])
        weights = np.ones(len(groups))
        if self._most is not None:
            weights = inverse_propensity(self._launched_octaves, self._trained_octaves, octaves, self._most)
        self._trained_octaves += np.bincount(octaves, weights, self._octaves)
        counted, weighted = self._trained.counted.copy(), self._trained.weighted.copy()
        for bins, weight in zip(groups, weights, strict=True):
            histogram = np.bincount(bins, minlength=self._count)
            counted += histogram
            weighted += weight * histogram
        self._trained = _Totals(counted, weighted)
        self._trained_steps.append(self._trained)
        self._compare()
        return weights.tolist()

    def metrics(self) -> dict[str, float]:
        """The distances up to the newest known step, and the means of the single steps not reported before."""
        if not self._known:
            return {}
        unreported, self._reported = self._known[self._reported :], len(self._known)
        found = {"distribution/known_step": float(self._known_before + len(self._known))}
        found |= {f"distribution/{name}": value for name, value in asdict(self._known[-1].so_far).items()}
        if weighted := self._known[-1].weighted:
            found |= {f"distribution/weighted_{name}": value for name, value in asdict(weighted).items()}
        if unreported:
            steps = [asdict(step.alone) for step in unreported]
            found |= {f"distribution/step_{name}": fmean(step[name] for step in steps) for name in steps[0]}
        return found

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values, without the reported steps before the last known one."""
        kept = max(0, min(self._reported, len(self._known) - 1))
        return {
            "ahead": list(self._ahead),
            "dropped": sorted(self._dropped),
            "finished": [(index, bins.tolist()) for index, bins in self._finished.items()],
            "deliverable": [(index, bins.tolist()) for index, bins in self._deliverable.items()],
            "launched": self._launched.tolist(),
            "launched_groups": self._launched_groups,
            "launched_octaves": self._launched_octaves.tolist(),
            "trained": self._trained.plain(),
            "trained_octaves": self._trained_octaves.tolist(),
            "launched_steps": [launched.tolist() for launched in self._launched_steps],
            "trained_steps": [trained.plain() for trained in self._trained_steps],
            "last": [histogram.tolist() for histogram in self._last],
            "known_before": self._known_before + kept,
            "known": [asdict(step) for step in self._known[kept:]],
            "told": self._reported - kept,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self._ahead, self._dropped = deque(state["ahead"]), set(state["dropped"])
        self._finished = {index: np.array(bins) for index, bins in state["finished"]}
        self._deliverable = {index: np.array(bins) for index, bins in state["deliverable"]}
        self._launched = np.array(state["launched"])
        self._launched_groups = state["launched_groups"]
        self._launched_octaves = np.array(state["launched_octaves"])
        self._trained = _Totals(*map(np.array, state["trained"]))
        self._trained_octaves = np.array(state["trained_octaves"])
        self._launched_steps = deque(map(np.array, state["launched_steps"]))
        self._trained_steps = deque(_Totals(*map(np.array, trained)) for trained in state["trained_steps"])
        launched, trained = map(np.array, state["last"])
        self._last = (launched, trained)
        self._known_before, self._reported = state["known_before"], state["told"]
        self._known = [_known_step(**step) for step in state["known"]]

    def _advance(self) -> None:
        while self._ahead and (self._ahead[0] in self._finished or self._ahead[0] in self._dropped):
            index = self._ahead.popleft()
            if index in self._dropped:
                self._dropped.remove(index)
                continue
            bins = self._finished.pop(index)
            self._launched = self._launched + np.bincount(bins, minlength=self._count)
            self._launched_octaves[_octave(bins)] += 1
            self._launched_groups += 1
            if self._launched_groups % self._groups_per_step == 0:
                self._launched_steps.append(self._launched)
        self._compare()

    def _compare(self) -> None:
        while self._launched_steps and self._trained_steps:
            launched, trained = self._launched_steps.popleft(), self._trained_steps.popleft()
            launched_before, trained_before = self._last
            self._last = (launched, trained.counted)
            self._known.append(
                KnownStep(
                    so_far=distance(launched, trained.counted),
                    alone=distance(launched - launched_before, trained.counted - trained_before),
                    weighted=None if self._most is None else distance(launched, trained.weighted),
                )
            )


class SourceShares:
    """Counts the prompt sources of trained groups."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def metrics(self, sources: Sequence[str]) -> dict[str, float]:
        """The share of each source in a batch of groups with these sources, and in all batches so far."""
        batch = Counter(sources)
        self._counts.update(batch)
        total = self._counts.total()
        found = {}
        for source, count in self._counts.items():
            found[f"distribution/source/{source}"] = batch[source] / len(sources)
            found[f"distribution/source_total/{source}"] = count / total
        return found

    def state_dict(self) -> dict[str, int]:
        """The counts."""
        return dict(self._counts)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a saved state."""
        self._counts = Counter(state)


def _known_step(so_far: dict[str, float], alone: dict[str, float], weighted: dict[str, float] | None) -> KnownStep:
    """The step of these plain values."""
    return KnownStep(Distance(**so_far), Distance(**alone), None if weighted is None else Distance(**weighted))


def _octave(bins: Bins) -> int:
    """The octave of a group's longest sample, which decides when the group is complete."""
    return int(bins.max()) // BINS_PER_OCTAVE
