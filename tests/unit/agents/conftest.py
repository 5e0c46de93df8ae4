"""The chat tokenizers of all families, and sessions that use them."""

from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from agent_sessions import Agent
from chat_templates import FAMILIES, chat_of
from http_sessions import Serve, serving, started

from goaly.prompts.tokenizer import ChatTokenizer


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    """By the name of their family."""
    folder = tmp_path_factory.mktemp("chats")
    return {name: chat_of(family.template, family.stops, folder / name) for name, family in FAMILIES.items()}


@pytest.fixture
def agent(chats: dict[str, ChatTokenizer]) -> Callable[..., Agent]:
    """Makes a session of the family's template."""
    return lambda name="hermes", **facts: Agent(chats[name], FAMILIES[name], **facts)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serve(chats: dict[str, ChatTokenizer]) -> AsyncIterator[Serve]:
    """Serves sessions of the template that has calls and reasoning."""
    chat = chats["qwen3"]
    async with started(chat) as (gateway, parser):
        yield lambda *texts, **facts: serving(gateway, chat, parser, *texts, **facts)
