"""Folders of both families go through torchtitan's definitions and back into plain transformers."""

import json
from pathlib import Path

import pytest
import torch

from goaly.errors import ConfigError
from goaly.models.attention import document_masks
from goaly.models.hf import load_hf, native_tensors, save_hf
from goaly.models.spec import model_spec

SIZE = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write_random(folder: Path, family: str, *, tied: bool) -> Path:
    """Save a random model whose greedy choices are clear."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZE, tie_word_embeddings=tied))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZE, tie_word_embeddings=tied, rope_parameters=LLAMA3_ROPE))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0, std=0.1) if "norm" in name else parameter.normal_(std=0.15)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["qwen3", "qwen3_tied", "llama3", "llama3_tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, _, tied = request.param.partition("_")
    return write_random(tmp_path_factory.mktemp(request.param), family, tied=bool(tied))


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


def test_native_tensors_are_the_parameters_of_a_loaded_model(folder: Path):
    model, spec = loaded(folder)
    tensors = native_tensors(spec, folder)
    assert tensors.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(tensors[name], parameter) for name, parameter in model.named_parameters())


def test_every_missing_or_misshapen_tensor_is_named_in_one_error(tiny_model_folder: Path, tmp_path: Path):
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


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures=GPT2LMHeadModel"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type=yarn"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
    ],
)
def test_a_model_that_torchtitan_would_not_reproduce_is_refused_by_name(
    tiny_model_folder: Path, tmp_path: Path, change: dict, named: str
):
    config = json.loads((tiny_model_folder / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=named):
        model_spec(tmp_path)
