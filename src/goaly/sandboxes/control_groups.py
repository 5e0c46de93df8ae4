"""Limits of sandboxes by control groups, version 1 or 2, where this user may write them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from goaly.sandboxes.contract import Limits

PERIOD = 100_000
ROOT = Path("/sys/fs/cgroup")
PREFIX = "goaly-"
"""Control groups of sandboxes begin so."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A tree of control groups, and the resources that it can limit."""

    root: Path
    resources: frozenset[str]
    version: int


@cache
def hierarchies() -> tuple[Hierarchy, ...]:
    """The trees in which this process can limit something; none for most ordinary users."""
    found = []
    if (ROOT / "cgroup.controllers").exists() and os.access(ROOT / "cgroup.subtree_control", os.W_OK):
        enabled = (ROOT / "cgroup.subtree_control").read_text().split()
        found.append(Hierarchy(ROOT, frozenset(enabled) & {"memory", "pids", "cpu"}, 2))
    for resource in ("memory", "pids", "cpu"):
        if os.access(ROOT / resource / "cgroup.procs", os.W_OK):
            found.append(Hierarchy(ROOT / resource, frozenset({resource}), 1))
    return tuple(found)


def unlimited() -> set[str]:
    """The resources that only rlimits can limit here."""
    return {"memory", "pids", "cpu"} - {name for tree in hierarchies() for name in tree.resources}


def groups_of(name: str, limits: Limits) -> list[str]:
    """The fields of a start request: each group's folder, and `file=value` for what it limits."""
    fields = []
    memory, cpu = limits.memory_mib << 20, int(limits.cpus * PERIOD)
    for tree in hierarchies():
        fields.append(str(tree.root / name))
        for resource in sorted(tree.resources):
            if resource == "pids":
                fields.append(f"pids.max={limits.processes}")
            elif resource == "memory" and tree.version == 2:
                fields += [f"memory.max={memory}", "memory.swap.max=0"]
            elif resource == "memory":
                fields.append(f"memory.limit_in_bytes={memory}")
            elif tree.version == 2:
                fields.append(f"cpu.max={cpu} {PERIOD}")
            else:
                fields.append(f"cpu.cfs_quota_us={cpu}")
    return fields


def memory_kills(name: str) -> int:
    """How often the kernel has killed a process of this group for its memory."""
    for tree in hierarchies():
        if "memory" in tree.resources:
            path = tree.root / name / ("memory.events" if tree.version == 2 else "memory.oom_control")
            try:
                words = path.read_text().split()
            except OSError:
                return 0
            return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0
    return 0
