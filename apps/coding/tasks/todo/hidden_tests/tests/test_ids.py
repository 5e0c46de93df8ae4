import json
import random

import pytest

from todo.cli import main


@pytest.fixture
def todo(tmp_path, capsys):
    """Runs a command; returns its status, its output and its errors."""

    def run(*arguments):
        status = main(["--file", str(tmp_path / "tasks.json"), *arguments])
        return status, *capsys.readouterr()

    return run


def ids(todo):
    return [int(line.split()[0]) for line in todo("list", "--all")[1].splitlines()]


@pytest.mark.parametrize(
    "command", [["done", "7"], ["remove", "7"], ["edit", "7", "x"]], ids=["done", "remove", "edit"]
)
def test_an_unknown_id_is_an_error(todo, command):
    todo("add", "one")
    assert todo(*command) == (1, "", "todo: no task 7\n")
    assert todo("list", "--all") == (0, "1 [ ] one\n", "")


@pytest.mark.parametrize("command", ["done", "remove"])
def test_all_ids_or_none(todo, tmp_path, command):
    for text in "abc":
        todo("add", text)
    before = (tmp_path / "tasks.json").read_bytes()
    assert todo(command, "3", "8", "1", "5") == (1, "", "todo: no task 8, 5\n")
    assert (tmp_path / "tasks.json").read_bytes() == before
    assert todo(command, "3", "1") == (0, "", "")
    assert todo("list") == (0, "2 [ ] b\n", "")


def test_an_id_in_the_middle_is_not_used_again(todo):
    for text in "abc":
        todo("add", text)
    todo("remove", "1")
    assert todo("add", "d")[1] == "4\n"
    assert ids(todo) == [2, 3, 4]


def test_the_last_id_is_not_used_again(todo):
    todo("add", "a")
    todo("add", "b")
    todo("remove", "2")
    assert todo("add", "c")[1] == "3\n"
    todo("remove", "1", "3")
    assert ids(todo) == []
    todo("list")
    assert todo("add", "d")[1] == "4\n"


def test_files_of_older_versions(todo, tmp_path):
    tasks = [{"id": id, "text": f"t{id}", "due": "", "done": False} for id in (2, 9, 4)]
    (tmp_path / "tasks.json").write_text(json.dumps({"version": 1, "tasks": tasks}))
    assert ids(todo) == [2, 4, 9]
    assert todo("done", "9")[0] == 0
    assert todo("add", "x")[1] == "10\n"
    (tmp_path / "tasks.json").write_text('{"version": 1, "tasks": []}')
    assert todo("add", "x")[1] == "1\n"


def test_random_use_gives_every_id_once(todo):
    source, given, alive = random.Random(4), [], set()
    for _ in range(60):
        if source.random() < 0.5 or not alive:
            new = int(todo("add", "x")[1])
            given.append(new)
            alive.add(new)
        else:
            gone = source.choice([max(alive), source.choice(sorted(alive))])
            alive.remove(gone)
            assert todo("remove", str(gone))[0] == 0
    assert given == list(range(1, len(given) + 1))
    assert ids(todo) == sorted(alive)


def test_an_id_twice_in_a_command_is_one_task(todo):
    todo("add", "a")
    assert todo("done", "1", "1") == (0, "", "")
    assert todo("list", "--all")[1] == "1 [x] a\n"
