"""Folders of all families go through torchtitan's definitions and back into plain transformers."""

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_model import (
    native_tensors,
    write_random_deepseek,
    write_random_dots,
    write_random_gpt_oss,
    write_random_llama,
    write_random_model,
)
from safetensors.torch import load_file

import goaly.base.atomic_files
from apps.sft.folder import MARK
from goaly.base.errors import ConfigError
from goaly.models import hf
from goaly.models.attention import document_masks
from goaly.models.catalog import shape_of
from goaly.models.definition import model_spec
from goaly.models.families import architecture, read_config
from goaly.models.hf import load_hf, save_hf
from goaly.models.settings import ModelSettings
from goaly.models.tiny_model import TinyModel, model_config
from goaly.run.saved_policies import SCORE_FILE

YARN = {
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
    },
}
"""DeepSeek-V3 without latent queries and groups of experts, and with a longer context than it was first trained on."""


GROUPS = {"n_group": 4, "topk_group": 2, "n_shared_experts": 2}
WRITERS: dict[str, Callable[..., Path]] = {
    "qwen3": write_random_model,
    "experts": functools.partial(write_random_model, experts=8),
    "llama3": write_random_llama,
    "latent": write_random_deepseek,
    "latent-yarn": functools.partial(write_random_deepseek, **YARN),
    "sinks": write_random_gpt_oss,
    "shared": write_random_dots,
    "shared-groups": functools.partial(write_random_dots, **GROUPS),
}


TIED = [f"{family}_tied" for family in ("qwen3", "experts", "llama3", "shared")]


@pytest.fixture(scope="module", params=[*WRITERS, *TIED])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, _, tied = request.param.partition("_")
    changed = {"tie_word_embeddings": True} if tied else {}
    return WRITERS[family](tmp_path_factory.mktemp(request.param), **changed)


def loaded(folder: Path) -> tuple[torch.nn.Module, object]:
    spec = model_spec(folder)
    model = spec.model.build()
    load_hf(model, spec, folder)
    return model, spec


def test_logits_of_packed_documents_are_those_of_transformers_on_each_alone(folder: Path):
    from transformers import AutoModelForCausalLM

    model, _ = loaded(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    documents = [torch.randint(0, 32, (n,), generator=torch.Generator().manual_seed(n)) for n in (5, 300, 47, 160)]
    tokens = torch.cat(documents)[None]
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
    with torch.no_grad():
        ours = model(tokens, positions=positions, attention_masks=document_masks(model, positions))[0]
        for document, logits in zip(documents, ours.split([len(d) for d in documents]), strict=True):
            torch.testing.assert_close(logits, theirs(document[None]).logits[0], atol=5e-5, rtol=1e-4)


def test_a_saved_folder_generates_the_same_greedy_text_in_plain_transformers(folder: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    model, spec = loaded(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.03)
    save_hf(model, spec, tmp_path / "saved", folder, max_file_bytes=40_000)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    prompt = torch.tensor([[3, 9, 4, 22, 8]])
    written = theirs.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert written.shape[1] == 45
    tokens = prompt
    with torch.no_grad():
        while tokens.shape[1] < 45:
            positions = torch.arange(tokens.shape[1])[None]
            logits = model(tokens, positions=positions, attention_masks=document_masks(model, positions))
            tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert tokens.tolist() == written.tolist()
    again = spec.model.build()
    load_hf(again, spec, tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_native_tensors_are_what_a_loaded_model_has_of_its_folder(folder: Path):
    model, spec = loaded(folder)
    tensors = native_tensors(spec, folder)
    biases = {name: buffer for name, buffer in model.named_buffers() if "bias" in name}
    expected = dict(model.named_parameters()) | biases
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    assert len(biases) == (2 if "latent" in str(folder) or "shared" in str(folder) else 0)
    assert all(bias.any() for bias in biases.values())


def test_the_names_and_shapes_of_a_folders_parameters_are_known_without_a_model(folder: Path):
    found = {parameter.name: parameter.shape for parameter in architecture(read_config(folder)).parameters()}
    assert found == {name: tuple(parameter.shape) for name, parameter in loaded(folder)[0].named_parameters()}


def test_every_missing_or_misshapen_tensor_is_named_in_one_error(tiny_model_folder: Path, tmp_path: Path):  # models-1
    config = json.loads((tiny_model_folder / "config.json").read_text())
    config |= {"num_hidden_layers": 4, "intermediate_size": 128}
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((tiny_model_folder / "model.safetensors").read_bytes())
    spec = model_spec(tmp_path)
    with pytest.raises(ConfigError) as raised:
        load_hf(spec.model.build(), spec, tmp_path)
    text = str(raised.value)
    assert "`model.layers.3.self_attn.q_proj.weight` is missing" in text
    assert "`model.layers.0.mlp.gate_proj.weight` has shape (256, 96), config.json says (128, 96)" in text


YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "qwen3": [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures=GPT2LMHeadModel"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_parameters": YARN_ROPE}, "rope_type=yarn"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    ],
    "latent": [
        ({"rope_interleave": False}, "rope_interleave=False"),
        ({"scoring_func": "softmax"}, "scoring_func=softmax"),
        ({"topk_method": "greedy"}, "topk_method=greedy"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"rope_parameters": {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.5}}, "rope_parameters=.*mscale"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
    "shared": [
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types=.*sliding"),
        ({"layer_types": None, "sliding_window": 64, "max_window_layers": 2}, "max_window_layers=2"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_parameters": YARN_ROPE}, "rope_type=yarn"),
    ],
    "sinks": [
        ({"attention_bias": False}, "attention_bias=False"),
        ({"swiglu_alpha": 1.0}, r"swiglu_alpha=1\.0"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types=.*chunked"),
        ({"layer_types": ["full_attention"]}, "layer_types="),
        ({"sliding_window": None}, "sliding_window=None"),
        ({"rope_parameters": YARN_ROPE | {"attention_factor": 1.0}}, "rope_"),
        ({"rope_parameters": YARN_ROPE | {"rope_type": "linear"}}, "rope_type=linear: must be"),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            r"config.json: quantization_config: is not supported: write a folder of bfloat16 weights .*dequantize=True",
        ),
    ],
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_torchtitan_would_not_reproduce_is_refused_by_name(family: str, tmp_path: Path):
    config = read_config(WRITERS[family](tmp_path))
    architecture(config)
    for change, named in REFUSED[family]:
        with pytest.raises(ConfigError, match=named) as raised:
            architecture(config | change)
        assert len(raised.value.problems) == 1


def test_sizes_that_only_some_families_have_are_read(tmp_path: Path):
    shared = read_config(write_random_dots(tmp_path / "shared"))
    shape = architecture(shared)
    assert (shape.family, shape.dense_layers, shape.shared_hidden_dim) == ("dots1", 1, 64)
    assert architecture(shared | {"layer_types": None, "sliding_window": 64, "max_window_layers": 3}) == shape
    sinks = architecture(read_config(write_random_gpt_oss(tmp_path / "sinks")))
    assert (sinks.family, sinks.windows, sinks.experts) == ("gpt_oss", (16, 0, 16), 8)


def whole_config(**change: Any) -> str:
    config = model_config(TinyModel()) | change
    return json.dumps({key: value for key, value in config.items() if value != "absent"})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (whole_config()[:100], ["where: its config.json cannot be read: "]),
        ("", ["where: its config.json cannot be read: "]),
        ("[" * 100_000, ["where: its config.json cannot be read: "]),
        ("[1]", ["where: its config.json must be an object, it is of type list"]),
        (whole_config(architectures=7), ["where: architectures=7: must be one of Qwen3ForCausalLM, "]),
        (whole_config(architectures=[[]]), ["where: architectures=[]: must be one of Qwen3ForCausalLM, "]),
        (
            whole_config(hidden_size="absent", vocab_size="96", num_attention_heads=0, head_dim=1.5),
            [
                "where: vocab_size='96': must be a whole number of at least 1",
                "where: has no hidden_size, must have a whole number",
                "where: num_attention_heads=0: must be a whole number of at least 1",
                "where: head_dim=1.5: must be a whole number of at least 0",
            ],
        ),
        (
            whole_config(num_attention_heads=4, num_key_value_heads=3),
            ["where: num_key_value_heads=3: must divide num_attention_heads=4"],
        ),
        (whole_config(intermediate_size="absent"), ["where: has no intermediate_size, which Qwen3ForCausalLM must"]),
        (whole_config(rope_parameters="no"), ["where: is not a config of Qwen3ForCausalLM: 'str' object has no"]),
        (
            whole_config(architectures=["LlamaForCausalLM"], rope_parameters={"rope_type": "llama3", "factor": "8"}),
            [
                f"where: rope_type=llama3: must have a number {key} beside it"
                for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            ],
        ),
    ],
)
def test_a_broken_config_is_refused_with_a_line_for_each_problem(content: str, said: list[str], tmp_path: Path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError) as raised:
        shape_of(ModelSettings(path=str(tmp_path)), "where")
    assert [problem[: len(start)] for problem, start in zip(raised.value.problems, said, strict=True)] == said


class Crash(BaseException):
    """The process ends here."""


def filled(model: torch.nn.Module, value: float) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def contents(folder: Path) -> tuple[set[str], set[float]]:
    """The names of a folder's tensors, and the values in them."""
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return set(tensors), {value for tensor in tensors.values() for value in tensor.unique().tolist()}


@pytest.mark.parametrize("at_once", [True, False], ids=["exchange", "three renames"])
def test_a_save_that_ends_anywhere_leaves_the_old_or_the_new_folder_whole(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    model, spec = loaded(tiny_model_folder)
    target, aside = tmp_path / "policy", tmp_path / ".policy.old"
    if not at_once:
        monkeypatch.setattr(goaly.base.atomic_files, "RENAME_EXCHANGE", 1 << 30)  # what no file system knows
    save_hf(filled(model, 0.0), spec, target, tiny_model_folder)
    names, _ = contents(target)
    calls = ((hf, "save_file"), (os, "fsync"), (Path, "rename"), (shutil, "rmtree"), (shutil, "copy2"))
    whole = set()
    for last in range(100):
        steps = iter(range(last))

        def step(*arguments, call, steps=steps, **more):
            if next(steps, None) is None:
                raise Crash
            return call(*arguments, **more)

        save_hf(filled(model, 1.0), spec, target, tiny_model_folder)
        with monkeypatch.context() as patched:
            for owner, name in calls:
                whole_call = getattr(owner, name)
                replaced = functools.partialmethod if owner is Path else functools.partial
                patched.setattr(owner, name, replaced(step, call=whole_call))
            try:
                save_hf(filled(model, 2.0), spec, target, tiny_model_folder, max_file_bytes=200_000)
                break
            except Crash:
                pass
        assert target.exists() or not at_once
        found, values = contents(target if target.exists() else aside)
        assert found == names  # models-2
        assert values in ({1.0}, {2.0})
        whole |= values
    assert whole == {1.0, 2.0}
    assert contents(target) == (names, {2.0})
    assert list(tmp_path.iterdir()) == [target]


def test_what_runs_say_of_a_folder_is_not_said_of_the_policies_that_start_from_it(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_model_folder, tmp_path / "source")
    for mark in (MARK, SCORE_FILE):  # a policy with SFT's mark would be overwritten by the next supervised run
        (source / mark).write_text("{}")
    model, spec = loaded(source)
    save_hf(model, spec, tmp_path / "policy", source)
    names = {file.name for file in (tmp_path / "policy").iterdir()}
    assert names == {file.name for file in tiny_model_folder.iterdir()}


@pytest.mark.parametrize("folder", ["qwen3", "shared-groups"], indirect=True)
def test_saving_holds_no_more_than_a_block_and_a_file_of_tensors(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, spec = loaded(folder)
    gathered, written, held = 0, 0, []
    gather, write = hf.gathered, hf.save_file

    def counted(tensor):
        nonlocal gathered
        whole = gather(tensor)
        gathered += whole.nbytes
        return whole

    def recorded(tensors, *arguments, **more):
        nonlocal written
        held.append(gathered - written)
        written += sum(tensor.nbytes for tensor in tensors.values())
        write(tensors, *arguments, **more)

    monkeypatch.setattr(hf, "gathered", counted)
    monkeypatch.setattr(hf, "save_file", recorded)
    save_hf(model, spec, tmp_path / "saved", folder, max_file_bytes=40_000)
    block = max(sum(p.nbytes for p in child.parameters()) for child in (*model.layers.children(), model.tok_embeddings))
    assert len(held) > 3
    assert max(held) <= 40_000 + 2 * block  # the state of a block, and what a file waits for
    assert max(held) < gathered / 1.4
