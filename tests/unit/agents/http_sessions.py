"""A gateway, and sessions behind it whose policy answers what a test has told it to."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import anthropic
import openai
import torch
from chat_templates import qwen3

from goaly.agents.answer_parser import AnswerParser
from goaly.agents.gateway import Endpoint, Gateway
from goaly.agents.http_session import Call
from goaly.agents.session import Session
from goaly.agents.session_files import SessionFiles
from goaly.agents.settings import EndpointSettings, SessionSettings
from goaly.generate.policy import Policy
from goaly.generate.request import Finish, Sample, Sampling
from goaly.generate.streamed_answer import OnPart
from goaly.generate.versioned_tokens import VersionedTokens
from goaly.prompts.settings import ChatSettings
from goaly.prompts.tokenizer import ChatTokenizer


class Scripted:
    """Answers with these texts and a stop token, in order, and then with numbered ones."""

    def __init__(self, chat: ChatTokenizer, *texts: str):
        self._chat = chat
        self._texts = list(texts)
        self.prompts: list[list[int]] = []
        self.asked: list[Sampling] = []
        self.cancelled = asyncio.Event()
        self.go_on: asyncio.Event | None = None
        """Answers wait for it."""
        self.shows = 0
        """The number of tokens that a streamed answer gives before it waits."""
        self.breaks: Exception | None = None
        """Ends an answer after these tokens."""
        self.waits = asyncio.Event()

    async def generate(
        self,
        name: str,
        tokens: Sequence[int],
        sampling: Sampling,
        min_version: int = 0,
        session: str | None = None,
        on_part: OnPart | None = None,
        begun_at: int | None = None,
    ) -> Sample:
        self.prompts.append(list(tokens))
        self.asked.append(sampling)
        number = len(self.prompts)
        text = self._texts.pop(0) if self._texts else f"answer {number}"
        written = torch.tensor([*self._chat.encode(text), self._chat.stop_token_ids[0]])
        finish, limit = Finish.STOP, sampling.max_tokens
        if limit is not None and len(written) > limit:
            written, finish = written[:limit], Finish.LENGTH
        stop = next((stop for stop in sampling.stop or () if stop in text), None)
        logprobs = -torch.arange(1, len(written) + 1, dtype=torch.float32) / 1024 - number
        versions = torch.full(written.shape, number, dtype=torch.int32)
        sample = Sample(tokens=written, logprobs=logprobs, versions=versions, finish=finish, stop=stop)
        shown = min(self.shows, len(written) - 1)
        await _show(sample, on_part, 0, shown)
        if self.breaks is not None:
            raise self.breaks
        if self.go_on is not None:
            self.waits.set()
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        await _show(sample, on_part, shown, len(written) - 1)
        return sample


async def _show(sample: Sample, on_part: OnPart | None, begin: int, end: int) -> None:
    for at in range(begin, end):
        if on_part is not None:
            on_part(part_of(sample, at))
            await asyncio.sleep(0)


def part_of(sample: Sample, at: int) -> VersionedTokens:
    """The token at this position."""
    tokens, logprobs, versions = (
        column[at : at + 1].tolist() for column in (sample.tokens, sample.logprobs, sample.versions)
    )
    return VersionedTokens(tokens, logprobs, versions)


class Served:
    """One session behind the gateway."""

    def __init__(self, gateway: Gateway, endpoint: Endpoint, session: Session, policy: Policy, scripted: Scripted):
        self._served = gateway._sessions[endpoint.api_key]
        self.endpoint = endpoint
        self.session = session
        self.policy = policy
        self.scripted = scripted

    def calls(self) -> list[Call]:
        """The calls that the gateway knows of."""
        return list(self._served._calls.values())


Serve = Callable[..., AbstractContextManager[Served]]
QUESTION: Any = {"role": "user", "content": "2+3?"}


def policy_of(chat: ChatTokenizer, sampler: Any, **changes: Any) -> Policy:
    """The policy of the episode 7.0, whose answers come from this sampler."""
    facts: dict[str, Any] = {"name": "7.0", "session": "7", "sampling": Sampling(max_tokens=200, temperature=1.0)}
    facts |= {"min_version": 0, "max_context": 4096}
    return Policy(sampler=sampler, decode=chat.decode, **{**facts, **changes})


@asynccontextmanager
async def started(
    chat: ChatTokenizer,
    files: SessionFiles | None = None,
    settings: EndpointSettings | None = None,
    max_context: int = 4096,
) -> AsyncIterator[tuple[Gateway, AnswerParser]]:
    """A gateway of a policy with calls and reasoning, and the parser of its answers."""
    parser = AnswerParser(chat, ChatSettings(tool_parser="hermes", reasoning_parser="qwen3"))
    await asyncio.to_thread(parser.load)
    gateway = Gateway(settings or EndpointSettings(), 0, str(chat.folder), max_context, files)
    await gateway.start(parser)
    try:
        yield gateway, parser
    finally:
        await gateway.close()


@contextmanager
def serving(
    gateway: Gateway,
    chat: ChatTokenizer,
    parser: AnswerParser,
    *texts: str,
    limits: SessionSettings | None = None,
    evaluation: bool = False,
    max_context: int = 4096,
    files: SessionFiles | None = None,
) -> Iterator[Served]:
    """A session of a policy that gives these answers."""
    scripted = Scripted(chat, *texts)
    policy = policy_of(chat, scripted, max_context=max_context, evaluation=evaluation)
    session = Session(
        chat,
        prompt_id="q1",
        limits=limits,
        log=files and partial(files.write, policy.name),
    )
    session.replay([] if files is None else files.records(policy.name))
    with gateway.serve(session, policy, parser) as endpoint:
        yield Served(gateway, endpoint, session, policy, scripted)


def of_openai(served: Served, **facts: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=served.endpoint.base_url, api_key=served.endpoint.api_key, **facts)


def of_anthropic(served: Served) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=served.endpoint.root_url, api_key=served.endpoint.api_key)


def wrote(content: str, reasoning: str | None = None, *calls: Any) -> str:
    """What the policy writes for this message."""
    return qwen3({"content": content, "reasoning_content": reasoning, "tool_calls": list(calls)})
