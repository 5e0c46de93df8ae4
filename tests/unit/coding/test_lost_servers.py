"""Clean states of tasks whose server of sandboxes is killed: they are prepared again at the next one."""

import signal
from pathlib import Path

import pytest

from goaly.coding.grading import grade
from goaly.coding.workspace import Workspaces
from goaly.grading.file_tree import PLAIN, File
from goaly.grading.patch_writer import patch_of
from goaly.grading.task import CodingTask, Repository, TestSuite
from goaly.sandboxes.remote import RemoteHost
from goaly.sandboxes.settings import RemoteSettings, SandboxSettings
from tests.unit.coding.conftest import folder_of
from tests.unit.sandboxes.conftest import RemoteServer

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

WRONG, RIGHT = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
TEST = b"from adder import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"


async def test_agents_and_gradings_start_again_after_their_server_was_killed(tmp_path: Path):
    suite = TestSuite(fail_to_pass=("tests/test_add.py::test_add",), files={"tests/test_add.py": TEST})
    repository = Repository(path=folder_of(tmp_path, {"adder.py": WRONG}))
    task = CodingTask(id="adding", problem="", tests=suite, repository=repository)
    patch = patch_of({"adder.py": File(PLAIN, WRONG.encode())}, {"adder.py": File(PLAIN, RIGHT.encode())})
    server = RemoteServer()
    port = int(server.url.rsplit(":", 1)[1])
    remote = RemoteSettings(servers=(server.url,))
    host = await RemoteHost.open(remote)
    workspaces = Workspaces(host, SandboxSettings(backend="remote", remote=remote))
    try:
        await workspaces.start(task)
        server = restarted(server, port)
        sandbox = await workspaces.start(task)
        assert (await sandbox.run("cat adder.py")).stdout.text() == WRONG
        server = restarted(server, port)
        assert (await grade(workspaces, task, patch)).resolved
    finally:
        await workspaces.close()
        await host.close()
        server.end()


def restarted(server: RemoteServer, port: int) -> RemoteServer:
    """Another server in place of this one, which is killed; it serves."""
    server.end(signal.SIGKILL)
    another = RemoteServer(port=port)
    assert another.url.endswith(f":{port}")
    return another
