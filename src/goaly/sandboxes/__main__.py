"""Checks whether sandboxes run on this machine: `python -m goaly.sandboxes check`."""

import asyncio
import os
import sys

from goaly.sandboxes.compiler import compilers
from goaly.sandboxes.contract import Limits, SandboxError, SandboxSpec
from goaly.sandboxes.control_groups import hierarchies, unlimited
from goaly.sandboxes.namespaces import NamespaceHost

USAGE = "usage: python -m goaly.sandboxes check"


async def check() -> int:
    """Start a sandbox and try what it must keep in; print what works. 0 if sandboxes run here."""
    found = compilers() or [["none: install gcc or clang, or `pip install ziglang`"]]
    print(f"compiler        {' '.join(found[0])}")
    trees = ", ".join(f"{'+'.join(sorted(tree.resources))} (version {tree.version})" for tree in hierarchies())
    print(f"control groups  {trees or 'none that this user may write'}")
    if missing := unlimited():
        print(f"                not limited for a sandbox as a whole: {', '.join(sorted(missing))}")
    try:
        host = await NamespaceHost.open()
    except SandboxError as error:
        print(f"sandboxes       no: {error}")
        return 1
    try:
        sandbox = await host.start(SandboxSpec(limits=Limits(memory_mib=256, disk_mib=64, processes=64)))
        said = await sandbox.run("grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/self/status; id -u")
        owner = "another user than root on the host" if os.geteuid() == 0 else "this user on the host"
        print(f"sandboxes       yes: {' '.join(said.stdout.text().split())}; {owner}")
    except SandboxError as error:
        print(f"sandboxes       no: {error}")
        return 1
    finally:
        await host.close()
    return 0


if __name__ == "__main__":
    if sys.argv[1:] != ["check"]:
        sys.exit(USAGE)
    sys.exit(asyncio.run(check()))
