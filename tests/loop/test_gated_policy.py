"""The gate over real actors: a trainer, a weight store and two generators. A version that poisoned batches made worse
is not promoted, the trainer goes back to the served version, and a later one is promoted (live-2)."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from monarch.actor import Actor, concurrent_endpoint
from spawned import spawn

from goaly.agents.answer_parser import AnswerParser
from goaly.backlog.batch import BatchHandle
from goaly.generate.generator import Generator
from goaly.generate.request import Sample, Sampling
from goaly.generate.router import Router
from goaly.generate.settings import GeneratorSettings
from goaly.journal.checkpoint_folder import Checkpoints
from goaly.journal.checkpoint_settings import CheckpointSettings
from goaly.live.canary_questions import CanaryQuestions
from goaly.live.decision import Decision
from goaly.live.gate import Gate
from goaly.live.gate_records import Decided, GateLog, gate_records
from goaly.live.gate_settings import GateSettings
from goaly.live.gated_policy import GatedVersions
from goaly.live.promotion import Promotion
from goaly.live.traffic_split import Arm
from goaly.losses.settings import LossSettings
from goaly.models.settings import ModelSettings
from goaly.prompts.prompt import Message, Prompt
from goaly.prompts.settings import ChatSettings
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.run.replaceable_actors import ReplaceableActors
from goaly.run.run_checkpoints import RunCheckpoints
from goaly.run.trainer_stage import TrainerStage
from goaly.train.settings import OptimizerSettings, TrainerSettings
from goaly.train.trainer import PolicyTrainer
from goaly.trajectory import PackedRows
from goaly.weights.settings import WeightSettings
from goaly.weights.store import WeightStore
from tests.unit.train import batches

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

SETTINGS = GateSettings(margin=0.2, error_rate=0.05, pairs=300, mix_bound=0.6, baseline_samples=2, concurrent=16)
WEIGHTS = WeightSettings(slots=4)
SHORT = Sampling(max_tokens=2, temperature=1.0, stop_token_ids=())
DIGITS = "0123456789"
PROBLEMS = [
    Prompt(id=text, source="test", messages=(Message(role="user", content=text),)) for text in ("1+1=", "2+2=", "ab,")
]


class OneBatch(Actor):
    """Stands in for the trajectory queue."""

    @concurrent_endpoint
    async def use(self, packed: PackedRows) -> None:
        """Make this the next batch."""
        self._packed = packed

    @concurrent_endpoint
    async def rows(self, batch_id: int, dp_rank: int) -> PackedRows:
        """The batch."""
        return self._packed


def begins_with_a_digit(text: str) -> float:
    return float(text[:1] in DIGITS and text != "")


async def verify(prompt: Prompt, text: str) -> float:
    return begins_with_a_digit(text)


class Noted(Router):
    """A router that notes which versions have answered."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: list[int] = []

    async def generate(self, *args: Any, **kwargs: Any) -> Sample:
        sample = await super().generate(*args, **kwargs)
        self.versions += sample.versions.tolist()
        return sample


def batch_of(samples: list[Sample], prompt: list[int], chat: ChatTokenizer, sign: float) -> PackedRows:
    """Answers whose first token is a digit have the advantage `sign`, others the opposite."""
    documents = []
    for sample in samples:
        length, written = len(prompt) + len(sample.tokens), len(sample.tokens)
        trained = torch.arange(length) >= len(prompt)
        right = begins_with_a_digit(chat.decode(sample.tokens.tolist()))
        advantages = torch.zeros(length)
        advantages[len(prompt)] = sign if right else -sign
        filled = {"sampler_logprobs": sample.logprobs.float(), "sampler_versions": sample.versions.int()}
        columns = {
            name: torch.cat([torch.full((length - written,), -1 if name == "sampler_versions" else 0), column])
            for name, column in filled.items()
        }
        documents.append(
            {
                "tokens": torch.tensor([*prompt, *sample.tokens.tolist()]),
                "trained": trained,
                "sampler_logprobs": columns["sampler_logprobs"].float(),
                "sampler_versions": columns["sampler_versions"].int(),
                "rewards": torch.zeros(length),
                "advantages": advantages,
            }
        )
    return batches.pack(documents, rows=4, row_length=len(documents) * 8)


async def test_a_version_that_was_made_worse_is_not_served(tiny_model_folder: Path, tmp_path: Path):
    hub, trained = spawn("hub"), spawn("trainer")
    engines = {arm: spawn("generator", name=f"generator-{arm}") for arm in Arm}
    model, file = ModelSettings(path=str(tiny_model_folder)), tmp_path / "gate.jsonl"
    store = hub.spawn("store", WeightStore, WEIGHTS)
    queue = hub.spawn("queue", OneBatch)
    trainer_settings = TrainerSettings(optimizer=OptimizerSettings(lr=1e-2), microbatch_rows=2)
    ranks = trained.spawn("trainer", PolicyTrainer, trainer_settings, model, LossSettings(), WEIGHTS, store, queue)
    size = GeneratorSettings(max_running=32, max_context=64, kv_cache_gib=0.02)
    replicas = {
        arm: engines[arm].spawn(f"generator-{arm}", Generator, size, model, store, number, WEIGHTS, track=arm.value)
        for number, arm in enumerate(Arm)
    }
    trainer = TrainerStage(ReplaceableActors("trainer", ranks), steps=1000, folder=tmp_path / "policy")
    await asyncio.gather(trainer.start(), *(one.start.call_one() for one in replicas.values()))
    routers = {arm: Noted() for arm in Arm}
    for arm, router in routers.items():
        router.update({f"generator-{arm}": replicas[arm]})
    checkpoints = RunCheckpoints(
        Checkpoints(tmp_path / "checkpoints"),
        CheckpointSettings(),
        {"trainer": trainer},
        newest=0,
        durable=lambda: asyncio.sleep(0),
        delete_log=lambda version: None,
        create_task=asyncio.create_task,
        say=print,
    )
    chat = ChatTokenizer(tiny_model_folder)
    parser = AnswerParser(chat, ChatSettings())
    questions = CanaryQuestions(routers, chat, parser, verify, sampling=SHORT, max_context=64, seconds=60)
    on_trial: list[int | None] = []

    async def present_store() -> WeightStore:
        return store

    versions = GatedVersions(
        present_store,
        trainer,
        lambda arm: [replicas[arm]],
        tmp_path / "gate",
        beside=checkpoints.beside,
        after_return=checkpoints.replace,
        on_trial=on_trial.append,
        stop=lambda: asyncio.sleep(0),
    )
    log = GateLog(file)
    promotion = Promotion(SETTINGS, log.write)
    loop = Gate(promotion, SETTINGS, versions, PROBLEMS, questions)
    await loop.open()
    gate = asyncio.create_task(loop.run())

    async def step(sign: float) -> None:
        """Train one version on answers of the served one."""
        prompt = chat.render(PROBLEMS[0].messages)
        asked = (
            routers[Arm.SERVED].generate(f"train-{trainer.policy_version}-{n}", prompt, SHORT, session=f"{n}")
            for n in range(48)
        )
        samples = [sample for sample in await asyncio.gather(*asked) if len(sample.tokens)]
        packed = batch_of(samples, prompt, chat, sign)
        await queue.use.call_one(packed)
        metrics = await trainer.step(
            BatchHandle(
                id=trainer.policy_version,
                sequences=len(samples),
                trained_tokens=packed.batch_trained_tokens,
                tokens=packed.batch_trained_tokens,
                metrics={},
            )
        )
        assert metrics["grad_norm"] >= 0

    async def decision(number: int) -> Decided:
        """The decision of this number, once it is taken."""
        while True:
            found = [one for one in gate_records(file) if isinstance(one, Decided)]
            if len(found) >= number:
                return found[number - 1]
            await asyncio.wait([gate], timeout=0.2)
            if gate.done():
                gate.result()

    async def settled(served: int) -> int:
        """The version of the served replica, once the gate has done what follows a decision."""
        while promotion.rolls_back or (await store.state.call_one()).tracks.get("served", 0) != served:
            await asyncio.wait([gate], timeout=0.1)
        return await replicas[Arm.SERVED].version_at_least.call_one(served)

    try:
        while promotion.needs_baseline:
            await asyncio.wait([gate], timeout=0.2)
            assert not gate.done() or gate.result() is None
        await step(+1.0)
        assert await trainer.publish() == 1
        first = await decision(1)
        assert (first.candidate, first.decision) == (1, Decision.PROMOTED), first.why
        assert await settled(1) == 1
        good = await trainer.digest()

        for _ in range(3):
            await step(-1.0)  # poisoned feedback
        assert await trainer.publish() == 4
        second = await decision(2)
        assert (second.candidate, second.decision, second.served) == (4, Decision.REFUSED, 1), second.why
        assert await settled(1) == 1
        assert await trainer.digest() == good  # the served version's parameters, with the optimizer's state
        assert trainer.policy_version == 4
        assert (tmp_path / "checkpoints/000004/manifest.json").is_file()

        await step(+1.0)
        assert await trainer.publish() == 5
        third = await decision(3)
        assert (third.candidate, third.decision) == (5, Decision.PROMOTED), third.why
        assert await settled(5) == 5
        assert set(routers[Arm.SERVED].versions) <= {0, 1, 5}
        assert set(routers[Arm.CANDIDATE].versions) <= {1, 4, 5}
        assert on_trial == [1, None, 4, None, 5, None]
        assert [folder.name for folder in (tmp_path / "gate").iterdir()] == ["000005"]
    finally:
        gate.cancel()
        await asyncio.gather(gate, return_exceptions=True)
        for router in routers.values():
            router.update({})
        await asyncio.gather(*(one.close.call_one() for one in replicas.values()), trainer.close())
        log.close()
        for mesh in (hub, trained, *engines.values()):
            await mesh.stop()
