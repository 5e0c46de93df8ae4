"""Chats with a policy behind an API elsewhere: the same messages and rewards as with one whose tokens are known."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from http_sessions import Scripted, policy_of

from goaly.agents.answer_parser import AnswerParser
from goaly.agents.chat import Chat
from goaly.agents.chat_elsewhere import ChatElsewhere, NoTokens
from goaly.agents.session import Session
from goaly.base.errors import EpisodeError
from goaly.generate.policy import ContextFull, PromptFillsContext
from goaly.prompts.prompt import Message
from goaly.prompts.settings import ChatSettings
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.trajectory import episode_reward

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def elsewhere(answer: Callable[[int], dict[str, Any]], *tools: Any) -> tuple[ChatElsewhere, list[dict[str, Any]]]:
    """A chat whose API answers the nth request with this message, and what it was asked."""
    asked: list[dict[str, Any]] = []

    def reply(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **answer(len(asked))}}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return httpx.Response(200, json=body)

    http = httpx.AsyncClient(transport=httpx.MockTransport(reply))
    client = openai.AsyncOpenAI(base_url="http://elsewhere/v1", api_key="key", http_client=http)
    return ChatElsewhere(client, "q1", tools), asked


def here(chat: ChatTokenizer) -> Chat:
    """A chat with the policy that gives the same answers."""
    return Chat(policy_of(chat, Scripted(chat)), Session(chat, prompt_id="q1"), AnswerParser(chat, ChatSettings()))


def user(text: str) -> Message:
    return Message(role="user", content=text)


async def branching(chat: Any) -> float:
    """The reward of an episode with a chat that goes on, a branch of it, and another chat."""
    first = await chat.say([user("a")])
    chat.credited(first, 0.5)
    for hint in ("b", "c"):
        chat.credited(await chat.say([user("a"), first, user(hint)]), 0.25)
    alone = await chat.say([user("d")])
    await chat.say([user("d"), alone, user("e")])
    chat.credited(alone, -0.125)
    return episode_reward(chat.finish(1.0))


async def test_an_episode_has_the_same_reward_as_where_its_tokens_are_known(chats: dict[str, ChatTokenizer]) -> None:
    there, _ = elsewhere(lambda number: {"content": f"answer {number}"})
    assert await branching(there) == pytest.approx(1 + 0.875 / 3)
    assert await branching(here(chats["chatml"])) == pytest.approx(1 + 0.875 / 3)


async def test_calls_reasoning_and_what_a_call_changes_are_sent_and_read() -> None:
    said: dict[str, Any] = {"content": None, "tool_calls": [CALL], "reasoning": "hm"}
    chat, asked = elsewhere(lambda number: said if number == 1 else {"content": "2"}, TOOL)
    answer = await chat.say([user("a")], temperature=0.0, max_tokens=3)
    assert (answer.content, answer.tool_calls, answer.reasoning_content) == (None, (CALL,), "hm")
    await chat.say([user("a"), answer, Message(role="tool", content="2", tool_call_id="call_1")], tools=[])
    assert asked[0] == {
        "model": "policy",
        "messages": [{"role": "user", "content": "a"}],
        "tools": [TOOL],
        "temperature": 0.0,
        "max_tokens": 3,
    }
    assert "tools" not in asked[1]
    assert asked[1]["messages"][1]["tool_calls"] == [CALL]


async def test_what_an_api_elsewhere_cannot_do_is_told() -> None:
    chat, _ = elsewhere(lambda number: {"content": "x"})
    with pytest.raises(EpisodeError, match="must get a message that `say` returned"):
        chat.credited(Message(role="assistant", content="x"), 1.0)
    with pytest.raises(EpisodeError, match="q1: no reward; give it to `finish` or `rewarded`"):
        chat.finish()
    for part in (0.5, 0.25):
        chat.rewarded(part)
    assert chat.has_reward
    assert [one.reward for one in chat.finish()] == [0.75]
    with pytest.raises(EpisodeError, match=r"temperatur=1.0: no such parameter"):
        await chat.say([user("a")], temperatur=1.0)
    for name in ("sample", "encode"):
        with pytest.raises(EpisodeError, match=f"{name}: the policy is behind an API elsewhere"):
            getattr(NoTokens(), name)
    assert NoTokens().evaluation


async def test_equal_chats_are_counted_each(chats: dict[str, ChatTokenizer]) -> None:
    async def twice(chat: Any) -> float:
        for _ in range(2):
            chat.credited(await chat.say([user("a")]), 0.5)
        return episode_reward(chat.finish(1.0))

    there, _ = elsewhere(lambda number: {"content": "x"})
    assert await twice(there) == await twice(here(chats["chatml"])) == 1.5


async def test_a_policy_that_judges_itself_gets_that_reward_and_its_judgement_is_not_trained(
    chats: dict[str, ChatTokenizer],
) -> None:
    async def judged(chat: Any) -> tuple[float, int]:
        answer = await chat.say([user("a")])
        chat.credited(answer, 0.5)
        verdict = await chat.say([user(f"is {answer.content} right?")], trained=False, temperature=0.0)
        made = chat.finish(float(verdict.content == "answer 2"))
        return episode_reward(made), len(made)

    there, asked = elsewhere(lambda number: {"content": f"answer {number}"})
    assert await judged(there) == await judged(here(chats["chatml"])) == (1.5, 1)
    assert asked[1]["temperature"] == 0.0


async def test_an_untrained_answer_counts_where_it_is_credited(chats: dict[str, ChatTokenizer]) -> None:
    async def judged(chat: Any) -> float:
        await chat.say([user("a")])
        verdict = await chat.say([user("b")], trained=False)
        for _ in range(2):
            chat.credited(verdict, 0.25)
        return episode_reward(chat.finish(1.0))

    there, _ = elsewhere(lambda number: {"content": "x"})
    assert await judged(there) == await judged(here(chats["chatml"])) == 1.25


async def test_an_episode_that_trains_nothing_has_a_trajectory_all_the_same(chats: dict[str, ChatTokenizer]) -> None:
    chat = here(chats["chatml"])
    await chat.say([user("a")], trained=False)
    (alone,) = chat.finish(1.0)
    assert (alone.trained_tokens, alone.reward) == (0, 1.0)


async def test_messages_that_fill_the_context_there_are_a_full_context_here() -> None:
    def reply(request: httpx.Request) -> httpx.Response:
        if len(json.loads(request.content)["messages"]) in (1, 4):
            error = {"message": "This model's maximum context length is 10 tokens.", "code": "context_length_exceeded"}
            return httpx.Response(400, json={"error": error})
        if len(json.loads(request.content)["messages"]) == 3:
            return httpx.Response(400, json={"error": {"message": "no such role", "code": "invalid_request"}})
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "b"}}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return httpx.Response(200, json=body)

    http = httpx.AsyncClient(transport=httpx.MockTransport(reply))
    chat = ChatElsewhere(openai.AsyncOpenAI(base_url="http://elsewhere/v1", api_key="key", http_client=http), "q1")
    with pytest.raises(PromptFillsContext, match="maximum context length"):
        await chat.say([user("a")])
    await chat.say([user("a")] * 2)
    with pytest.raises(openai.BadRequestError, match="no such role"):
        await chat.say([user("a")] * 3)
    with pytest.raises(ContextFull) as full:
        await chat.say([user("a")] * 4)
    assert not isinstance(full.value, PromptFillsContext)
