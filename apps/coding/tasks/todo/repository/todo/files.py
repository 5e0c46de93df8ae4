"""Lists in files."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from todo.tasks import Task, TodoList

VERSION = 1


class FileError(ValueError):
    """A file that is no to-do list."""


def load(path):
    """The list in a file; an empty one if there is no such file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if data["version"] != VERSION:
            raise FileError(f"{path}: version {data['version']} is not known")
        return TodoList([Task(**task) for task in data["tasks"]])
    except FileNotFoundError:
        return TodoList()
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise FileError(f"{path}: not a to-do list: {error!r}") from error


def save(path, todo):
    """Write a list; the file is replaced as a whole."""
    data = {"version": VERSION, "tasks": [asdict(task) for task in todo.tasks]}
    partial = Path(f"{path}.new")
    partial.write_text(json.dumps(data, indent=1), encoding="utf-8")
    os.replace(partial, path)
