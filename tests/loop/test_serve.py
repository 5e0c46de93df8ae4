"""The serving app as a user starts it: real clients, tokens, deaths of its processes, and a run that it follows."""

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from launched import END_SECONDS, REWARDED, START_SECONDS, LaunchedRun, alive, gone_within, left_within, spawned
from server_process import ServerProcess

from apps.eval.config import EvalConfig, RemoteSettings
from apps.eval.main import evaluation
from goaly.agents.settings import AgentSettings
from goaly.base.errors import ConfigError
from goaly.reward.settings import RewardSettings
from goaly.rollout.evaluation_settings import EvaluationSettings
from goaly.run.policy_server_config import PolicyServerConfig
from goaly.run.policy_source import STORE_FILE

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
Serve = Callable[..., ServerProcess]
QUESTION: Any = {"role": "user", "content": "1+2="}
LONG = 400
"""Tokens of an answer that is still being sampled when a client on a busy machine has read its beginning."""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start servers; whatever is left of them is killed after the test."""
    started: list[ServerProcess] = []

    def start(*overrides: str, **facts: Any) -> ServerProcess:
        started.append(ServerProcess(tmp_path / f"server{len(started)}", *overrides, **facts))
        return started[-1]

    yield start
    for server in started:
        for pid in [*server.processes(), server.process.pid]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        server.process.wait()


def test_clients_with_a_token_are_served_through_the_death_of_a_generator(
    serve: Serve, tiny_model_folder: Path
) -> None:
    tokens = {"GOALY_TOKENS": "first, second"}
    server = serve(f"path={tiny_model_folder}", "generator.max_context=512", variables=tokens)
    url = server.url()
    root = url.removesuffix("/v1")
    assert httpx.get(f"{root}/health").status_code == 200

    client = openai.OpenAI(base_url=url, api_key="second")
    assert [model.id for model in client.models.list()] == ["policy"]
    reward = httpx.post(f"{root}/sessions/own/reward", json={"reward": 1}, headers={"authorization": "Bearer second"})
    assert (reward.status_code, "trains nothing" in reward.text) == (404, True)
    greedy: Any = {"model": "any", "temperature": 0, "max_tokens": 8}
    chat = client.chat.completions.create(messages=[QUESTION], logprobs=True, **greedy)
    assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens
    stream = client.chat.completions.create(messages=[QUESTION], stream=True, **greedy)
    assert "".join(part.choices[0].delta.content or "" for part in stream) == chat.choices[0].message.content
    said: Any = {"model": "any", "input": "1+2=", "temperature": 0, "max_output_tokens": 8}
    events = list(client.responses.create(**said, stream=True))
    words = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(words) > 1
    assert "".join(words) == client.responses.create(**said).output_text
    texts = [part.choices[0].text for part in client.completions.create(prompt="1+2=", stream=True, **greedy)]
    assert "".join(texts) == client.completions.create(prompt="1+2=", **greedy).choices[0].text
    response = client.responses.create(model="any", input="1+2=", max_output_tokens=4)
    more = client.responses.create(model="any", input="3+4=", max_output_tokens=4, previous_response_id=response.id)
    assert more.usage.input_tokens > response.usage.total_tokens
    other = openai.OpenAI(base_url=url, api_key="first")
    with pytest.raises(openai.NotFoundError):
        other.responses.create(model="any", input="3+4=", previous_response_id=response.id)
    with anthropic.Anthropic(base_url=root, api_key="first") as claude:
        message = claude.messages.create(model="any", max_tokens=8, messages=[QUESTION], extra_body={"temperature": 0})
        assert message.content[0].text == chat.choices[0].message.content
        asked: Any = {"model": "any", "max_tokens": 8, "messages": [QUESTION], "extra_body": {"temperature": 0}}
        with claude.messages.stream(**asked) as streamed:
            assert "".join(streamed.text_stream) == message.content[0].text

    formed: Any = {"extra_body": {"structured_outputs": {"regex": "a[bc]{2}=[0-9]"}}, "max_tokens": 8}
    for ask in (client.chat.completions.create, other.chat.completions.create):
        answer = ask(model="any", messages=[QUESTION], **formed).choices[0]
        assert re.fullmatch("a[bc]{2}=[0-9]", answer.message.content or "")
        assert answer.finish_reason == "stop"
    formed["extra_body"] = {"structured_outputs": {"regex": "("}}
    with pytest.raises(openai.BadRequestError, match="structured_outputs"):
        client.chat.completions.create(model="any", messages=[QUESTION], **formed)

    with pytest.raises(openai.AuthenticationError, match="is not one of this server's tokens"):
        openai.OpenAI(base_url=url, api_key="third").models.list()
    with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        anthropic.Anthropic(base_url=root, api_key="x").messages.create(model="any", max_tokens=8, messages=[QUESTION])
    curl = ["curl", "-sS", "-w", "%{http_code}", f"{url}/completions", "-H", "content-type: application/json"]
    refused = subprocess.run([*curl, "-d", '{"prompt": "1+2="}'], capture_output=True, text=True, check=True).stdout
    assert refused.endswith("401")
    assert '"code":"invalid_api_key"' in refused

    long: Any = {**greedy, "messages": [QUESTION], "max_tokens": LONG, "extra_body": {"min_tokens": LONG}}
    whole = client.chat.completions.create(**long).choices[0].message.content
    (generator,) = spawned(server.folder, "generator-0")
    seen = ""
    for part in client.chat.completions.create(**long, stream=True, timeout=START_SECONDS):
        if seen and alive(generator):
            assert seen != whole
            # In the middle of the answer, which the next one continues (generate-12).
            os.kill(generator, signal.SIGKILL)
        seen += part.choices[0].delta.content or ""
    assert seen == whole
    again = client.chat.completions.create(messages=[QUESTION], **greedy, timeout=START_SECONDS)  # waits for the next
    assert again.choices[0].message.content == chat.choices[0].message.content
    assert "generator 0 serves again" in server.text()

    left = server.processes()
    assert server.stop(signal.SIGINT) == 0
    assert gone_within(left) == []


def test_a_server_follows_its_run_through_the_death_of_the_hub_and_of_the_run(
    serve: Serve, launch: Callable[..., LaunchedRun]
) -> None:
    run = launch("steps=100000", REWARDED, "checkpoint.every=2", "checkpoint.restarts=3", "save.every=2")
    run.wait_for_steps(1)
    server = serve(f"run={run.folder}")
    client = openai.OpenAI(base_url=server.url(), api_key="any", timeout=END_SECONDS)

    def logprob() -> float | None:
        asked = client.completions.create(model="any", prompt="1+2=", temperature=0, max_tokens=1, logprobs=1)
        return asked.choices[0].logprobs.token_logprobs[0]

    def assert_changes() -> None:
        before = logprob()
        assert left_within(lambda: [0] if logprob() == before else [], START_SECONDS) == []

    assert_changes()
    asked = EvalConfig(
        endpoint=RemoteSettings(url=server.url()),
        agent=AgentSettings(function="tests.loop.asking_agent:twice"),
        evaluation=EvaluationSettings(prompts=8),
        reward=RewardSettings(verifier="tests.loop.verifiers:share_of_digits", workers=1),
    )
    (answered,) = asyncio.run(evaluation(asked)).values()  # an agent is evaluated while its policy is trained
    assert [reward is not None for one in answered for reward in one.rewards] == [True] * 8
    assert sum(sum(one.lengths) for one in answered) >= 16

    run.kill("hub")
    run.wait_for_text("hub-1 serves in its place", START_SECONDS)
    run.wait_for_steps(run.steps() + 2)
    assert_changes()

    os.kill(run.process.pid, signal.SIGKILL)
    server.wait_for_text("its last policy is served")
    assert (run.folder / STORE_FILE).exists()  # and yet it names no store
    at_rest = logprob()
    assert at_rest == logprob()

    resumed = launch(resume=run)
    server.wait_for_text("its newest policy is served", START_SECONDS)
    assert left_within(lambda: [0] if logprob() == at_rest else [], START_SECONDS) == []
    resumed.process.send_signal(signal.SIGINT)
    resumed.wait()
    assert not (run.folder / STORE_FILE).exists()
    (generator,) = spawned(server.folder, "generator-0")
    os.kill(generator, signal.SIGKILL)  # the next one begins with a saved policy
    assert logprob() is not None
    assert server.stop(signal.SIGTERM) == 0


def test_settings_of_a_server_that_cannot_work_are_told(tiny_model_folder: Path, tmp_path: Path) -> None:
    folder = str(tiny_model_folder)
    assert PolicyServerConfig(path=folder).problems("") == []
    (line,) = PolicyServerConfig(path=folder, host="0.0.0.0").problems("")
    assert line == (
        "host=0.0.0.0: must be 127.0.0.1 without tokens; set tokens_file, or the environment variable GOALY_TOKENS"
    )
    tokens = tmp_path / "tokens"
    tokens.write_text("one\n\ntwo\n")
    assert PolicyServerConfig(path=folder, host="0.0.0.0", tokens_file=str(tokens)).problems("") == []
    tokens.write_text("\n")
    (line,) = PolicyServerConfig(path=folder, tokens_file=str(tokens)).problems("")
    assert line == f"tokens_file={tokens}: has no token, must have one in each line"
    (line,) = PolicyServerConfig().problems("")
    assert line == "path=null: set either path, a model's folder, or run, the folder of a run"
    (line,) = PolicyServerConfig(run=folder).problems("")
    assert line == f"run={folder}: has no config.yaml, must be the folder of a run"
    with pytest.raises(ConfigError, match="port"):
        PolicyServerConfig(path=folder, port=70000)
