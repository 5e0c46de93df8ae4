"""The ways to try a problem: by the engine of this process or an API elsewhere, by the policy alone or an episode."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import count
from typing import Any, cast

from apps.agent.main import episode_of
from apps.eval.config import EvalConfig, RemoteSettings
from apps.eval.quiet import hushed
from goaly.agents.chat_elsewhere import ChatElsewhere, NoTokens
from goaly.agents.forwarder import Forwarder
from goaly.agents.gateway import Endpoint
from goaly.agents.settings import EndpointSettings
from goaly.base.errors import ConfigError
from goaly.generate.engine_loop import EngineLoop
from goaly.generate.policy import Policy
from goaly.generate.request import Sample, Sampling
from goaly.generate.settings import SamplingSettings
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.rollout.episode import EpisodeContext
from goaly.rollout.evaluation_attempts import Attempt, Begun, Serve, Solve, Verifier, by_chat, by_episode, by_tokens
from goaly.rollout.running_episodes import RunningEpisode

logger = logging.getLogger(__name__)

Sampled = Callable[[SamplingSettings], Sampling]
"""The parameters of an attempt, by the settings of its set."""


@asynccontextmanager
async def solver(config: EvalConfig, verify: Verifier) -> AsyncIterator[tuple[Solve, Sampled]]:
    """How the problems of this evaluation are tried."""
    if config.endpoint is not None:
        async with _elsewhere(config, config.endpoint, verify) as solve:
            yield solve, lambda settings: Sampling.of(settings, ())  # the model's own stop tokens are known there
        return
    tokenizer = ChatTokenizer(config.model.path, config.chat)
    async with _engine(config) as loop:
        numbers = count()
        solve = by_tokens(
            lambda tokens, sampling: loop.generate(f"sample-{next(numbers)}", tokens, sampling), tokenizer, verify
        )
        sampled = partial(Sampling.of, stop_token_ids=tokenizer.stop_token_ids)
        if not config.runs_episodes:
            yield solve, sampled
            return
        if config.agent is not None and (warning := config.agent.warning(config.chat)) is not None:
            logger.warning(warning)
        async with _served(config, loop, tokenizer, verify) as solve:
            yield solve, sampled


@asynccontextmanager
async def _engine(config: EvalConfig) -> AsyncIterator[EngineLoop]:
    """An engine in this process."""
    with hushed():
        from goaly.generate.vllm_engine import VllmEngine

        engine = await asyncio.to_thread(
            VllmEngine,
            config.generator,
            config.model,
            seed=config.generator.seed,
            chat=config.chat,
        )
    loop = EngineLoop(engine, config.generator, lambda: 0)
    try:
        yield loop
    finally:
        await loop.stop()
        engine.close()


@asynccontextmanager
async def _served(
    config: EvalConfig, loop: EngineLoop, tokenizer: ChatTokenizer, verify: Verifier
) -> AsyncIterator[Solve]:
    """Attempts by episodes, for which this process serves the policy as a rollout worker does, by HTTP too."""
    from goaly.agents.answer_parser import AnswerParser
    from goaly.agents.chat import Chat
    from goaly.agents.gateway import Gateway
    from goaly.agents.session import Session

    max_context = config.generator.max_context
    parser = AnswerParser(tokenizer, config.chat)
    gateway = Gateway(EndpointSettings(), 0, config.model.path, max_context)
    numbers = count()

    @contextmanager
    def serve(attempt: Attempt) -> Iterator[Begun]:
        name, prompt, sampler = f"attempt-{next(numbers)}", attempt.prompt, _Sampler(loop)
        session = Session(tokenizer, prompt_id=prompt.id)
        policy = Policy(
            sampler=sampler,
            name=name,
            session=name,
            sampling=attempt.sampling,
            min_version=0,
            max_context=max_context,
            decode=tokenizer.decode,
            evaluation=True,
            seeds=attempt.seeds,
        )
        running = RunningEpisode(policy, attempt.index)
        with running.under_way(), gateway.serve(session, policy, parser) as endpoint:
            context = EpisodeContext(
                policy=policy,
                reward=verify,
                prompt=prompt,
                sample_index=attempt.index,
                chat=Chat(policy, session, parser, prompt.tools),
                tokenizer=tokenizer,
                _endpoint=endpoint,
            )
            yield Begun(context=context, tokens=lambda: sampler.tokens)

    try:
        with hushed():
            await asyncio.to_thread(parser.load)
            await gateway.start(parser)
        async with _by_episode(config, serve) as solve:
            yield solve
    finally:
        await gateway.close()


class _Sampler:
    """The engine of this process, where a policy expects a router. Counts the tokens of one attempt."""

    def __init__(self, loop: EngineLoop):
        self._loop = loop
        self.tokens = 0

    async def generate(self, *request: Any, **options: Any) -> Sample:
        sample = await self._loop.generate(*request, **options)
        self.tokens += len(sample.tokens)
        return sample


@asynccontextmanager
async def _elsewhere(config: EvalConfig, endpoint: RemoteSettings, verify: Verifier) -> AsyncIterator[Solve]:
    """Attempts at the policy of an API elsewhere."""
    import openai

    key = os.environ.get(endpoint.key_variable, "none")
    async with openai.AsyncOpenAI(base_url=endpoint.url, api_key=key) as client:
        try:
            listed = await client.models.list()
            model = endpoint.model or listed.data[0].id
        except (openai.OpenAIError, IndexError) as error:
            raise ConfigError([f"endpoint.url={endpoint.url}: does not list its models: {error}"]) from error
        if not config.runs_episodes:
            yield by_chat(client, model, verify, most=config.concurrency)
            return
        forwarder = Forwarder(endpoint.url, model, key)
        await forwarder.start()

        @contextmanager
        def serve(attempt: Attempt) -> Iterator[Begun]:
            prompt, unknown = attempt.prompt, NoTokens()
            with forwarder.serve(attempt.sampling, attempt.seeds) as way:
                asking = client.with_options(base_url=way.base_url, api_key=way.api_key)
                chat = cast(Any, ChatElsewhere(asking, prompt.id, prompt.tools))
                context = EpisodeContext(
                    policy=cast(Any, unknown),
                    reward=verify,
                    prompt=prompt,
                    sample_index=attempt.index,
                    chat=chat,
                    tokenizer=cast(Any, unknown),
                    _endpoint=Endpoint(base_url=way.base_url, api_key=way.api_key, session_id=prompt.id),
                )
                yield Begun(context=context, tokens=lambda: way.tokens)

        try:
            async with _by_episode(config, serve) as solve:
                yield solve
        finally:
            await forwarder.close()


@asynccontextmanager
async def _by_episode(config: EvalConfig, serve: Serve) -> AsyncIterator[Solve]:
    """Attempts of the agent's episodes. A coding agent's sandboxes end with this."""
    limits = {"most": config.concurrency, "seconds": config.episode_seconds, "retries": config.episode_retries}
    if config.agent is not None:
        yield by_episode(episode_of(config.agent), serve, **limits)
        return
    assert config.coding is not None
    from goaly.coding.episode import CodingEpisode

    episode = CodingEpisode(config.coding, config.sandbox)
    try:
        yield by_episode(episode, serve, **limits)
    finally:
        await episode.close()
