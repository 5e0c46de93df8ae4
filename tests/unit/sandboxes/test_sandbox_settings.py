"""The section of settings for sandboxes, and the host that it opens."""

from pathlib import Path

import pytest

from goaly.base.errors import ConfigError
from goaly.sandboxes.contract import Limits, SandboxUnavailable
from goaly.sandboxes.open_host import open_host
from goaly.sandboxes.settings import PoolSettings, SandboxSettings


def test_a_root_must_be_an_absolute_folder_that_exists(tmp_path: Path):
    assert SandboxSettings().problems("sandbox.") == []
    assert SandboxSettings(root="here").problems("sandbox.") == ["sandbox.root=here: must be an absolute path"]
    missing = SandboxSettings(root=str(tmp_path / "none"))
    assert missing.problems("sandbox.") == [f"sandbox.root={tmp_path}/none: there is no such folder on this host"]


def test_limits_are_checked_with_the_name_of_their_key():
    with pytest.raises(ConfigError, match="memory_mib"):
        Limits(memory_mib=0)


async def test_a_sandbox_starts_as_the_settings_say():
    limits, pool = Limits(memory_mib=256, disk_mib=8, processes=32), PoolSettings(memory_gib=1.0)
    settings = SandboxSettings(limits=limits, seconds_unowned=7, pool=pool)
    host = await open_host(settings)
    try:
        spec = settings.spec(workdir="/tmp", labels={"task": "a"})
        assert (spec.seconds_unowned, spec.workdir, spec.labels) == (7, "/tmp", {"task": "a"})
        sandbox = await host.start(spec)
        result = await sandbox.run("pwd; head -c 20M /dev/zero > /tmp/x")
        assert result.stdout.text() == "/tmp\n"
        assert b"No space left" in result.stderr.head
        with pytest.raises(SandboxUnavailable, match="can never start"):
            await host.start(settings.spec(limits=Limits(memory_mib=2048)))
    finally:
        await host.close()
