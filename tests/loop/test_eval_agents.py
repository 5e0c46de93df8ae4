"""Evaluations of agents and episodes, and of a policy that an API elsewhere serves."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from apps.eval.config import EvalConfig, EvalGeneratorSettings, RemoteSettings
from apps.eval.main import evaluation
from goaly.agents.settings import AgentSettings
from goaly.base.errors import RunFailed, first_error
from goaly.generate.settings import SamplingSettings
from goaly.journal.__main__ import main as journal
from goaly.prompts.settings import ArithmeticSettings, ChatSettings, PromptSettings
from goaly.reward.settings import RewardSettings
from goaly.rollout.evaluation_settings import EvaluationSet, EvaluationSettings
from tests.loop.conftest import launching
from tests.loop.launched import START_SECONDS
from tests.loop.memorized import SUMS, write_memorized_model
from tests.vllm_server import forked_vllm_server

pytestmark = pytest.mark.slow

KEY = "sesame"
VARIABLE = "KEY_OF_THE_TEST"
CONTEXT = 256
AGENTS = {
    "apps.agent.calculator:with_openai": "sums",
    "apps.agent.calculator:with_agents": "sums",
    "apps.agent.own:episode": "sums",
    "apps.agent.guessing:episode": "games",
}
"""All that ship, and what they are asked."""
PROGRAM = """
import json, os, sys, urllib.request

headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, sys.stdin.buffer.read(), headers)) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""
"""An agent that passes its standard input on."""
Rewards = dict[str, tuple[float | None, ...]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that calls a tool and plays a game, with its questions beside it."""
    folder = tmp_path_factory.mktemp("memorized") / "model"
    write_memorized_model(folder)
    return folder


@pytest.fixture(scope="module")
def vllm_url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """vLLM's own server of this model."""
    options = ["--served-model-name", "tiny", "--api-key", KEY, "--max-model-len", str(CONTEXT), "--max-num-seqs", "16"]
    options += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    options += ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]  # starts sooner
    with forked_vllm_server(model, tmp_path_factory.mktemp("vllm") / "server.log", *options) as url:
        yield url


def config(**facts: Any) -> EvalConfig:
    """A small greedy evaluation."""
    asked: dict[str, Any] = {
        "prompts": PromptSettings(task="arithmetic", arithmetic=ArithmeticSettings(max_digits=3)),
        "evaluation": EvaluationSettings(prompts=12),
        "reward": RewardSettings(verifier="tests.loop.verifiers:share_of_digits", workers=1),
        "sampling": SamplingSettings(temperature=0.0, max_tokens=24),
    }
    return EvalConfig(**{**asked, **facts})


def of_agent(function: str, folder: Path, **facts: Any) -> EvalConfig:
    """A greedy evaluation of an agent that ships, with the questions beside this folder."""
    files = (str(folder.with_name(f"{AGENTS[function]}.jsonl")),)
    return config(
        agent=AgentSettings(function=function),
        evaluation=EvaluationSettings(sets={"all": EvaluationSet(files=files)}),
        reward=RewardSettings(verifier="apps.agent.tasks:exact", workers=1),
        sampling=SamplingSettings(temperature=0.0, max_tokens=96),
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
    """`rewards` in other processes: one for those with an engine, one for those elsewhere. An agent's own server lives
    as long as the event loop that started it, so each of them may evaluate the same agent once."""
    here, there = (ProcessPoolExecutor(1, get_context("forkserver"), set_key) for _ in range(2))
    with here, there:
        yield lambda of: (here if of.endpoint is None else there).submit(rewards, of).result()


@pytest.mark.timeout(900)  # starts vLLM twice
def test_agents_episodes_and_a_policy_have_the_same_scores_at_vllms_own_server_as_from_the_folder(
    vllm_url: str, model: Path, evaluate: Callable[[EvalConfig], Rewards]
) -> None:
    small = EvalGeneratorSettings(max_context=CONTEXT, max_running=16, kv_cache_gib=0.05)
    here: dict[str, Any] = {"path": str(model), "generator": small}
    there: dict[str, Any] = {"endpoint": RemoteSettings(url=vllm_url, key_variable=VARIABLE)}
    asking = AgentSettings(function="tests.loop.asking_agent:twice")
    alone = evaluate(config(**here))
    assert len(set(alone.values())) > 2
    assert evaluate(config(**there)) == alone
    of_asking = evaluate(config(**here, agent=asking))
    assert of_asking != alone
    assert evaluate(config(**there, agent=asking)) == of_asking
    program = AgentSettings(command=(sys.executable, "-c", PROGRAM))
    of_program = evaluate(config(**here, agent=program))
    assert len(set(of_program.values())) > 2
    assert evaluate(config(**there, agent=program)) == of_program
    formed: dict[str, Any] = {"agent": AgentSettings(function="tests.loop.asking_agent:in_forms")}
    formed |= {"chat": ChatSettings(tool_parser="hermes"), "sampling": SamplingSettings(temperature=0.0, max_tokens=96)}
    of_forms = evaluate(config(**here, **formed))
    assert {round(reward or 0, 2) for (reward,) in of_forms.values()} == {0.75, 0.43}, "some calls are whole"
    del formed["chat"]  # the server there has its own
    assert evaluate(config(**there, **formed)) == of_forms
    for function in AGENTS:
        scores = evaluate(of_agent(function, model, **here, chat=ChatSettings(tool_parser="hermes")))
        assert evaluate(of_agent(function, model, **there)) == scores, function
        if function == "apps.agent.guessing:episode":
            assert [problem for problem, (reward,) in scores.items() if reward is not None and reward < 1] == ["game-5"]
            assert len(set(scores.values())) == 4, "each guess has a reward"
        else:
            assert scores == {"48+90=": (1.0,), "7+61=": (0.0,), "120+33=": (1.0,), "5+5=": (0.0,)}, function

    picky = evaluate(config(**there, agent=AgentSettings(function="tests.loop.asking_agent:of_other_numbers")))
    assert picky == {problem: (0.0,) if "7" in problem else reward for problem, reward in of_asking.items()}
    with pytest.raises(BaseExceptionGroup) as caught:
        evaluate(config(endpoint=RemoteSettings(url=vllm_url, key_variable=VARIABLE, model="gone")))
    assert isinstance(error := first_error(caught.value), RunFailed)
    assert "The model `gone` does not exist" in str(error)


@pytest.mark.timeout(900)  # runs three programs
def test_the_agents_that_ship_are_trained_by_their_programs(model: Path, tmp_path: Path) -> None:
    sums = ["backlog.row_length=256", "generator.max_context=256", "sampling.max_tokens=96"]
    known = model.with_name("sums.jsonl")
    called = tmp_path / "called.jsonl"
    called.write_text(
        "".join(line + "\n" for line in known.read_text().splitlines() if SUMS[json.loads(line)["id"]][0])
    )
    sums += [f"prompts.files=[{called}]", f"evaluation.sets.sum.files=[{known}]", "evaluation.prompts=256"]
    sums += ["prompts.task=null", "prompts.arithmetic.max_digits=12", "prompts.arithmetic.weight_power=1.5"]
    games = [f"prompts.files=[{model.with_name('games.jsonl')}]", "backlog.groups_per_step=8", "backlog.window=8"]
    games += ["evaluation.prompts=256", "evaluation.sets.game.samples_per_prompt=1"]
    games += ["backlog.group_size=1", f"evaluation.sets.game.files=[{model.with_name('evaluation.jsonl')}]"]
    with launching(tmp_path, model) as launch:
        for module, config, *own in (
            ("apps.agent.main", "calculator", *sums),
            ("apps.agent.own", "calculator", *sums, "agent=null"),
            ("apps.agent.guessing", "guessing_ppo", *games),
        ):
            run = launch("steps=1", *own, module=module, config=f"agent/{config}.yaml")
            assert run.wait(START_SECONDS) == 0, run.text()
            assert run.summary()["policy_version"] == 1
            assert (run.summary()["failed"], run.summary()["rejected"]) == (0, 0), run.text()
            assert journal(["export", str(run.folder)]) == 0
            assert max(len(one["turns"]) for one in run.lines("rollouts.jsonl")) > 2, "a tool, or a hint"
    (metrics,) = run.lines("metrics.jsonl")
    assert metrics["reward/mean"] > 0
    assert metrics["environment/resets"] == 8
    assert metrics["environment/steps"] > 8


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
        "episode_seconds=3.0: has no effect, agent and coding are null",
        "dtype=bfloat16: has no effect, the policy is at endpoint",
    ]
    assert EvalConfig(path=folder, concurrency=3).problems("") == [
        "concurrency=3: has no effect, agent, coding and endpoint are null"
    ]
    assert RemoteSettings(url="127.0.0.1:1").problems("endpoint.") == [
        "endpoint.url=127.0.0.1:1: must be an address such as http://127.0.0.1:8000/v1"
    ]
