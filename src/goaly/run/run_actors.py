"""Spawns the actors of a run: those of the hub once, those of the other roles again when they are replaced."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch.actor import ProcMesh

from goaly.base.actors import spawn
from goaly.generate.generator import Generator
from goaly.journal.logged_queue import LoggedQueue
from goaly.live.gated_run import GatedRun
from goaly.plan.placement import Placed, Processes
from goaly.plan.run_config import RunConfig
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.reward.pool_actor import RewardPool
from goaly.rollout.rollout_worker import RolloutWorker
from goaly.run.hosts import Hosts
from goaly.run.rendezvous import rendezvous
from goaly.run.replaceable_actors import ReplaceableActors
from goaly.train.critic import CriticModel
from goaly.train.reference import ReferenceModel
from goaly.train.trainer import PolicyTrainer
from goaly.weights.store import WeightStore

HUB_ACTORS = ("store", "rewards", "queue")
"""Actors of the hub's process; those of other processes have the name of their process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """The actors of the hub, which those of all other roles call."""

    store: WeightStore
    queue: LoggedQueue
    rewards: RewardPool | None


def process_of(actor: str) -> str:
    """The name of the process that this actor, or this process, is or runs in."""
    name, dash, number = actor.partition("-")
    return f"hub{dash}{number}" if name in HUB_ACTORS else actor


class RunActors:
    """The actors of one run, by role. `name` is that of their processes: the planned one, or a replacement's. Actors
    call those of the present hub; if that is being replaced, their spawn waits for the next one."""

    def __init__(
        self,
        config: RunConfig,
        hosts: Hosts,
        planned: Mapping[str, Processes],
        places: Mapping[str, Placed],
        episode: bytes,
        sessions: Path,
        listeners: Sequence[str] = (),
    ):
        """Spawns all planned processes, and the actors of the hub. `sessions` is for `SessionFiles`; `listeners` names
        the workers' sockets, if the controller keeps them."""
        self._config = config
        self._hosts = hosts
        self._planned = planned
        self._places = places
        self._episode = episode
        self._sessions = sessions
        self._listeners = listeners
        self.gate: GatedRun | None = None
        """Decides with which version a generator starts."""
        for name in planned:
            self.mesh(name)
        self.hub = ReplaceableActors("hub", self.new_hub("hub"))

    def new_hub(self, name: str) -> Hub:
        """The actors of a hub process."""
        config, mesh, number = self._config, self.mesh("hub", name), name.removeprefix("hub")
        rewards = None
        if config.reward.placement == "hub":
            rewards = spawn(mesh, f"rewards{number}", RewardPool, config.reward, config.evaluation.verifiers)
        replaces_writers = "trainer" in replaced_roles(config)
        return Hub(
            store=spawn(mesh, f"store{number}", WeightStore, config.weights, replaces_writers=replaces_writers),
            queue=trajectory_queue(mesh, config, steps=config.steps, name=f"queue{number}"),
            rewards=rewards,
        )

    async def trainer(self, name: str = "trainer") -> PolicyTrainer:
        """The ranks that train the policy."""
        mesh = await self._joined("trainer", name)
        hub = await self.hub.present()
        return policy_trainer(mesh, self._config, hub.store, hub.queue, name)

    async def reference(self, name: str = "reference") -> ReferenceModel | None:
        """The ranks of the reference model, if the run has one."""
        config = self._config
        if not config.uses_reference:
            return None
        mesh = await self._joined("reference", name)
        hub = await self.hub.present()
        frozen = (config.reference, config.trainer, config.model, hub.queue, config.weights, hub.store, config.loss)
        return spawn(mesh, name, ReferenceModel, *frozen, compares=config.uses_kl)

    async def critic(self, name: str = "critic") -> CriticModel | None:
        """The ranks of the critic, if the run has one."""
        config = self._config
        if config.critic is None:
            return None
        mesh = await self._joined("critic", name)
        hub = await self.hub.present()
        return spawn(mesh, name, CriticModel, config.critic, config.trainer, config.model, hub.queue)

    async def rollout(self, index: int, name: str | None = None) -> RolloutWorker:
        """A rollout worker, which runs the script's episode."""
        config, planned = self._config, f"rollout-{index}"
        hub = await self.hub.present()
        worker: Any = RolloutWorker
        options: dict[str, Any] = {}
        if config.live is not None:
            from goaly.live.worker import LiveWorker  # imports starlette

            worker, options = LiveWorker, {"live": config.live, "replicas": config.generator.replicas}
        return spawn(
            self.mesh(planned, name),
            name or planned,
            worker,
            name or planned,
            config.rollout,
            self._episode,
            queue=hub.queue,
            rewards=hub.rewards or config.reward,
            verifiers=config.evaluation.verifiers,
            tokenizer=config.model.path,
            chat=config.chat,
            sampling=config.sampling,
            group_size=config.backlog.group_size,
            max_context=config.max_context,
            evaluation_context=config.generator.max_context,
            first_replica=index,
            sessions=self._sessions,
            listener=self._listeners[index] if self._listeners else None,
            seed=config.generator.seed,
            **options,
        )

    async def generator(self, name: str) -> Generator:
        """The ranks of a generator replica; `generator-0-1` takes the place of `generator-0`."""
        config, replica = self._config, int(name.split("-")[1])
        first = f"generator-{replica}"
        mesh = self.mesh(first, name) if config.generator.tp == 1 else await self._joined(first, name)
        hub = await self.hub.present()
        model, options = (config.model, {}) if self.gate is None else self.gate.start_of(name, config.model)
        served = (config.generator, model, hub.store, replica, config.weights)
        return spawn(
            mesh,
            name,
            Generator,
            *served,
            records_choices=config.moe.replays,
            lora=config.trainer.lora,
            chat=config.chat,
            **options,
        )

    def count(self, planned: str) -> int:
        """The number of processes of a role."""
        return self._planned[planned].count

    def mesh(self, planned: str, name: str | None = None) -> ProcMesh:
        """The planned processes, or those of another name in their place; started if they are not."""
        processes = self._planned[planned]
        return self._hosts.spawn(dataclasses.replace(processes, name=name or planned), self._places[planned])

    async def _joined(self, planned: str, name: str) -> ProcMesh:
        """These processes, once they have found each other, so that they can form a torch process group."""
        mesh = self.mesh(planned, name)
        await rendezvous(mesh, name)
        return mesh


def trajectory_queue(hub: ProcMesh, config: RunConfig, steps: int | None = None, name: str = "queue") -> LoggedQueue:
    """The queue of a run of `steps` steps; without `steps` it admits groups without end."""
    return spawn(
        hub,
        name,
        LoggedQueue,
        config.backlog,
        config.advantages,
        dp_ranks=config.trainer.fsdp,
        pad_token=ChatTokenizer(config.model.path).pad_token,
        steps=steps,
        minibatches=config.trainer.minibatches,
        taught=config.loss.taught,
        snapshot_every=config.checkpoint.every,
    )


def policy_trainer(
    mesh: ProcMesh, config: RunConfig, store: WeightStore, queue: LoggedQueue, name: str = "trainer"
) -> PolicyTrainer:
    """The ranks of a run's trainer."""
    policy = (config.trainer, config.model, config.loss, config.weights, store, queue, config.moe)
    return spawn(mesh, name, PolicyTrainer, *policy, earlier_policies=config.earlier_policies)


def replaced_roles(config: RunConfig) -> set[str]:
    """The roles, beside the generators, whose processes are replaced when one dies. The death of another process ends
    the run, which then resumes itself."""
    if config.checkpoint.restarts == 0:
        return set()
    roles = {"rollout", "reference", "critic"}
    if config.weights.transport != "torchstore":  # its volumes are in the trainer's processes, which die with the hub
        roles |= {"trainer", "hub"}
    return roles
