"""The versions of a policy that a gate decides on: in the weight store, at the replicas of both arms, in the trainer.

    RUN/gate/000120/policy     a version as a Hugging Face folder, with which a replica of its arm can start
    RUN/gate/000120/trainer    the trainer's state of that version, with the optimizer's, to which it can go back

There is a folder for the served version and one for the candidate. A folder is written before its version is tried.
"""

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from goaly.base.actors import SupervisionError
from goaly.base.errors import RunFailed
from goaly.live.decision import Decision
from goaly.live.gate_records import Decided
from goaly.live.traffic_split import Arm

if TYPE_CHECKING:
    from goaly.generate.generator import Generator
    from goaly.weights.store import WeightStore

logger = logging.getLogger(__name__)

GATE_FOLDER = "gate"
"""In the folder of the run."""
POLICY, TRAINER = "policy", "trainer"


class GatedTrainer(Protocol):
    """The trainer, as `TrainerStage` is."""

    async def published_above(self, version: int) -> int:
        """Wait until a version above this one is published; the newest."""
        ...

    async def stage_policy(self, folder: Path) -> int:
        """Write the policy to this folder, and copy the state aside; its version."""
        ...

    async def write(self, folder: Path) -> None:
        """Write the copy to this folder."""
        ...

    async def go_back(self, folder: Path) -> int:
        """Take the state in this folder; the present version."""
        ...


Beside = Callable[[Callable[[], Awaitable[int]], Callable[[], Awaitable[None]]], Awaitable[int]]
"""Copies and writes state where no checkpoint uses the copy, as `RunCheckpoints.beside`."""


class GatedVersions:
    """A `GatedPolicy` over the actors of a run."""

    def __init__(
        self,
        store: "Callable[[], Awaitable[WeightStore]]",
        trainer: GatedTrainer,
        replicas: "Callable[[Arm], Iterable[Generator]]",
        folder: Path,
        *,
        beside: Beside,
        after_return: Callable[[int], Awaitable[None]],
        on_trial: Callable[[int | None], None],
        stop: Callable[[], Awaitable[None]],
    ):
        """`store` and `replicas` give the present actors. `after_return` gets the trainer's version once it has gone
        back, and returns when a restart would find that state. `on_trial` gets the candidate whose replicas serve it,
        and None when its trial has ended. `stop` ends training."""
        self._store = store
        self._trainer = trainer
        self._replicas = replicas
        self._folder = folder
        self._beside = beside
        self._after_return = after_return
        self._on_trial = on_trial
        self._stop = stop

    async def serve(self, version: int) -> None:
        """Let the served arm have this version; returns once all of its replicas decode with it."""
        if not (self._kept(version) / TRAINER).is_dir():
            kept = await self._keep()  # the first version, before any training
            if kept != version:
                raise RunFailed(f"the state of the served version {version} is lost: the trainer is at {kept}")
        await self._point(Arm.SERVED, version)

    async def candidate(self, after: int) -> int:
        """Wait for a version above `after`, keep it, and let the candidate's arm have it."""
        while True:
            await self._trainer.published_above(after)
            version = await self._keep()
            await self._trainer.published_above(version - 1)  # its publish may follow
            if await self._point(Arm.CANDIDATE, version):
                self._on_trial(version)
                return version
            logger.info("version %d was overwritten before it became the candidate", version)
            self._forget(version)

    async def resume(self, candidate: int) -> bool:
        """Let the candidate's arm have this version again after a restart; False if the store does not have it."""
        is_there = await self._point(Arm.CANDIDATE, candidate)
        self._on_trial(candidate if is_there else None)
        return is_there

    async def roll_back(self, version: int) -> int:
        """Give the trainer the state of this version; the newest version that it had published before."""
        newest = await self._trainer.go_back(self._kept(version) / TRAINER)
        await self._after_return(newest)
        logger.info("the trainer has gone back from version %d to the state of version %d", newest, version)
        return newest

    async def stop_training(self) -> None:
        """Train no more."""
        await self._stop()

    def decided(self, decision: Decided) -> None:
        """Keep only the served version."""
        self._on_trial(None)
        is_promoted = decision.decision is Decision.PROMOTED
        self._forget(decision.served if is_promoted else decision.candidate)

    async def _point(self, arm: Arm, version: int) -> bool:
        """Point the arm's track to this version, and wait for its replicas; False if the store does not have it."""
        store = await self._store()
        if version not in (await store.state.call_one()).versions or not await store.point.call_one(arm.value, version):
            return False
        await asyncio.gather(*(_decodes(replica, version) for replica in self._replicas(arm)))
        return True

    async def _keep(self) -> int:
        """Keep the trainer's present version; its number."""
        writing = self._folder / ".writing"
        await asyncio.to_thread(shutil.rmtree, writing, ignore_errors=True)
        writing.mkdir(parents=True)
        version = await self._beside(
            partial(self._trainer.stage_policy, writing / POLICY), partial(self._trainer.write, writing / TRAINER)
        )
        await asyncio.to_thread(shutil.rmtree, self._kept(version), ignore_errors=True)
        writing.rename(self._kept(version))
        return version

    def _kept(self, version: int) -> Path:
        return kept_version(self._folder, version)

    def _forget(self, version: int) -> None:
        shutil.rmtree(self._kept(version), ignore_errors=True)


def kept_version(folder: Path, version: int) -> Path:
    """The folder of a version in the gate's folder."""
    return folder / f"{version:06d}"


async def _decodes(replica: "Generator", version: int) -> None:
    with suppress(SupervisionError):  # the one that replaces it starts with the track's version (generate-8)
        await replica.version_at_least.call_one(version)
