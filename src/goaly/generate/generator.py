"""The generator: an actor around a vLLM engine, which a thread steps and which follows the weight store.

A replica is a mesh of `tp` of these actors. Requests go to rank 0; the other ranks follow it.

When `start` returns, the store knows the tensors that every rank needs: the first publish fixes how weights are
divided. The requests of a client on this host end with its process, or its socket.

    generate-8: `start` returns with the store's newest version applied, or that of its track: a replacement serves no
        older weights. It does not wait for a trainer that is being replaced.
    generate-9: A rank that can no longer follow the weights ends its process (base-1), and with it its replica. The
        end of the writers is no failure: the replica serves the last version.
"""

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from monarch.actor import Actor

from goaly.base.actors import concurrent_endpoint
from goaly.base.errors import ReplicaLost
from goaly.base.process import vital_task
from goaly.base.telemetry import spans
from goaly.generate.connection import (
    Clients,
    Isolate,
    Leave,
    Quarantine,
    Results,
    Submit,
    ToReplica,
    Ways,
    Withdraw,
    client_of,
    own_name,
)
from goaly.generate.engine_loop import EngineLoop, RankLink, Result
from goaly.generate.request import GeneratorStats, Request, Sample
from goaly.generate.settings import GeneratorSettings
from goaly.generate.versioned_tokens import VersionedTokens
from goaly.generate.weight_follower import WeightFollower
from goaly.models.settings import LoraSettings, ModelSettings
from goaly.prompts.settings import ChatSettings
from goaly.weights.settings import WeightSettings

if TYPE_CHECKING:
    from goaly.generate.vllm_engine import VllmEngine
    from goaly.weights.store import WeightStore
    from goaly.weights.subscriber import Subscriber
    from goaly.weights.versions import StoreState


class Generator(Actor):
    """Samples from the policy. The constructor is cheap; `start` builds the engine, without which requests fail."""

    def __init__(
        self,
        settings: GeneratorSettings,
        model: ModelSettings,
        store: "WeightStore | None" = None,
        replica: int = 0,
        weights: WeightSettings | None = None,
        records_choices: bool = False,
        lora: LoraSettings | None = None,
        chat: ChatSettings | None = None,
        track: str | None = None,
        version: int = 0,
    ):
        """Without a `store` the weights of the model folder are never updated. With `records_choices`, samples have the
        experts that were chosen for their tokens. With `lora`, the store has adapters of these settings. A grammar
        begins after the reasoning that the parser of `chat` finds. With a `track` it decodes with the versions that
        the store's track points to, in place of the newest. The model folder has policy version `version`."""
        self._settings = settings
        self._model = model
        self._store = store
        self._replica = replica
        self._weight_settings = weights or WeightSettings()
        self._options: dict[str, Any] = {"records_choices": records_choices, "lora": lora, "chat": chat}
        self._track = track
        self._version = version
        self._rank = 0
        self._engine: VllmEngine | None = None
        self._engine_loop: EngineLoop | None = None
        self._follower: WeightFollower | None = None
        self._following: asyncio.Task[None] | None = None
        self._clients = Clients(self._told)
        self._unsent: dict[str, Results] = {}
        """The results of this round of the engine, by client."""
        self._quarantine = Quarantine()
        self._events: asyncio.AbstractEventLoop  # from `start` on
        self._gone: set[str] = set()
        """Clients that have left: what they sent before may arrive later."""
        self._closed = asyncio.Event()

    @concurrent_endpoint
    async def start(self) -> int:
        """Build the engine from the model folder and catch up with the store; the version that decodes then."""
        from goaly.generate.vllm_engine import VllmEngine  # vLLM takes seconds to import

        self._events = asyncio.get_running_loop()
        settings = self._settings
        seed = settings.seed + self._replica
        engine = await asyncio.to_thread(VllmEngine, settings, self._model, seed=seed, **self._options)
        engine.version = self._version
        self._engine = engine
        engine.enter_thread()  # this thread prefetches updates into the engine's GPU
        commands, announcements = (RankLink(), RankLink()) if settings.tp > 1 else (None, None)
        if self._store is None:
            # Its weights never change.
            version = self._version
            self._engine_loop = EngineLoop(engine, settings, lambda: version, commands, self._send_round)
            return version
        self._rank = 0 if commands is None else commands.rank
        subscriber = await self._joined(self._store, engine)
        self._engine_loop = loop = EngineLoop(engine, settings, lambda: follower.apply(), commands, self._send_round)
        self._follower = follower = WeightFollower(subscriber, loop, announcements)
        if self._rank == 0:
            while self._offered(await self._store.state.call_one()) > loop.version:  # generate-8
                await follower.catch_up()
        self._following = vital_task(follower.run(), "weight follower")  # generate-9
        return loop.version

    @concurrent_endpoint
    async def follow(self, store: "WeightStore") -> None:
        """Follow this store, which replaces one that died, or whose writers are gone."""
        assert self._engine is not None, "start comes first"
        assert self._follower is not None
        assert self._following is not None
        self._store = store
        versions = await self._joined(store, self._engine)
        if self._store is store:
            self._follower.use(versions)
            if self._following.done():  # generate-9
                self._following = vital_task(self._follower.run(), "weight follower")
        else:  # that one has died, too
            versions.drop()

    @concurrent_endpoint
    async def connect(self, client: str, ways: Ways) -> None:
        """Send this client's samples through its ways until the engine ends; see `Connection`."""
        await self._clients.serve(client, ways, self._closed)  # `close` sets it

    @concurrent_endpoint
    async def tell(self, client: str, message: ToReplica) -> None:
        """Do what a client on another host tells this replica."""
        self._told(client, message)

    @concurrent_endpoint
    async def version_at_least(self, version: int) -> int:
        """Wait until weights of at least this version decode; returns their version."""
        return await self._started_loop().version_at_least(version)

    @concurrent_endpoint
    async def stats(self) -> GeneratorStats:
        """Counts since the start."""
        stats, follower = self._started_loop().stats(), self._follower
        if follower is None:
            return stats
        return replace(stats, verified_updates=follower.verified_updates)

    @concurrent_endpoint
    async def close(self) -> None:
        """End the engine; running requests fail."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        if self._engine_loop is not None:
            await self._engine_loop.stop()
        self._closed.set()
        spans.flush()

    def _offered(self, store: "StoreState") -> int:
        """The version that this replica must have when it serves."""
        if self._track is not None:
            return store.tracks.get(self._track, 0)  # if that one is gone, it waits for the next
        return max(store.versions, default=0)

    async def _joined(self, store: "WeightStore", engine: "VllmEngine") -> "Subscriber":
        from goaly.weights.subscriber import Subscriber

        subscriber = Subscriber(
            store,
            engine.named_tensors(),
            f"generator-{self._replica}.{self._rank}",
            self._weight_settings,
            live=engine.live_tensors(),
            naming=engine.naming(),
            track=self._track,
        )
        await subscriber.join()
        return subscriber

    def _told(self, client: str, message: ToReplica) -> None:
        match message:
            case Submit(requests):
                self._submit(client, requests)
            case Isolate(request_id) if client not in self._gone:
                self._quarantine.enter(request_id, partial(self._clients.send, client, [(request_id, None)]))
            case Withdraw(request_ids):
                self._cancel(request_ids)
            case Leave():
                self._gone.add(client)
                self._clients.disconnect(client)
                running = () if self._engine_loop is None else self._engine_loop.requests
                self._cancel([name for name in {*running, *self._quarantine.suspects} if client_of(name) == client])

    def _submit(self, client: str, requests: list[Request]) -> None:
        """Sample answers to these requests. Each waits until the weights are at least of its `min_version`.

        The client gets an invalid request's error in place of a sample.
        """
        if client in self._gone:
            return
        refused: Results = []
        for request in requests:
            try:
                self._started_loop().submit(request, partial(self._deliver, client, time.time_ns()))
            except (ReplicaLost, ValueError) as error:
                self._quarantine.leave(request.request_id)
                refused.append((request.request_id, error))
        if refused:
            self._clients.send(client, refused)

    def _cancel(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._quarantine.leave(request_id)
        if self._engine_loop is not None:
            self._engine_loop.cancel(request_ids)

    def _started_loop(self) -> EngineLoop:
        if self._engine_loop is None:
            raise ReplicaLost("the generator has not started")
        return self._engine_loop

    def _deliver(self, client: str, started_ns: int, request_id: str, result: Result) -> None:
        self._unsent.setdefault(client, []).append((request_id, result))
        if isinstance(result, VersionedTokens):
            return
        if request_id in self._quarantine.suspects:
            self._events.call_soon_threadsafe(self._quarantine.leave, request_id)
        noted = {"tokens": len(result.tokens)} if isinstance(result, Sample) else {"error": type(result).__name__}
        spans.record("generation", started_ns, time.time_ns(), request=own_name(request_id), **noted)

    def _send_round(self) -> None:
        """In the engine's thread: its event loop may be busy, and would interrupt the next step."""
        results, self._unsent = self._unsent, {}
        for client, of_client in results.items():
            self._clients.send(client, of_client)
