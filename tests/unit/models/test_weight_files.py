"""A model's folder that could not be loaded is refused with the settings, before any process starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from apps.eval.config import EvalConfig
from apps.sft.config import SftConfig
from goaly.base.config import load
from goaly.base.errors import ConfigError
from goaly.plan.run_config import RunConfig
from goaly.run.policy_server_config import PolicyServerConfig
from tests.unit.test_run_config import GRPO, PPO, refused, run_config


def broken(folder: Path, name: str, change: Callable[[bytes], bytes] | None) -> None:
    path = folder / name
    content = path.read_bytes() if path.exists() else b""
    path.unlink(missing_ok=True)
    if change is not None:
        path.write_bytes(change(content))


def headed(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def described(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps(json.loads(content or b"{}") | changes).encode()


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("model.safetensors", None, "has no .safetensors file, must have the model's weights"),
        ("model.safetensors", lambda content: content[:-1], "model.safetensors is damaged: it has"),
        ("model.safetensors", lambda content: content[:5], "model.safetensors is damaged: it has 5 bytes"),
        ("model.safetensors", lambda content: content + b"0", "model.safetensors is damaged: it has"),
        ("model.safetensors", lambda _: headed(b'{"a": {"data_offsets": [0]}}'), "model.safetensors is damaged: "),
        ("model.safetensors", lambda _: headed(b"[" * 100_000), "model.safetensors is damaged: "),
        ("model.safetensors", lambda content: content[:8] + b"]" + content[9:], "model.safetensors is damaged: "),
        (
            "model.safetensors.index.json",
            lambda _: b'{"weight_map": {"a": "1.safetensors"}}',
            "has no 1.safetensors, which model.safetensors.index.json lists",
        ),
        ("model.safetensors.index.json", lambda _: b"[]", "model.safetensors.index.json is damaged: TypeError"),
        (
            "config.json",
            described(num_hidden_layers=9),
            "its weights have no `model.layers.3.input_layernorm.weight`, which its config.json asks for",
        ),
        (
            "config.json",
            described(num_hidden_layers=2),
            "its weights have 3 layers, its config.json has num_hidden_layers=2",
        ),
        (
            "config.json",
            described(intermediate_size=8),
            "`model.layers.0.mlp.gate_proj.weight` has shape (256, 96), ",
        ),
        (
            "config.json",
            described(vocab_size=7),
            "its tokenizer has 32 tokens, its config.json has vocab_size=7,",
        ),
        ("config.json", described(eos_token_id=10**6), "eos_token_id=1000000: must be a token of its vocabulary"),
        (
            "generation_config.json",
            described(eos_token_id=[1, -1]),
            "eos_token_id=-1: must be a token of its",
        ),
        ("tokenizer.json", None, "its tokenizer cannot be read: "),
        ("tokenizer.json", lambda content: content[:-10], "its tokenizer cannot be read: "),
        ("tokenizer_config.json", lambda content: content[:-10], "its tokenizer cannot be read: "),
    ],
)
@pytest.mark.parametrize("app", ["grpo", "eval", "serve", "sft"])
def test_a_model_folder_that_could_not_be_loaded_is_refused_before_anything_starts(
    app: str, file: str, change: Callable[[bytes], bytes] | None, said: str, tiny_model_folder: Path, tmp_path: Path
):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    broken(folder, file, change)
    key, schema, more = {
        "grpo": ("model.path", RunConfig, [f"--config={GRPO}"]),
        "eval": ("path", EvalConfig, []),
        "serve": ("path", PolicyServerConfig, []),
        "sft": ("model.path", SftConfig, ["output=x", "steps=1", "data.task=arithmetic"]),
    }[app]
    with pytest.raises(ConfigError) as error:
        load(schema, [*more, f"{key}={folder}"], prog="test", description="")
    where = folder if app == "serve" else f"{key}={folder}"
    assert any(problem.startswith(f"{where}: {said}") for problem in error.value.problems), error.value.problems


def test_a_critic_needs_no_head_and_a_folder_without_weights_serves_a_plan(tiny_model_folder: Path, tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: one for name, one in weights.items() if name != "lm_head.weight"}, folder / "model.safetensors")
    broken(folder, "config.json", described(tie_word_embeddings=False))
    run_config(PPO, tiny_model_folder, f"critic.path={folder}")
    assert any("have no `lm_head.weight`" in line for line in refused(folder))
    (folder / "model.safetensors").unlink()
    run_config(GRPO, folder, "hosts.imagine={}")
