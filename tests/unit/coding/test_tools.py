"""An agent's tools in a real sandbox: what the policy sees of each call, right or wrong."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from goaly.coding.settings import CodingSettings
from goaly.coding.tools import Tools
from goaly.sandboxes.contract import SandboxDied
from goaly.sandboxes.sandbox import Sandbox
from goaly.sandboxes.shell import Shell

Open = Callable[..., Tools]


@pytest.fixture
def recorded() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def opened(sandbox: Sandbox, recorded: list[dict[str, Any]]) -> Open:
    return lambda **settings: Tools(
        sandbox, "/tmp/work", CodingSettings(**settings), lambda one: recorded.append({**one})
    )


async def test_the_shell_keeps_its_folder_and_variables_between_calls(opened: Open):
    async with opened() as tools:
        assert await tools.bash("mkdir inner; cd inner; NAME=value; f() { echo $NAME; }") == "[no output]"
        assert await tools.bash("pwd; f") == "/tmp/work/inner\nvalue\n"


async def test_errors_are_shown_where_they_came_in_the_output(opened: Open):
    async with opened() as tools:
        shown = await tools.bash("echo before; ls /absent; echo after; (exit 3)")
        before, error, after, code = shown.splitlines()
        assert (before, after, code) == ("before", "after", "[exit code 3]")
        assert "/absent" in error


async def test_a_long_output_is_cut_in_the_middle_to_the_bound(opened: Open, recorded: list[dict[str, Any]]):
    async with opened(observation_bytes=1000) as tools:
        shown = await tools.bash("seq 1 10000")
        assert shown.startswith("1\n2\n")
        assert shown.endswith("9999\n10000\n")
        assert "bytes omitted" in shown
        assert 1000 <= len(shown) < 1100
        assert recorded[-1]["output"] == shown


async def test_a_command_that_exceeds_its_time_is_ended_and_the_shell_stays(
    opened: Open, recorded: list[dict[str, Any]]
):
    async with opened(command_seconds=0.3) as tools:
        await tools.bash("NAME=kept")
        shown = (await tools.bash("echo begun; sleep 60")).splitlines()
        assert (shown[0], shown[-1]) == ("begun", "[stopped after 0.3 s]")
        assert await tools.bash("echo $NAME") == "kept\n"
    assert [one.get("limit") for one in recorded] == [None, "time", None]


async def test_a_shell_that_was_left_is_opened_again(opened: Open):
    async with opened() as tools:
        assert (
            await tools.bash("cd /; exit 4") == "[exit code 4; the shell has ended, the next command starts a new one]"
        )
        assert await tools.bash("pwd") == "/tmp/work\n"


async def test_a_shell_is_opened_where_the_agent_has_moved_its_workdir_away(opened: Open):
    async with opened() as tools:
        await tools.bash("mv /tmp/work /tmp/other; exit 4")
        assert await tools.bash("pwd") == "/\n"


async def test_a_program_in_place_of_the_shell_is_ended_at_its_time(opened: Open):
    async with opened(command_seconds=0.2) as tools:
        assert await tools.bash("exec sleep 60") == (
            "[stopped after 0.2 s; the shell has ended, the next command starts a new one]"
        )
        assert await tools.bash("echo on") == "on\n"


async def test_a_shell_that_was_killed_between_calls_is_an_observation(opened: Open, sandbox: Sandbox):
    async with opened() as tools:
        await tools.bash("echo $$ > pid; NAME=lost")
        await sandbox.run(["sh", "-c", "kill -9 $(cat /tmp/work/pid)"])
        assert "the shell has ended, the next command starts a new one" in await tools.call("bash", '{"command": "ls"}')
        assert await tools.bash("echo on$NAME") == "on\n"


async def test_a_shell_that_cannot_be_opened_is_an_observation(
    opened: Open, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
):
    async def ended(*_: Any, **__: Any) -> Any:
        raise SandboxDied("the shell has ended")

    monkeypatch.setattr(Shell, "open", ended)
    async with opened() as tools:
        assert "the shell has ended" in await tools.call("bash", '{"command": "ls"}')
        await sandbox.stop()
        with pytest.raises(SandboxDied):
            await tools.call("bash", '{"command": "ls"}')


async def test_a_command_does_not_silence_or_end_the_next_one(opened: Open):
    async with opened() as tools:
        assert await tools.bash("exec > /dev/null 2> /dev/null; echo gone") == "[no output]"
        assert await tools.bash("readonly command_=1 start_=1 count_=1; exec >&- 2>&-") == "[no output]"
        assert await tools.bash("echo $command_; echo error >&2; (echo inner)") == "1\nerror\ninner\n"


async def test_a_sandbox_that_died_is_an_error_and_no_observation(opened: Open, sandbox: Sandbox):
    async with opened() as tools:
        await tools.bash("true")
        await sandbox.stop()
        with pytest.raises(SandboxDied):
            await tools.bash("true")


async def test_edits_create_insert_and_replace(opened: Open, sandbox: Sandbox):
    async with opened() as tools:
        assert await tools.edit("deep/a.py", "one\nthree\n") == "created deep/a.py"
        assert await tools.edit("deep/a.py", "two", line=1) == "changed deep/a.py at line 2"
        assert await tools.edit("/tmp/work/deep/a.py", "3\n", old="three\n") == "changed /tmp/work/deep/a.py at line 3"
        assert await tools.edit("deep/a.py", "", old="one\n") == "changed deep/a.py at line 1"
    assert await sandbox.read("/tmp/work/deep/a.py") == b"two\n3\n"


async def test_an_edit_keeps_the_mode_and_bytes_that_are_no_text(opened: Open, sandbox: Sandbox):
    await sandbox.write("/tmp/work/run.sh", b"\xff\xfe echo a\r\n", mode=0o755)
    async with opened() as tools:
        await tools.edit("run.sh", "b", old="a")
        assert await tools.bash("stat -c %a run.sh") == "755\n"
    assert await sandbox.read("/tmp/work/run.sh") == b"\xff\xfe echo b\r\n"


async def test_an_edit_of_a_link_changes_its_target(opened: Open, sandbox: Sandbox):
    await sandbox.write("/tmp/work/deep/a.py", b"one\n", mode=0o755)
    async with opened() as tools:
        await tools.bash("ln -s ../deep deep/up; ln -s deep/up/a.py link; ln -s /etc/passwd other; ln -s absent none")
        assert await tools.edit("link", "two", old="one") == "changed link at line 1"
        assert await tools.bash("readlink link; stat -c %a deep/a.py; cat link") == "deep/up/a.py\n755\ntwo\n"
        for link, said in (("other", "denied"), ("none", "No such file")):
            assert said in await tools.call("edit", json.dumps({"path": link, "new": "x", "line": 0}))


@pytest.mark.parametrize(
    ("before", "arguments", "after"),
    [
        (b"a\r\nb\r\nc\r\n", {"old": "a\nb\n", "new": "x\ny\n"}, b"x\r\ny\r\nc\r\n"),
        (b"a\r\nb\r\n", {"old": "b", "new": "x\ny"}, b"a\r\nx\r\ny\r\n"),
        (b"a\r\nb\r\n", {"old": "\r\nb", "new": "\nx"}, b"a\r\nx\r\n"),
        (b"a\r\nb\r\n", {"line": 1, "new": "x\ny"}, b"a\r\nx\r\ny\r\nb\r\n"),
        (b"a\r\nb", {"line": 2, "new": "x"}, b"a\r\nb\r\nx\r\n"),
        (b"a\r\nb\r\nc\n", {"old": "a\nb", "new": "x\ny"}, b"x\r\ny\r\nc\n"),
        (b"a\nb\r\nc\n", {"old": "c\n", "new": "x\ny\n"}, b"a\nb\r\nx\ny\n"),
    ],
)
async def test_an_edit_keeps_the_files_line_ends(
    opened: Open, sandbox: Sandbox, before: bytes, arguments: Any, after: bytes
):
    await sandbox.write("/tmp/work/a.txt", before)
    async with opened() as tools:
        assert "changed" in await tools.call("edit", json.dumps({"path": "a.txt", **arguments}))
    assert await sandbox.read("/tmp/work/a.txt") == after


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"path": "a.py", "old": "x = 1", "new": ""}, "more than once in the file, at the lines 1, 3"),
        ({"path": "a.py", "old": "x = 9", "new": ""}, "`old` is not in the file"),
        ({"path": "a.py", "old": "", "new": "y"}, "`old` is empty"),
        ({"path": "a.py", "new": "y"}, "a.py exists"),
        ({"path": "a.py", "new": "y", "line": 9}, "line=9: must be from 0 to 3"),
        ({"path": "a.py", "new": "y", "line": True}, "`line` must be a whole number"),
        ({"path": "a.py", "new": "y", "line": 1, "old": "x"}, "not both"),
        ({"path": "absent.py", "old": "x", "new": "y"}, "No such file"),
        ({"path": "/tmp", "old": "x", "new": "y"}, "not a file"),
        ({"path": "/etc/own.conf", "new": "y"}, "denied"),
        ({"path": "", "new": "y"}, "exists"),
        ({"new": "y"}, "`path` must be a text, it is missing"),
    ],
)
async def test_a_wrong_edit_changes_nothing_and_says_why(opened: Open, sandbox: Sandbox, arguments: Any, said: str):
    await sandbox.write("/tmp/work/a.py", b"x = 1\ny = 2\nx = 1\n")
    async with opened() as tools:
        shown = await tools.call("edit", json.dumps(arguments))
    assert shown.startswith("error: ")
    assert said in shown
    assert await sandbox.read("/tmp/work/a.py") == b"x = 1\ny = 2\nx = 1\n"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("search", "{}", "there is no tool 'search'"),
        ("bash", "{", "the arguments are no JSON object"),
        ("bash", "[1]", "the arguments must be a JSON object"),
        ("bash", "{}", "`command` must be a text, it is missing"),
        ("bash", '{"command": 1}', "`command` must be a text"),
        ("bash", '{"command": "a\\u0000b"}', "zero byte"),
    ],
)
async def test_a_call_that_cannot_be_done_is_an_observation(
    opened: Open, recorded: list[dict[str, Any]], name: str, arguments: str, said: str
):
    async with opened() as tools:
        assert said in await tools.call(name, arguments)
    assert recorded[-1]["arguments"] == arguments


async def test_each_command_is_recorded_with_its_end(opened: Open, recorded: list[dict[str, Any]]):
    async with opened() as tools:
        await tools.bash("echo out; exit 5")
        await tools.edit("a", "text")
        tools.submit()
    command, edit, submit = recorded
    assert command.pop("seconds") > 0
    assert command == {"tool": "bash", "command": "echo out; exit 5", "output": "out\n", "exit_code": 5}
    assert edit == {"tool": "edit", "path": "a", "new": "text", "output": "created a"}
    assert submit == {"tool": "submit"}
