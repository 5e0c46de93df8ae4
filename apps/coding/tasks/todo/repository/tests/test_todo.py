import pytest

from todo.cli import main


@pytest.fixture
def todo(tmp_path, capsys):
    """Runs a command; returns its status and what it prints."""

    def run(*arguments):
        status = main(["--file", str(tmp_path / "tasks.json"), *arguments])
        return status, capsys.readouterr().out.splitlines()

    return run


def test_a_task_from_beginning_to_end(todo):
    assert todo("add", "buy milk", "--due", "2024-05-03") == (0, ["1"])
    assert todo("add", "read") == (0, ["2"])
    assert todo("list") == (0, ["1 [ ] buy milk (2024-05-03)", "2 [ ] read"])
    assert todo("done", "1") == (0, [])
    assert todo("list") == (0, ["2 [ ] read"])
    assert todo("edit", "2", "read more") == (0, [])
    assert todo("list", "--all") == (0, ["1 [x] buy milk (2024-05-03)", "2 [ ] read more"])
    assert todo("remove", "1", "2") == (0, [])
    assert todo("list", "--all") == (0, [])


def test_tasks_that_are_due_come_first(todo):
    todo("add", "later")
    todo("add", "june", "--due", "2024-06-01")
    todo("add", "may", "--due", "2024-05-01")
    assert [line.split()[-2] for line in todo("list")[1][:2]] == ["may", "june"]


def test_wrong_command_lines(todo):
    for arguments in (["done"], ["done", "x"], ["add", "x", "--due", "tomorrow"], []):
        with pytest.raises(SystemExit) as caught:
            todo(*arguments)
        assert caught.value.code == 2


def test_files_that_are_no_list(todo, tmp_path):
    for text in ("[]", "{", '{"version": 9, "tasks": []}'):
        (tmp_path / "tasks.json").write_text(text)
        assert todo("list") == (1, [])
