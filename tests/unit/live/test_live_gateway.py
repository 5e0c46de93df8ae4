"""The live server as clients see it: versions, sessions, feedback, and who is recorded. The policy is scripted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import torch
from live_traffic import opened

from goaly.agents.answer_parser import AnswerParser
from goaly.generate.request import Finish, Sample, Sampling
from goaly.generate.streamed_answer import OnPart
from goaly.live.gateway import LiveGateway
from goaly.live.settings import LiveSettings
from goaly.live.traffic import Traffic
from goaly.live.turn import ReactionKind
from goaly.prompts.settings import ChatSettings
from goaly.prompts.tokenizer import ChatTokenizer

pytestmark = pytest.mark.timeout(600)
QUESTION: Any = {"role": "user", "content": "2+3?"}


class Scripted:
    """Answers with these texts, and then with numbered ones; answer n is of policy version n."""

    def __init__(self, chat: ChatTokenizer, *texts: str):
        self._chat = chat
        self._texts = list(texts)
        self._answers = 0

    async def generate(
        self,
        request_id: str,
        tokens: list[int],
        sampling: Sampling,
        min_version: int = 0,
        session: str | None = None,
        on_part: OnPart | None = None,
        begun_at: int | None = None,
    ) -> Sample:
        self._answers += 1
        text = self._texts.pop(0) if self._texts else f"{self._answers}+{self._answers}"
        written = torch.tensor([*self._chat.encode(text), self._chat.stop_token_ids[0]])
        versions = torch.full(written.shape, self._answers, dtype=torch.int32)
        return Sample(tokens=written, logprobs=-torch.ones(len(written)), versions=versions, finish=Finish.STOP)


@asynccontextmanager
async def serving(
    chat: ChatTokenizer, folder: Path, monkeypatch: pytest.MonkeyPatch, *texts: str
) -> AsyncIterator[tuple[LiveGateway, Traffic]]:
    monkeypatch.setenv("GOALY_KEYS", "app=one,rival=two,plain=three")
    traffic, parser = opened(chat, folder), AnswerParser(chat, ChatSettings())
    gateway = LiveGateway(
        LiveSettings(trained_keys=("app", "rival")),
        traffic,
        "rollout-0",
        asyncio.get_running_loop().call_soon_threadsafe,
        host="127.0.0.1",
        port=0,
        chat=chat,
        parser=parser,
        sampling=Sampling(max_tokens=64, temperature=1.0, stop_token_ids=chat.stop_token_ids),
        max_context=512,
        sampler=Scripted(chat, *texts),
    )
    await gateway.start(parser)
    gateway.is_open = True
    try:
        yield gateway, traffic
    finally:
        await gateway.close()


def of(gateway: LiveGateway, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=gateway.url, api_key=key, max_retries=0)


async def posted(gateway: LiveGateway, key: str, path: str, body: Any) -> httpx.Response:
    async with httpx.AsyncClient() as http:
        root = gateway.url.removesuffix("/v1")
        return await http.post(f"{root}/sessions/{path}", json=body, headers={"authorization": f"Bearer {key}"})


def test_clients_of_each_api_are_served_recorded_and_heard(
    tokenizer: ChatTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """live-25, live-26: one server for all claims, because its imports take long."""

    async def main() -> None:
        async with serving(tokenizer, tmp_path, monkeypatch, "8", "7", "6") as (gateway, traffic):
            app, rival, plain = (of(gateway, key) for key in ("one", "two", "three"))
            create = app.chat.completions.with_raw_response.create
            asked = await create(model="any", messages=[QUESTION], user="u7")
            first = asked.parse()
            assert (asked.headers["x-policy-version"], first.system_fingerprint) == ("1", "policy-1")
            session = asked.headers["x-session-id"]
            assert traffic.collection.sessions[session].user == "u7"

            more = [QUESTION, {"role": "assistant", "content": "8"}, {"role": "user", "content": "no, 5"}]
            again = await create(model="any", messages=more)
            assert again.headers["x-session-id"] == session
            first_turn, second_turn = traffic.collection.turns.values()
            assert [(one.kind, one.text) for one in first_turn.reactions] == [(ReactionKind.REPLY, "no, 5")]
            foreign = await rival.chat.completions.with_raw_response.create(model="any", messages=more)
            assert foreign.headers["x-session-id"] != session
            assert len(first_turn.reactions) == 1
            assert second_turn.reactions == []

            sent = {"score": -1, "response_id": first.id}
            assert (await posted(gateway, "two", f"{session}/feedback", sent)).status_code == 404
            assert (await posted(gateway, "two", "own/feedback", sent)).status_code == 404
            assert (await posted(gateway, "none", "own/feedback", sent)).status_code == 401
            assert (await posted(gateway, "one", "own/feedback", sent)).json() == {"turns": 1}
            assert first_turn.reward == -1.0
            assert (await posted(gateway, "one", f"{session}/reward", {"reward": 1})).json() == {"turns": 1}
            assert second_turn.reward == 1.0
            for wrong in ({}, {"score": "1"}, {"score": True}, {"text": 3}, {"corrected": []}, [1]):
                assert (await posted(gateway, "one", f"{session}/feedback", wrong)).status_code == 400
            assert (await posted(gateway, "one", f"{session}/other", {})).status_code == 404
            assert (await posted(gateway, "one", f"{session}/end", {})).status_code == 200
            assert traffic.collection.sessions[session].closed == "end"

            recorded = traffic.collection.recorded
            await plain.chat.completions.create(model="any", messages=[QUESTION])
            await app.chat.completions.create(model="any", messages=[QUESTION], extra_headers={"x-no-training": "1"})
            await app.chat.completions.create(model="any", messages=[QUESTION], metadata={"no_training": "yes"})
            await app.chat.completions.create(model="any", messages=[QUESTION], temperature=0.3)
            assert traffic.collection.recorded == recorded
            assert traffic.left_out == {"key_not_trained": 1, "opted_out": 2, "other_distribution": 1}

            parts = [
                part async for part in await app.chat.completions.create(model="any", messages=[QUESTION], stream=True)
            ]
            assert parts[-1].system_fingerprint == f"policy-{traffic.newest}"
            root = gateway.url.removesuffix("/v1")
            async with anthropic.AsyncAnthropic(base_url=root, api_key="one") as claude:
                message = await claude.messages.create(model="any", max_tokens=64, messages=[QUESTION])
            assert (await posted(gateway, "one", "own/feedback", {"score": 1, "response_id": message.id})).json() == {
                "turns": 1
            }
            response = await app.responses.create(model="any", input="2+3?")
            await app.responses.create(model="any", input="no, 5", previous_response_id=response.id)
            turn = traffic.collection.turns[traffic.collection.of_response("app", response.id.removeprefix("resp_"))[0]]
            assert [one.text for one in turn.reactions] == ["no, 5"]
            assert traffic.collection.recorded == recorded + 4
            assert gateway.answered == 11
            for client in (app, rival, plain):
                await client.close()

    asyncio.run(main())
