"""Serves a policy outside of training: generators in processes of their own, and the HTTP endpoint in this one.

A generator that dies is replaced (generate-11); one that dies again and again ends the server. However the block is
left, no process of the server is left.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from goaly.agents.answer_parser import AnswerParser
from goaly.agents.public_gateway import PublicGateway
from goaly.base.actors import spawn
from goaly.base.errors import RunFailed
from goaly.generate.generator import Generator
from goaly.generate.request import Sampling
from goaly.generate.router import Router
from goaly.generate.service import GeneratorService
from goaly.plan.placement import Processes, place
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.run.hosts import Hosts
from goaly.run.policy_server_config import PolicyServerConfig
from goaly.run.policy_source import PolicySource
from goaly.run.rendezvous import rendezvous

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
LOOK_SECONDS = 1.0
"""Time between two looks at the file that names a run's weight store."""


@asynccontextmanager
async def serving(config: PolicyServerConfig, folder: Path) -> AsyncIterator[PublicGateway]:
    """An endpoint that answers; its processes log to this folder. A failure that ends the server is raised from the
    block."""
    policy = PolicySource(config.start_model, None if config.run is None else Path(config.run))
    chat = ChatTokenizer(config.start_model.path, config.chat_settings)
    parser, router = AnswerParser(chat, config.chat_settings), Router()
    gateway = PublicGateway(
        config.host,
        config.port,
        tokens=config.tokens,
        chat=chat,
        parser=parser,
        sampling=Sampling.of(config.sampling, chat.stop_token_ids),
        max_context=config.generator.max_context,
        sampler=router,
    )
    try:
        gateway.listen()
    except OSError as error:
        raise RunFailed(f"host={config.host} port={config.port}: {error.strerror or error}") from error

    async def announce(replicas: Mapping[str, Generator]) -> None:
        router.update(replicas)
        gateway.is_open = bool(replicas)

    replicas = _Replicas(config, policy, folder)
    service = GeneratorService(
        replicas=config.generator.replicas,
        spawn=replicas.spawn,
        kill=replicas.hosts.kill,
        announce=announce,
        start_minutes=config.generator.start_minutes,
    )
    replicas.on_death = service.lost
    try:
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(replicas.follow(service), name="follow the run")]
            await replicas.place()
            async with asyncio.TaskGroup() as starts:
                starts.create_task(gateway.start(parser))
                starts.create_task(service.start())
            beside.append(tasks.create_task(service.supervise(), name="replace generators"))
            yield gateway
            for task in beside:
                task.cancel()
    finally:
        await _close(gateway.close())
        router.update({})
        await _close(service.close())
        await replicas.hosts.stop_all()


class _Replicas:
    """Spawns generators with the policy of the moment."""

    def __init__(self, config: PolicyServerConfig, policy: PolicySource, folder: Path):
        self.on_death: Callable[[str, str], Any] = lambda name, report: None
        self.hosts = Hosts(config.hosts, folder, lambda *death: self.on_death(*death), trace=False)
        self._config = config
        self._policy = policy
        self._store = policy.store()
        self._alone: set[str] = set()
        """The replicas that follow no run."""
        generator = config.generator
        tp, threads = generator.tp, generator.threads
        self._planned = [
            Processes(name=f"generator-{replica}", role="generator", count=tp, threads=threads, group=tp)
            for replica in range(generator.replicas)
        ]

    async def place(self) -> None:
        """Find a place for each process; ConfigError if they do not fit."""
        self._places = place(self._planned, self._config.hosts, await self.hosts.cluster())

    async def spawn(self, name: str) -> Generator:
        """The ranks of a replica; `generator-0-1` takes the place of `generator-0`."""
        number = int(name.split("-")[1])
        planned, placed = self._planned[number], self._places[self._planned[number].name]
        mesh = self.hosts.spawn(replace(planned, name=name), placed)
        if planned.count > 1:
            await rendezvous(mesh, name)
        store, settings, chat = self._store, self._config.generator, self._config.chat_settings
        if store is None:
            self._alone.add(name)
            return spawn(mesh, name, Generator, settings, self._policy.at_rest(), replica=number, chat=chat)
        model, weights, lora = self._policy.followed()
        return spawn(mesh, name, Generator, settings, model, store, number, weights, lora=lora, chat=chat)

    async def follow(self, service: GeneratorService) -> None:
        """Have the replicas follow the weight store that the run has at the time, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            store, before = self._policy.store(), self._store
            if store is before:
                continue
            self._store = store
            if store is None:
                logger.warning("the run is not under way any more; its last policy is served")
                service.lose_starting("the run ended while it started")
                continue
            logger.warning("the run is under way; its newest policy is served")
            for name in self._alone:
                service.lost(name, "it has the policy that the run saved, and the run goes on")
            self._alone.clear()
            await service.follow(store)


async def _close(closing: Coroutine[Any, Any, None]) -> None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await closing
    except Exception as error:  # what is dead cannot be closed and need not be
        logger.info("closing: %s", error)
