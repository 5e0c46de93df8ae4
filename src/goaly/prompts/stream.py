"""Endless, seeded, resumable streams of prompts.

The position is the whole state of a stream: prompt number i depends on the seed, the split and i only.

Invariants
    PS-1  Resuming at a saved position gives exactly the prompts that would have come.
    PS-2  A stream gives prompts of its own split only.
    PS-3  A state of another source, seed or split is refused.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, Protocol

from goaly.prompts.files import read_prompts
from goaly.prompts.prompt import Prompt, Split, split_of
from goaly.prompts.settings import PromptSettings
from goaly.prompts.tasks import Task, build_task

_DRAWS_BEFORE_GIVING_UP = 100_000
_REPEATS_BEFORE_GIVING_UP = 2_000
"""A task that draws this many known problems in a row counts as exhausted."""


class PromptSource(Protocol):
    """A prompt for every position of an endless order."""

    @property
    def fingerprint(self) -> str:
        """Identifies this source."""
        ...

    def at(self, position: int, seed: int, split: Split) -> Prompt:
        """The prompt at this position of the split's endless order."""
        ...

    def size(self, split: Split) -> int | None:
        """The number of prompts before the split's order repeats; None if it never does."""
        ...


class ShuffledOrder:
    """The numbers below `count`, over and over, in a new random order for every pass."""

    def __init__(self, count: int, name: str):
        self._count = count
        self._name = name
        self._pass: tuple[int, int] | None = None
        self._places: list[int] = []

    def at(self, position: int, seed: int) -> int:
        """The number at this position of the endless order."""
        number, offset = divmod(position, self._count)
        if self._pass != (seed, number):
            self._places = list(range(self._count))
            Random(f"{seed}/{self._name}/{number}").shuffle(self._places)
            self._pass = (seed, number)
        return self._places[offset]


class TaskSource:
    """The problems of a task, drawn until one is in the wanted split."""

    def __init__(self, task: Task, held_out_fraction: float):
        self._task = task
        self._held_out_fraction = held_out_fraction

    @property
    def fingerprint(self) -> str:
        """Identifies this source."""
        return f"{self._task.fingerprint} held_out={self._held_out_fraction}"

    def at(self, position: int, seed: int, split: Split) -> Prompt:
        """The prompt at this position of the split's endless order."""
        random = Random(f"{seed}/{split}/{position}")
        for _ in range(_DRAWS_BEFORE_GIVING_UP):
            prompt = self._task.problem(random)
            if split_of(prompt, self._held_out_fraction) is split:
                return prompt
        raise ValueError(f"no {split} problem in {_DRAWS_BEFORE_GIVING_UP} draws: {self.fingerprint}")

    def size(self, split: Split) -> None:
        """None: a task draws without end."""


class FileSource:
    """The prompts of files, in a new random order for every pass."""

    def __init__(self, files: Sequence[str], held_out_fraction: float):
        self._files = ", ".join(files)
        self._held_out_fraction = held_out_fraction
        self._fingerprint = f"{list(files)} held_out={held_out_fraction}"
        prompts = read_prompts(files)
        self._prompts = {
            split: [prompt for prompt in prompts if split_of(prompt, held_out_fraction) is split] for split in Split
        }
        self._orders = {split: ShuffledOrder(len(prompts), str(split)) for split, prompts in self._prompts.items()}

    @property
    def fingerprint(self) -> str:
        """Identifies this source."""
        counts = {str(split): len(prompts) for split, prompts in self._prompts.items()}
        return f"{self._fingerprint} {counts}"

    def at(self, position: int, seed: int, split: Split) -> Prompt:
        """The prompt at this position of the split's endless order."""
        prompts = self._prompts[split]
        if not prompts:
            count, which = sum(map(len, self._prompts.values())), "none" if split is Split.HELD_OUT else "all"
            raise ValueError(
                f"held_out_fraction={self._held_out_fraction} holds out {which} of the {count} prompts of {self._files}"
            )
        return prompts[self._orders[split].at(position, seed)]

    def size(self, split: Split) -> int:
        """The number of prompts in the split."""
        return len(self._prompts[split])


class Exhausted(Exception):
    """A source has no new problem."""


class PromptStream:
    """The prompts of one split, from a position onwards, without end.

    Their source is `name`, or if it is None the one that their task or file gives.
    """

    def __init__(self, source: PromptSource, seed: int, split: Split = Split.TRAIN, name: str | None = None):
        self._source = source
        self._seed = seed
        self._split = split
        self._name = name
        self._position = 0

    @property
    def position(self) -> int:
        """The number of prompts given so far."""
        return self._position

    def next(self) -> Prompt:
        """The next prompt."""
        prompt = self._source.at(self._position, self._seed, self._split)  # PS-1, PS-2
        self._position += 1
        return prompt if self._name is None else replace(prompt, source=self._name)

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream, and its identity."""
        return {"position": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state of the same stream."""
        for key, value in self._identity().items():
            if state[key] != value:  # PS-3
                raise ValueError(f"prompt stream: {key} is {value!r}, but the saved state has {state[key]!r}")
        self._position = int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {"source": self._source.fingerprint, "seed": self._seed, "split": str(self._split)}


class Distinct(PromptStream):
    """A stream that skips problems with the same messages and answer as an earlier one.

    Streams that share `seen` also skip each other's problems.
    """

    def __init__(
        self, source: PromptSource, seed: int, split: Split, name: str | None, seen: set[tuple[str, str | None]]
    ):
        super().__init__(source, seed, split, name)
        self._size = source.size(split)
        self._seen = seen

    def next(self) -> Prompt:
        """The next new problem; raises Exhausted if there is none."""
        repeats = 0
        while self.position < self._size if self._size is not None else repeats < _REPEATS_BEFORE_GIVING_UP:
            prompt = super().next()
            if (problem := (repr(prompt.messages), prompt.answer)) not in self._seen:
                self._seen.add(problem)
                return prompt
            repeats += 1
        raise Exhausted


def prompt_source(settings: PromptSettings) -> PromptSource:
    """The source that the settings describe."""
    if settings.task is None:
        return FileSource(settings.files, settings.held_out_fraction)
    return TaskSource(build_task(settings.task, settings.arithmetic), settings.held_out_fraction)


def prompt_stream(settings: PromptSettings, split: Split = Split.TRAIN, name: str | None = None) -> PromptStream:
    """The stream of the single source that the settings describe, under this name."""
    return PromptStream(prompt_source(settings), settings.seed, split, name)
