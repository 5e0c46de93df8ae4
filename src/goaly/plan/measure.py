"""Measures a profile on this machine: the trainer alone, an engine alone, weight updates, and answers of the policy.

It takes about a minute beside the starts. The actors of the trainer and of one replica run as in a run, in processes of
their own, one after the other: what both sides cost each other on shared cores is not in the profile. Only episodes of
one answer can be sampled here: agents need the log of a run.
"""

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from monarch.actor import ProcMesh, this_host

from goaly.backlog.batch import BatchHandle
from goaly.base.telemetry import process_logs
from goaly.generate.connection import Connection
from goaly.generate.generator import Generator
from goaly.generate.request import Sampling
from goaly.models.catalog import shape_of
from goaly.plan.run_config import RunConfig
from goaly.prompts.mixture import prompt_mixture
from goaly.prompts.prompt import Prompt
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.reward.verifier_pool import Judge
from goaly.simulator.full_batches import FullBatches
from goaly.simulator.profile import (
    DecodeRate,
    EngineTimes,
    EpisodesProfile,
    EpisodeTimes,
    Profile,
    TrainingTimes,
    UpdateTimes,
)
from goaly.train.trainer import PolicyTrainer
from goaly.weights.store import WeightStore

POINT_SECONDS = 4.0
"""Aim for the time of one measurement."""
CONCURRENCIES = (1, 4, 16, 64, 256, 1024)
SAMPLED_GROUPS, SAMPLED_OF_EACH = 16, 4
UPDATES = 3

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measuring:
    config: RunConfig
    say: Say
    trainer: PolicyTrainer
    generator: Generator


async def measured(config: RunConfig, say: Say, episodes: EpisodesProfile | None = None) -> Profile:
    """The profile of this config's parts here; without `episodes` those of a short sample."""
    async with _parts(config, say) as parts:
        if episodes is None:
            say("answers of the starting policy")
            episodes = await _episodes(parts)
        say("an engine alone")
        engine = await _engine(parts)
        say("the trainer alone")
        training = await _training(parts)
        say("weight updates")
        updates = await _updates(parts)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = f"measured on {socket.gethostname()}, {len(os.sched_getaffinity(0))} cores"
    return Profile(
        source=source, device=device, training=(training,), engines=(engine,), episodes=episodes, updates=updates
    )


@asynccontextmanager
async def _parts(config: RunConfig, say: Say) -> AsyncIterator[_Measuring]:
    say("starting a trainer and a replica")
    ranks, tp = config.trainer.ranks, config.generator.tp
    hub = this_host().spawn_procs(per_host={"procs": 1}, bootstrap=partial(_begin, 1, None))
    training = this_host().spawn_procs(
        per_host={"procs": ranks}, bootstrap=partial(_begin, config.trainer.threads, range(ranks))
    )
    first = ranks if torch.cuda.device_count() >= ranks + tp else 0
    generating = this_host().spawn_procs(
        per_host={"procs": tp}, bootstrap=partial(_begin, config.generator.threads, range(first, first + tp))
    )
    meshes = (hub, training, generating)
    try:
        for mesh, count in ((training, ranks), (generating, tp)):
            if count > 1:
                await _join(mesh)
        store = hub.spawn("store", WeightStore, config.weights)
        sizes = (config.trainer.microbatch_rows, config.backlog.row_length, config.trainer.fsdp)
        batches = hub.spawn("queue", FullBatches, *sizes, shape_of(config.model).vocab_size)
        loss = replace(config.loss, kl_coef=0.0)  # there is no reference model
        policy = (config.trainer, config.model, loss, config.weights, store, batches, config.moe)
        trainer = training.spawn("trainer", PolicyTrainer, *policy)
        served = (config.generator, config.model, store, 0, config.weights)
        others: dict[str, Any] = {"lora": config.trainer.lora, "chat": config.chat}
        generator = generating.spawn("generator", Generator, *served, records_choices=config.moe.replays, **others)
        await asyncio.gather(trainer.start.call(), generator.start.call())
        leader = generator if tp == 1 else generator.slice(procs=0)
        yield _Measuring(config=config, say=say, trainer=trainer, generator=leader)
        await asyncio.gather(leader.close.call_one(), trainer.close.call())
    finally:
        await asyncio.gather(*(mesh.stop() for mesh in meshes))


def _begin(threads: int, gpus: range | None) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if gpus is not None and torch.cuda.is_available():
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    process_logs.quiet(Path(tempfile.gettempdir()) / f"goaly-plan-{os.getpid()}.log")


async def _join(mesh: ProcMesh) -> None:
    from monarch.spmd import setup_torch_elastic_env_async

    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    await setup_torch_elastic_env_async(mesh, socket.gethostname(), port)


async def _training(parts: _Measuring) -> TrainingTimes:
    """A line through the seconds of steps of few and of many microbatches."""
    config = parts.config
    of_one = config.trainer.microbatch_rows * config.backlog.row_length
    few, many = 1, 4
    seconds: dict[int, list[float]] = {few: [], many: []}
    await _step(parts, few)  # what only the first step does
    until = time.perf_counter() + 3 * POINT_SECONDS
    while time.perf_counter() < until or not seconds[many]:
        for microbatches in (few, many):
            seconds[microbatches].append(await _step(parts, microbatches))
    low, high = fmean(seconds[few]), fmean(seconds[many])
    per_token = max((high - low) / ((many - few) * of_one), 1e-9)
    errors = [abs(one - high) / high for one in seconds[many]]
    parts.say(f"  {many * of_one} tokens of each rank in {high:.3g} s")
    axes = {axis: getattr(config.trainer, axis) for axis in ("pp", "fsdp", "tp", "cp", "ep")}
    return TrainingTimes(
        **axes,
        fixed_seconds=max(0.0, low - per_token * few * of_one),
        seconds_per_token=per_token,
        spread=min(0.5, fmean(errors)),
        uncertainty=min(0.5, fmean(errors) / len(errors) ** 0.5),
    )


async def _step(parts: _Measuring, microbatches: int) -> float:
    tokens = microbatches * parts.config.trainer.microbatch_rows * parts.config.backlog.row_length
    handle = BatchHandle(id=microbatches - 1, sequences=1, trained_tokens=tokens, tokens=tokens, metrics={})
    started = time.perf_counter()
    await parts.trainer.step.call(handle)
    return time.perf_counter() - started


async def _engine(parts: _Measuring) -> EngineTimes:
    config = parts.config
    shape = shape_of(config.model)
    connection = Connection(parts.generator)
    length = max(1, min(config.sampling.max_tokens, config.generator.max_context - 16))
    asked = 0

    async def answers(count: int, prompt: int, tokens: int) -> float:
        """The seconds for as many answers at once."""
        nonlocal asked
        sampling = Sampling(max_tokens=tokens, stop_token_ids=(), temperature=1.0)
        requests: list[Awaitable[Any]] = []
        for _ in range(count):
            asked += 1
            start = [(asked * 7 + place) % shape.vocab_size for place in range(prompt)]
            requests.append(connection.submit(f"measure-{asked}", start, sampling))
        started = time.perf_counter()
        await asyncio.gather(*requests)
        return time.perf_counter() - started

    try:
        await answers(4, 4, 8)
        token_seconds = await answers(1, 4, min(16, length)) / min(16, length)
        rates: list[DecodeRate] = []
        most = config.generator.most_running
        for running in (*(one for one in CONCURRENCIES if one < most), most):
            tokens = max(8, min(length, ceil(POINT_SECONDS / 2 / token_seconds)))
            seconds = await answers(running, 4, tokens)
            token_seconds = seconds / tokens
            rates.append(DecodeRate(running=running, tokens_per_second=running * tokens / seconds))
            parts.say(f"  {running} at once: {rates[-1].tokens_per_second:,.0f} tokens/s")
        long = min(config.generator.max_context - 1, 4 * length)
        several = max(2, min(most, 8))
        short_seconds, long_seconds = await answers(several, 1, 1), await answers(several, long, 1)
    finally:
        connection.close()
    prefill = several * (long - 1) / max(long_seconds - short_seconds, 1e-6)
    per_gib = (1 << 30) / config.generator.cached_token_bytes(shape, config.model.dtype)
    return EngineTimes(
        tp=config.generator.tp,
        ep=config.generator.ep,
        decode=_rising(rates),
        prefill_tokens_per_second=prefill,
        kv_tokens_per_gib=per_gib,
        uncertainty=0.03,
    )


def _rising(rates: Sequence[DecodeRate]) -> tuple[DecodeRate, ...]:
    """Rates whose decode steps do not become shorter with more requests, which only noise makes so."""
    kept: list[DecodeRate] = []
    for rate in rates:
        longest = max((one.running / one.tokens_per_second for one in kept), default=0.0)
        speed = min(rate.tokens_per_second, rate.running / longest) if longest else rate.tokens_per_second
        kept.append(DecodeRate(running=rate.running, tokens_per_second=speed))
    return tuple(kept)


async def _updates(parts: _Measuring) -> UpdateTimes:
    stage, pull, apply = [], [], []
    for _ in range(UPDATES):
        await _step(parts, 1)
        before = await parts.generator.stats.call_one()
        started = time.perf_counter()
        version = next(iter((await parts.trainer.publish.call()).values()))
        staged = time.perf_counter()
        await parts.generator.version_at_least.call_one(version)
        arrived = time.perf_counter()
        stalled = (await parts.generator.stats.call_one()).stall_seconds - before.stall_seconds
        stage.append(staged - started)
        apply.append(stalled)
        pull.append(max(0.0, arrived - staged - stalled))
    return UpdateTimes(stage_seconds=min(stage), pull_seconds=min(pull), apply_seconds=min(apply))


async def _episodes(parts: _Measuring) -> EpisodesProfile:
    """Answers to some prompts of the run, judged by its verifiers."""
    config = parts.config
    chat = ChatTokenizer(config.model.path, config.chat)
    mixture = prompt_mixture(config.prompts)
    sampling = Sampling.of(config.sampling, chat.stop_token_ids)
    judge = Judge(config.reward, config.evaluation.verifiers)
    connection = Connection(parts.generator)
    await judge.start()

    async def one(prompt: Prompt, name: str) -> EpisodeTimes:
        tokens = chat.render(prompt.messages, tools=prompt.tools)
        room = config.max_context - len(tokens)
        limits = {"max_tokens": min(room, config.sampling.max_tokens)}
        answer = await connection.submit(name, tokens, sampling.limited(limits))
        started = time.perf_counter()
        await judge.score(prompt, chat.decode(answer.tokens.tolist()))
        seconds = time.perf_counter() - started
        return EpisodeTimes(
            prompt_tokens=(len(tokens),), answer_tokens=(max(1, len(answer.tokens)),), verifier_seconds=seconds
        )

    try:
        groups = []
        for group in range(SAMPLED_GROUPS):
            prompt = mixture.next()
            made = await asyncio.gather(*(one(prompt, f"episode-{group}.{each}") for each in range(SAMPLED_OF_EACH)))
            groups.append(tuple(made))
    finally:
        connection.close()
        await judge.close()
    return EpisodesProfile(groups=tuple(groups))
