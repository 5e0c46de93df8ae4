"""The program that runs an environment's command: `python guardian.py OWNER_PID FOLDER COMMAND ARGUMENT...`.

It adopts every process that the command leaves behind, so that none outlives the environment. It exits as the command
does, with 128 + N if signal N ended that. FOLDER, unless it is empty, is removed if the owner ends first: an owner that
was killed cannot remove it. The guardian imports nothing of goaly, and adds 50 ms to a start.

    environments-1: No process that the command started, directly or not, is left when the command ends, when the owner
        ends for any reason, or when the guardian gets SIGTERM. Nor is the FOLDER of an owner that ends before its
        command.
"""

import ctypes
import os
import select
import signal
import stat
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(owner: int, folder: str, command: list[str]) -> int:
    """Run the command until it or the owner ends; returns the exit code."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the command would inherit
    held = os.open(folder, os.O_PATH) if folder else None
    guardian = os.getpid()
    child = os.fork()
    if child == 0:
        _become(libc, guardian, command)
    _let_go(keep=(woken, wake) if held is None else (woken, wake, held))
    ended: dict[int, int] = {}
    try:
        _wait(owner, woken, child, ended)
    finally:
        _sweep(ended)
        if held is not None and os.getppid() != owner and _is(folder, held):
            remove(folder)
    status = os.waitstatus_to_exitcode(ended[child])
    return status if status >= 0 else 128 - status


def remove(folder: str) -> None:
    """Delete a folder and all that is in it, also what its owner may not change; what cannot be deleted stays."""
    import shutil  # slow to import, and most guardians need no folder

    for parent, names, _ in os.walk(folder):
        for name in names:
            if not os.path.islink(path := os.path.join(parent, name)):
                with suppress(OSError):
                    os.chmod(path, stat.S_IRWXU)  # such as Go's module cache, whose folders are read-only
    shutil.rmtree(folder, ignore_errors=True)


def _is(folder: str, held: int) -> bool:
    """Whether the folder is the one that was there at the start: the owner's successor may have made its own."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(folder), os.fstat(held))
    return False


def _become(libc: ctypes.CDLL, guardian: int, command: list[str]) -> None:
    try:
        os.setsid()
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == guardian:
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def _let_go(keep: tuple[int, ...]) -> None:
    """Close the command's pipes and sockets here, so that their other ends notice when the command is gone."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) != 2 and int(name) not in keep:
            with suppress(OSError):  # of the descriptor with which the folder was listed
                os.close(int(name))


def _wait(owner: int, woken: int, child: int, ended: dict[int, int]) -> None:
    """Return when the owner or the child has ended, or at SIGTERM."""
    try:
        owner_ended = os.pidfd_open(owner)
    except ProcessLookupError:
        return
    if os.getppid() != owner:  # the owner is gone, and another process may have its id
        return
    while child not in ended:
        ready, _, _ = select.select([owner_ended, woken], [], [])
        if owner_ended in ready or signal.SIGTERM in os.read(woken, 4096):
            return
        while (found := _reap(os.WNOHANG, ended)) is not None and found > 0:
            pass


def _sweep(ended: dict[int, int]) -> None:
    """Kill all descendants: a process that loses its parent becomes a child of this process (environments-1)."""
    while True:
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        if _reap(0, ended) is None:
            return


def _reap(options: int, ended: dict[int, int]) -> int | None:
    """Collect a child that has ended; 0 if none has, None if there are no children."""
    try:
        pid, status = os.waitpid(-1, options)
    except ChildProcessError:
        return None
    ended[pid] = status
    return pid


def _children() -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as status:
                    parent = int(status.read().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has ended meanwhile
            if parent == os.getpid():
                found.append(int(name))
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
