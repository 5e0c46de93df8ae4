"""Sandboxes of this machine: `python -m goaly.sandboxes check [SOCKET]`, `list` or `reap`.

check   tries what a sandbox must keep in, and says what works, also of a daemon of containers at SOCKET
list    the live sandboxes of this user, with their labels
reap    removes what sandboxes of dead processes have left, and says what it removed
"""

import asyncio
import os
import sys

from goaly.sandboxes.compiler import compilers
from goaly.sandboxes.container_check import checked
from goaly.sandboxes.contract import Limits, SandboxError, SandboxSpec
from goaly.sandboxes.control_groups import hierarchies, unlimited
from goaly.sandboxes.namespaces import NamespaceHost
from goaly.sandboxes.reaper import live_sandboxes, reap
from goaly.sandboxes.settings import ContainerSettings


async def check(address: str) -> int:
    """Start sandboxes and try what they must keep in; print what works. 0 if those of namespaces run here."""
    works = await check_namespaces()
    first, *more = await checked(ContainerSettings(socket=address))
    print(f"containers      {first}")
    for line in more:
        print(f"                {line}")
    return 0 if works else 1


async def check_namespaces() -> bool:
    """Print what works of namespaces; whether sandboxes run."""
    found = compilers() or [["none: install gcc or clang, or `pip install ziglang`"]]
    print(f"compiler        {' '.join(found[0])}")
    trees = ", ".join(f"{'+'.join(sorted(tree.resources))} (version {tree.version})" for tree in hierarchies())
    print(f"control groups  {trees or 'none that this user may write'}")
    if missing := unlimited():
        print(f"                not limited for a sandbox as a whole: {', '.join(sorted(missing))}")
    try:
        host = await NamespaceHost.open()
    except SandboxError as error:
        print(f"namespaces      no: {error}")
        return False
    try:
        sandbox = await host.start(SandboxSpec(limits=Limits(memory_mib=256, disk_mib=64, processes=64)))
        said = await sandbox.run("grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/self/status; id -u")
        owner = "another user than root on the host" if os.geteuid() == 0 else "this user on the host"
        print(f"namespaces      yes: {' '.join(said.stdout.text().split())}; {owner}")
    except SandboxError as error:
        print(f"namespaces      no: {error}")
        return False
    finally:
        await host.close()
    return True


def print_live() -> int:
    """Print a line for each live sandbox."""
    live = live_sandboxes()
    for one in live:
        labels = " ".join(f"{key}={value}" for key, value in one.labels.items())
        state = "in use" if one.owned else "left"
        print(f"pid {one.pid:<8} of {one.starter:<8} {one.seconds:>6} s  {state:<8} {labels}")
    print(f"{len(live)} sandboxes live on this host")
    return 0


def print_removed() -> int:
    """Remove leftovers and print them."""
    removed = reap()
    for name in removed:
        print(f"removed {name}")
    print(f"removed {len(removed)} leftovers of dead processes")
    return 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["check", *address] if len(address) < 2:
            sys.exit(asyncio.run(check(*address or [ContainerSettings().socket])))
        case ["list"]:
            sys.exit(print_live())
        case ["reap"]:
            sys.exit(print_removed())
        case _:
            sys.exit(__doc__)
