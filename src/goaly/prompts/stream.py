"""Endless, seeded, resumable streams of prompts, over torchdata's nodes.

prompts-3: Resuming from a saved state gives exactly the prompts, or the documents, that would have come. A state of
    another source, seed or split is refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any, Protocol

from torchdata.nodes import BaseNode

from goaly.prompts.blocks import Block, ShuffledFiles, blocks_of, fingerprint_of
from goaly.prompts.files import DEFAULT, distinct_prompts_of, fingerprint_by, prompts_by, prompts_of
from goaly.prompts.prompt import Prompt, Split, split_of
from goaly.prompts.settings import REASONING_GYM, PromptSettings
from goaly.prompts.tasks.arithmetic import Arithmetic

_DRAWS_BEFORE_GIVING_UP = 100_000
_REPEATS_BEFORE_GIVING_UP = 2_000
"""A task that draws this many known problems in a row counts as exhausted."""


def refuse_other(stream: str, identity: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise a ValueError if the saved state is not of the stream with this identity."""
    for key, value in identity.items():
        if state[key] != value:
            raise ValueError(f"{stream}: {key} is {value!r}, but the saved state has {state[key]!r}")


class Task(Protocol):
    """Makes problems."""

    @property
    def fingerprint(self) -> str:
        """Identifies the settings of the task; streams refuse to resume with another fingerprint."""
        ...

    def problem(self, random: Random) -> Prompt:
        """The problem that these random numbers make."""
        ...


def _task(settings: PromptSettings) -> Task:
    if settings.task == REASONING_GYM:
        from goaly.prompts.tasks.reasoning_gym import ReasoningGym  # imports many packages

        return ReasoningGym(settings.reasoning_gym.data_set, settings.reasoning_gym.wording)
    return Arithmetic(settings.arithmetic)


class TaskPrompts(BaseNode[Prompt]):
    """A task's problems, without end: number i depends on the seed, the split and i only."""

    def __init__(self, task: Task, held_out_fraction: float, seed: int, split: Split):
        super().__init__()
        self._task = task
        self._held_out_fraction = held_out_fraction
        self._seed = seed
        self._split = split
        self._position = 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin, or continue from a saved state."""
        super().reset(initial_state)
        self._position = initial_state["position"] if initial_state else 0

    def next(self) -> Prompt:
        """The next problem of the split."""
        random = Random(f"{self._seed}/{self._split}/{self._position}")
        for _ in range(_DRAWS_BEFORE_GIVING_UP):
            prompt = self._task.problem(random)
            if split_of(prompt, self._held_out_fraction) is self._split:
                self._position += 1
                return prompt
        raise ValueError(f"no {self._split} problem in {_DRAWS_BEFORE_GIVING_UP} draws: {self._task.fingerprint}")

    def get_state(self) -> dict[str, Any]:
        """How many problems were given."""
        return {"position": self._position}


class Exhausted(ValueError):
    """A source has no new problem."""


class PromptStream:
    """The prompts of one split of a single source, without end.

    Their source is `name`, or if it is None the one that their task or file gives.
    """

    def __init__(
        self, settings: PromptSettings, split: Split = Split.TRAIN, name: str | None = None, passes: int | None = None
    ):
        """Files are read for `passes` passes, or without end."""
        self._settings = settings
        self._split = split
        self._name = name
        self._position = 0
        self._read = 0
        held_out = settings.held_out_fraction
        if settings.task is None:
            order = f"{settings.seed}/{split}"
            whole = settings.distinct or settings.reader is not None
            blocks = [Block(file, 0) for file in settings.files] if whole else blocks_of(settings.files)
            self._prompts: BaseNode[Prompt] = ShuffledFiles(blocks, self._own, order=order, passes=passes)
            read = f" {settings.columns}" * (settings.columns != DEFAULT) + " distinct" * settings.distinct
            reader = settings.reader
            source = fingerprint_by(reader, settings.files) if reader else fingerprint_of(settings.files)
            self._source = f"{source} held_out={held_out}{read}"
        else:
            task = _task(settings)
            self._prompts = TaskPrompts(task, held_out, settings.seed, split)
            self._source = f"{task.fingerprint} held_out={held_out}"

    @property
    def position(self) -> int:
        """The number of prompts given so far."""
        return self._position

    def next(self) -> Prompt:
        """The next prompt; Exhausted if the split has none, or after the last pass."""
        try:
            prompt = next(self._prompts)
        except StopIteration:
            which = "none" if self._split is Split.HELD_OUT else "all"
            raise Exhausted(
                f"held_out_fraction={self._settings.held_out_fraction} holds out {which} of the {self._read} prompts "
                f"of {', '.join(self._settings.files)}"
            ) from None
        self._position += 1
        return prompt if self._name is None else replace(prompt, source=self._name)

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream, and its identity."""
        return {"position": self._position, "prompts": self._prompts.state_dict(), **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state of the same stream."""
        refuse_other("prompt stream", self._identity(), state)  # prompts-3
        self._prompts.reset(state["prompts"])
        self._position = int(state["position"])

    def _own(self, block: Block) -> list[Prompt]:
        columns, reader = self._settings.columns, self._settings.reader
        if reader is not None:
            prompts = prompts_by(reader, block.file)
        elif self._settings.distinct:
            prompts = distinct_prompts_of(block.file, columns)
        else:
            prompts = prompts_of(block, columns)
        self._read += len(prompts)
        return [prompt for prompt in prompts if split_of(prompt, self._settings.held_out_fraction) is self._split]

    def _identity(self) -> dict[str, Any]:
        return {"source": self._source, "seed": self._settings.seed, "split": str(self._split)}


class Distinct(PromptStream):
    """One pass over a stream that skips problems with the same messages and answer as an earlier one.

    Streams that share `seen` also skip each other's problems.
    """

    def __init__(self, settings: PromptSettings, split: Split, name: str | None, seen: set[tuple[str, str | None]]):
        super().__init__(settings, split, name, passes=1)
        self._seen = seen

    def next(self) -> Prompt:
        """The next new problem; raises Exhausted if there is none."""
        repeats = 0
        while self._settings.task is None or repeats < _REPEATS_BEFORE_GIVING_UP:
            prompt = super().next()
            if (problem := (repr(prompt.messages), prompt.answer)) not in self._seen:
                self._seen.add(problem)
                return prompt
            repeats += 1
        raise Exhausted(f"{self._source}: no new problem in {repeats} draws")
