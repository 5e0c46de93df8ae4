"""Coding tasks of any form by a path, and their prompts.

    swe_gym.jsonl, data/train.parquet   rows of SWE-bench's form
    tasks.jsonl                         lines of {"task": FOLDER}, relative to the file
    FOLDER                              a task of Harbor's form or of our own, or a folder of such folders

A prompt of a run carries only the problem and the task's place: the worker reads the task there, so that hidden tests
and solutions never go where the agent could see them.

    prompts: {task: null, files: [swe_gym.jsonl], reader: "goaly.coding.task_files:read_prompts"}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from goaly.base.config.settings import Section, Settings
from goaly.base.config.wording import show
from goaly.grading.harbor_format import CONFIG, HarborSettings, id_of, is_harbor, read_harbor, summary_of
from goaly.grading.swe_format import KEPT, SweSettings, read_row
from goaly.grading.task import CodingTask, TaskProblem
from goaly.grading.task_folder import read_task
from goaly.prompts.prompt import Message, Prompt
from goaly.prompts.settings import FILE_KINDS

if TYPE_CHECKING:
    from goaly.prompts.blocks import Location

PLACE = "coding_task"
"""Key of a prompt's metadata: the place of its task. Programs of agents don't get it."""
FOLDER_KEY = "task"
_ROW = "#"


class TaskSettings(Settings):
    """How coding tasks of others' forms are brought into sandboxes."""

    root: str | None = None
    """Folder that is the sandbox's root for all tasks, in place of the images that they name; it must have what they
    need. null: their images, or without one `sandbox.root`."""
    swe: SweSettings = field(default_factory=SweSettings)
    """Tasks of SWE-bench's form."""
    harbor: HarborSettings = field(default_factory=HarborSettings)
    """Tasks of Harbor's form."""

    def _problems(self, at: Section) -> Iterator[str]:
        if self.root is not None and not Path(self.root).is_dir():
            yield f"{at.root}: must be a folder"


DEFAULT = TaskSettings()


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """Where a task is: a folder, or a row of a file."""

    path: str
    row: int | None = None
    """Where the row begins: a JSONL line's offset in bytes, or the number of a Parquet row."""

    def __str__(self) -> str:
        return self.path if self.row is None else f"{self.path}{_ROW}{self.row}"

    @classmethod
    def of(cls, text: str) -> TaskPlace:
        """The place that a text names."""
        path, mark, row = text.rpartition(_ROW)
        return cls(path, int(row)) if mark and row.isdecimal() else cls(text)


class TaskFile(Sequence[CodingTask]):
    """The tasks of a path. Only their places are kept; each task is read when it is asked for."""

    def __init__(self, places: Mapping[str, TaskPlace], settings: TaskSettings):
        self._places = dict(places)
        self._settings = settings

    @property
    def places(self) -> Mapping[str, TaskPlace]:
        """The place of each task by its id, in order."""
        return self._places

    def __len__(self) -> int:
        return len(self._places)

    def task(self, id: str) -> CodingTask:
        """The task of this id; TaskProblem if there is none, or if it cannot be used."""
        if id not in self._places:
            raise TaskProblem(f"{id}: there is no such task; there are {len(self)}")
        return task_at(self._places[id], self._settings)

    @overload
    def __getitem__(self, index: int) -> CodingTask: ...
    @overload
    def __getitem__(self, index: slice) -> TaskFile: ...
    def __getitem__(self, index: int | slice) -> CodingTask | TaskFile:
        ids = list(self._places)
        if isinstance(index, slice):
            return TaskFile({id: self._places[id] for id in ids[index]}, self._settings)
        return self.task(ids[index])


def load(path: str | Path, settings: TaskSettings = DEFAULT) -> TaskFile:
    """The tasks of a file or a folder; TaskProblem if it has none, or two of one id.

    What else is wrong with a task shows when it is read."""
    places: dict[str, TaskPlace] = {}
    for entry in _entries(str(path)):
        _add(places, entry.id, entry.place)
    return TaskFile(places, settings)


def read_prompts(path: str) -> tuple[Prompt, ...]:
    """A prompt for each task of a file or a folder, with its problem as the user's message."""
    places: dict[str, TaskPlace] = {}
    prompts = []
    for entry in _entries(path):
        id, problem, metadata = entry.summary()
        _add(places, id, entry.place)
        prompts.append(
            Prompt(
                id=id,
                source=Path(path).stem,
                messages=(Message(role="user", content=problem),),
                metadata={**metadata, PLACE: str(entry.place)},
            )
        )
    return tuple(prompts)


def task_at(place: TaskPlace, settings: TaskSettings = DEFAULT) -> CodingTask:
    """The task at a place; TaskProblem says why it cannot be used."""
    root = None if settings.root is None else Path(settings.root)
    if place.row is not None:
        from goaly.prompts.blocks import Location, read_record

        location = Location(place.path, place.row)
        with _reading(place.path):
            record = read_record(location)
        return read_row(record, location, settings.swe.other_columns).task(settings.swe, root)
    folder = Path(place.path)
    if is_harbor(folder):
        return read_harbor(folder, settings.harbor, root=root)
    task = read_task(folder)
    return task if root is None else replace(task, root=root, image=None)


def kept_lines(tasks: TaskFile, ids: Sequence[str], folder: Path) -> str:
    """A JSONL file in this folder with these tasks: their rows as they are, or the paths of their folders."""
    from goaly.prompts.blocks import Location, read_record

    lines = []
    for id in ids:
        place = tasks.places[id]
        if place.row is None:
            lines.append({FOLDER_KEY: os.path.relpath(place.path, folder)})
        else:
            with _reading(place.path):
                lines.append(dict(read_record(Location(place.path, place.row))))
    return "".join(f"{json.dumps(line, default=str)}\n" for line in lines)


def task_of(prompt: Prompt, settings: TaskSettings = DEFAULT) -> CodingTask:
    """The task of a prompt of `read_prompts`; TaskProblem if its file has changed since."""
    if (text := prompt.metadata.get(PLACE)) is None:
        raise TaskProblem(f"prompt {prompt.id}: has no `{PLACE}`; prompts.reader must be {__name__}:read_prompts")
    task = task_at(TaskPlace.of(text), settings)
    if task.id != prompt.id:
        raise TaskProblem(f"{text}: is {task.id} now, was {prompt.id}; the file must not change during a run")
    return task


@dataclass(frozen=True, slots=True)
class _Entry:
    """A task as its file or folder lists it."""

    place: TaskPlace
    id: str
    record: Mapping[str, Any] | None = None
    location: Location | None = None

    def summary(self) -> tuple[str, str, Mapping[str, str]]:
        """Its id, its problem, and its metadata; TaskProblem if its row or its folder is not of its form."""
        if self.record is not None:
            row = read_row(self.record, self.location, tuple(self.record))
            return row.id, row.problem, {key: value for key, value in row.metadata.items() if key in KEPT}
        folder = Path(self.place.path)
        if is_harbor(folder):
            return summary_of(folder)
        task = read_task(folder)
        return task.id, task.problem, task.metadata


def _add(places: dict[str, TaskPlace], id: str, place: TaskPlace) -> None:
    if id in places:
        raise TaskProblem(f"{place}: {id} is there already, at {places[id]}; each task must have an id of its own")
    places[id] = place


def _entries(path: str) -> Iterator[_Entry]:
    """The tasks of a path, in order."""
    if Path(path).is_dir():
        yield from map(_folder_entry, _folders(Path(path)))
    elif not Path(path).exists():
        raise TaskProblem(f"{path}: there is no such file or folder")
    elif path.endswith(FILE_KINDS):
        yield from _row_entries(path)
    else:
        raise TaskProblem(f"{path}: must be a folder, or end in {' or '.join(FILE_KINDS)}")


def _folders(folder: Path) -> Sequence[Path]:
    if (folder / CONFIG).is_file():
        return [folder]
    if found := sorted(file.parent for file in folder.glob(f"*/{CONFIG}")):
        return found
    raise TaskProblem(f"{folder}: has no {CONFIG}, and no folder in it has one")


def _folder_entry(folder: Path) -> _Entry:
    return _Entry(TaskPlace(str(folder)), id_of(folder) if is_harbor(folder) else folder.resolve().name)


def _row_entries(path: str) -> Iterator[_Entry]:
    from goaly.prompts.blocks import blocks_of, read_block

    found = False
    with _reading(path):
        for block in blocks_of([path]):
            for location, record in read_block(block):
                found = True
                if record.keys() == {FOLDER_KEY} and isinstance(record[FOLDER_KEY], str):
                    yield from map(_folder_entry, _folders(Path(path).parent / record[FOLDER_KEY]))
                else:
                    id = record.get("instance_id")
                    if not isinstance(id, str) or not id:
                        what = "must be a text, or the row one of {task: FOLDER}"
                        raise TaskProblem(f"{location}: `instance_id`={show(id)}: {what}")
                    yield _Entry(TaskPlace(path, location.at), id, record, location)
    if not found:
        raise TaskProblem(f"{path}: has no tasks")


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """In this block, a file that cannot be read or is damaged becomes a TaskProblem."""
    try:
        yield
    except TaskProblem:
        raise
    except (OSError, ValueError) as error:
        raise TaskProblem(str(error) if path in str(error) else f"{path}: {error}") from error
