"""Evaluations of an agent, and of a policy that an API elsewhere serves."""

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from apps.eval.config import EvalConfig, EvalGeneratorSettings, RemoteSettings
from apps.eval.main import evaluation
from goaly.agents.settings import AgentSettings
from goaly.errors import RunFailed, first_error
from goaly.evaluation.settings import EvaluationSettings
from goaly.generate.settings import SamplingSettings
from goaly.prompts.settings import ArithmeticSettings, PromptSettings
from goaly.reward.settings import RewardSettings
from tests.vllm_server import vllm_server

KEY = "sesame"
VARIABLE = "KEY_OF_THE_TEST"
CONTEXT = 128
Rewards = dict[str, tuple[float | None, ...]]


@pytest.fixture(scope="module")
def vllm_url(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """vLLM's own server of the tiny model."""
    options = ["--served-model-name", "tiny", "--api-key", KEY, "--max-model-len", str(CONTEXT), "--max-num-seqs", "16"]
    options += ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]  # starts sooner
    with vllm_server(tiny_model_folder, tmp_path_factory.mktemp("vllm") / "server.log", *options) as (_, url):
        yield url


def config(**facts: Any) -> EvalConfig:
    """A small greedy evaluation."""
    return EvalConfig(
        prompts=PromptSettings(task="arithmetic", arithmetic=ArithmeticSettings(max_digits=3)),
        evaluation=EvaluationSettings(prompts=12),
        reward=RewardSettings(verifier="tests.loop.verifiers:share_of_digits", workers=1),
        sampling=SamplingSettings(temperature=0.0, max_tokens=24),
        **facts,
    )


def rewards(of: EvalConfig) -> Rewards:
    """The rewards of each problem."""
    assert of.problems("") == []
    (answered,) = asyncio.run(evaluation(of)).values()
    assert all(one.lengths for one in answered)
    return {one.prompt.id: one.rewards for one in answered}


def set_key() -> None:
    """Have this process know the API's key."""
    os.environ[VARIABLE] = KEY


@pytest.fixture
def evaluate() -> Iterator[Callable[[EvalConfig], Rewards]]:
    """`rewards` in a process of its own, which has vLLM's engines."""
    with ProcessPoolExecutor(1, get_context("forkserver"), set_key) as child:
        yield lambda of: child.submit(rewards, of).result()


@pytest.mark.timeout(900)  # starts vLLM twice
def test_an_agent_and_a_policy_have_the_same_scores_at_vllms_own_server_as_from_the_folder(
    vllm_url: str, tiny_model_folder: Path, evaluate: Callable[[EvalConfig], Rewards]
) -> None:
    small = EvalGeneratorSettings(max_context=CONTEXT, max_running=16, kv_cache_gib=0.05)
    here: dict[str, Any] = {"path": str(tiny_model_folder), "generator": small}
    there: dict[str, Any] = {"endpoint": RemoteSettings(url=vllm_url, key_variable=VARIABLE)}
    agent = AgentSettings(function="tests.loop.asking_agent:twice")
    alone = evaluate(config(**here))
    assert len(set(alone.values())) > 4
    assert evaluate(config(**there)) == alone
    of_agent = evaluate(config(**here, agent=agent))
    assert of_agent != alone
    assert evaluate(config(**there, agent=agent)) == of_agent

    picky = evaluate(config(**there, agent=AgentSettings(function="tests.loop.asking_agent:of_other_numbers")))
    assert picky == {problem: (0.0,) if "7" in problem else reward for problem, reward in of_agent.items()}
    with pytest.raises(BaseExceptionGroup) as caught:
        evaluate(config(endpoint=RemoteSettings(url=vllm_url, key_variable=VARIABLE, model="gone")))
    assert isinstance(error := first_error(caught.value), RunFailed)
    assert "The model `gone` does not exist" in str(error)


def test_settings_of_an_evaluation_elsewhere_that_cannot_work_are_told(tiny_model_folder: Path) -> None:
    folder = str(tiny_model_folder)
    assert EvalConfig().problems("") == [
        "path=null: set either path, a folder of the policy, or endpoint, an API that answers for it"
    ]
    elsewhere = RemoteSettings(url="http://127.0.0.1:1/v1")
    assert EvalConfig(path=folder, endpoint=elsewhere).problems("") == [
        f"path={folder}: set either path, a folder of the policy, or endpoint, an API that answers for it"
    ]
    assert EvalConfig(endpoint=elsewhere, dtype="bfloat16", episode_seconds=3.0).problems("") == [
        "episode_seconds=3.0: has no effect, agent is null",
        "dtype=bfloat16: has no effect, the policy is at endpoint",
    ]
    assert EvalConfig(path=folder, concurrency=3).problems("") == [
        "concurrency=3: has no effect, agent and endpoint are null"
    ]
    assert RemoteSettings(url="127.0.0.1:1").problems("endpoint.") == [
        "endpoint.url=127.0.0.1:1: must be an address such as http://127.0.0.1:8000/v1"
    ]
