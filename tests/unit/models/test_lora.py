"""Adapters against the model that has them merged, the folders that they are saved as, and their settings."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from random_model import (
    write_random_deepseek,
    write_random_dots,
    write_random_gpt_oss,
    write_random_llama,
    write_random_model,
)
from safetensors.torch import load_file, save_file

from goaly.base.config import load
from goaly.base.errors import ConfigError, WeightsError
from goaly.losses.objective import PolicyObjective
from goaly.losses.settings import LossSettings
from goaly.models.adapter_folder import TENSORS, base_digest, merge
from goaly.models.attention import document_masks
from goaly.models.definition import folder_tensors, model_spec, versioned_tensors
from goaly.models.families import architecture, read_config
from goaly.models.hf import load_hf
from goaly.models.lora import BASE, B, draw_adapters, is_adapter, merged
from goaly.models.settings import LoraSettings, ModelSettings
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.numerics.experts import Experts
from goaly.plan.run_config import RunConfig
from goaly.train.settings import OptimizerSettings, ReferenceSettings, TrainerSettings
from goaly.train.train_engine import TrainEngine
from tests.unit.train.batches import documents, pack

LORA = LoraSettings(rank=8, alpha=24.0)
SETTINGS = TrainerSettings(lora=LORA, optimizer=OptimizerSettings(lr=1e-2, weight_decay=0.1))


@pytest.fixture(scope="module", params=["qwen3", "experts", "llama3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of each family."""
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "llama3":
        return write_random_llama(path)
    return write_random_model(path, experts=4 if request.param == "experts" else 0)


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New modules are float64, and so is the product of experts, which torch has in shorter types only."""

    def product(self: Experts, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        rows = A.tensor_split(offs[:-1].tolist())
        return torch.cat([one @ weight for one, weight in zip(rows, B_t, strict=True)])

    monkeypatch.setattr(Experts, "_grouped_mm", product)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def draw_both(tensors: dict[str, torch.Tensor]) -> None:
    """Fill A and B, so that the adapters change what the model computes."""
    draw_adapters(tensors, seed=1)
    draw_adapters(tensors, seed=2, which=B)


def change_norm(folder: Path) -> None:
    """Change one element of the folder's weights."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] += 0.1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def logits(model: Any, tokens_1T: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(tokens_1T.shape[1])[None]
    return model(tokens_1T, positions=positions, attention_masks=document_masks(model, positions))


def test_adapters_compute_what_the_merged_model_computes_in_float64(folder: Path, in_float64: None):  # models-4
    spec = model_spec(folder, lora=LORA)
    model = spec.model.build()
    plain = model_spec(folder).model.build()
    tokens = torch.randint(2, 30, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.init_weights()
        load_hf(model, spec, folder)
        plain.init_weights()
        plain.load_state_dict(merged(model.state_dict(), LORA.scale))
        before = logits(plain, tokens)
        draw_both(versioned_tensors(model))
        plain.load_state_dict(merged(model.state_dict(), LORA.scale))
        after = logits(plain, tokens)
        assert after.dtype == torch.float64
        torch.testing.assert_close(logits(model, tokens), after, atol=1e-12, rtol=1e-11)
        assert (after - before).abs().max() > 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_adapters_are_trained_published_and_checkpointed(folder: Path, dtype: str):  # models-3
    if dtype == "bfloat16" and "llama" in str(folder):
        pytest.skip("the same code as Qwen3's")
    model = ModelSettings(path=str(folder), dtype=dtype)
    engine, whole = TrainEngine(model, SETTINGS), TrainEngine(model, TrainerSettings(), trains=False)
    batch = pack(documents(6), rows=2, row_length=200)
    assert torch.equal(engine.logprobs(batch.rows), whole.logprobs(batch.rows))  # B is 0
    frozen = {name: tensor.detach().clone() for name, tensor in folder_tensors(engine._model).items()}
    metrics = engine.train_step(batch, PolicyObjective(LossSettings()))
    assert metrics["grad_norm"] > 0
    after = folder_tensors(engine._model)
    assert all(torch.equal(after[name].detach(), tensor) for name, tensor in frozen.items())
    assert {tensor.dtype for tensor in frozen.values()} == {getattr(torch, dtype)}
    adapters = dict(engine.named_tensors())
    del adapters[BASE]
    assert {tensor.dtype for tensor in adapters.values()} == {torch.float32}
    assert all(map(is_adapter, adapters))
    shape = architecture(read_config(folder))
    assert sum(tensor.numel() for tensor in adapters.values()) == LORA.elements(shape)
    assert all(tensor.abs().max() > 0 for name, tensor in adapters.items() if name.endswith(B))
    state = engine.state_dict().keys() - {"steps_done", "expert_loads", f"model.{BASE}"}
    kinds = ("model", "step", "exp_avg", "exp_avg_sq")
    assert state == {f"{kind}.{name}" for kind in kinds for name in adapters}


def test_a_resumed_state_has_the_adapters_and_trains_on_as_before(folder: Path):  # models-3
    model = ModelSettings(path=str(folder))
    batch = pack(documents(6), rows=2, row_length=200)
    objective = PolicyObjective(LossSettings())
    first = TrainEngine(model, SETTINGS)
    first.train_step(batch, objective)
    kept = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    other_seed = dataclasses.replace(SETTINGS, lora=dataclasses.replace(LORA, seed=5))
    resumed = TrainEngine(model, other_seed)
    assert resumed.digest() != first.digest()
    resumed.load_state_dict(kept)
    assert resumed.digest() == first.digest()
    assert resumed.train_step(batch, objective) == first.train_step(batch, objective)
    assert resumed.digest() == first.digest()


def test_adapters_of_other_weights_are_refused(folder: Path, tmp_path: Path):  # models-5
    shutil.copytree(folder, tmp_path / "changed")
    change_norm(tmp_path / "changed")
    first, other = (TrainEngine(ModelSettings(path=str(path)), SETTINGS) for path in (folder, tmp_path / "changed"))
    with pytest.raises(WeightsError, match="the adapters were trained beside weights with digest"):
        other.load_state_dict(first.state_dict())


def test_a_saved_adapter_added_to_the_base_is_the_merged_folder(folder: Path, tmp_path: Path):
    settings = dataclasses.replace(SETTINGS, lora=dataclasses.replace(LORA, save="merged"))
    engine = TrainEngine(ModelSettings(path=str(folder)), SETTINGS)
    draw_both(dict(engine.named_tensors()))
    engine.save_hf(tmp_path / "adapter")
    engine.settings, before = settings, {name: t.detach().clone() for name, t in folder_tensors(engine._model).items()}
    engine.save_hf(tmp_path / "merged")
    assert all(torch.equal(tensor, before[name]) for name, tensor in folder_tensors(engine._model).items())
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (8, 24.0, str(folder))
    assert set(config["target_modules"]) == {f"{one}_proj" for one in ("q", "k", "v", "o", "gate", "up", "down")}
    adapters = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    base, whole = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "merged"))
    assert base.keys() == whole.keys()
    changed = 0
    for name, weight in base.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        first, second = (adapters.pop(f"{layer}.lora_{which}.weight", None) for which in "AB")
        if first is not None and second is not None:
            assert first.shape[0] == second.shape[1] == 8
            weight = weight + 24 / 8 * second @ first
            changed += 1
        torch.testing.assert_close(whole[name], weight, atol=1e-6, rtol=1e-5)
    assert adapters == {}
    assert changed >= 3 * 7


def test_a_whole_model_is_made_of_saved_adapters_and_their_base(folder: Path, tmp_path: Path):
    engine = TrainEngine(ModelSettings(path=str(folder)), SETTINGS)
    draw_both(dict(engine.named_tensors()))
    engine.save_hf(tmp_path / "policy")
    merge(tmp_path / "policy", tmp_path / "whole")
    whole = TrainEngine(ModelSettings(path=str(tmp_path / "whole")), TrainerSettings(), trains=False)
    rows = pack(documents(6), rows=2, row_length=200).rows
    torch.testing.assert_close(whole.logprobs(rows), engine.logprobs(rows), atol=2e-5, rtol=1e-4)
    with pytest.raises(ConfigError, match=r"adapters only; python -m goaly\.models\.adapter_folder .*/policy OUTPUT"):
        read_config(tmp_path)
    assert next(iter(ModelSettings(path=str(tmp_path / "policy")).problems("model."))).startswith("model.path=")
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json, must be a folder of adapters"):
        merge(folder, tmp_path / "other")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_merged_only_with_the_weights_that_they_were_trained_beside(  # models-5
    folder: Path, dtype: Any, tmp_path: Path
):
    base = shutil.copytree(folder, tmp_path / "base")
    engine = TrainEngine(ModelSettings(path=str(base), dtype=dtype), SETTINGS)
    engine.save_hf(tmp_path / "policy")
    merge(tmp_path / "policy", tmp_path / "whole")
    digest = base_digest(base, getattr(torch, dtype))
    change_norm(base)
    with pytest.raises(ConfigError) as refused:
        merge(tmp_path / "policy", tmp_path / "other")
    (line,) = refused.value.problems
    changed = base_digest(base, getattr(torch, dtype))
    assert f"{base}: has weights with digest {changed}, must be the model that {tmp_path / 'policy'} was" in line
    assert f"whose digest is {digest};" in line
    assert not (tmp_path / "other").exists()
    save_file(load_file(tmp_path / "policy" / TENSORS), tmp_path / "policy" / TENSORS)  # as PEFT writes them
    merge(tmp_path / "policy", tmp_path / "other")


def test_a_tied_weight_counts_once_in_the_digest_of_a_folder(tmp_path: Path):
    base = write_tiny_model(tmp_path / "base", TinyModel(layers=1, tied=True))
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()  # as some folders have it
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    TrainEngine(ModelSettings(path=str(base)), SETTINGS).save_hf(tmp_path / "policy")
    merge(tmp_path / "policy", tmp_path / "whole")
    assert (tmp_path / "whole" / "config.json").is_file()


def test_a_merge_replaces_no_files(folder: Path, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.txt").write_text("mine")
    for output in (folder, tmp_path / "mine", tmp_path / "mine" / "precious.txt"):
        with pytest.raises(ConfigError, match=f"{output}: is not empty, must be a new folder for the merged model"):
            merge(tmp_path / "nothing", output)  # before anything is read
    assert (tmp_path / "mine" / "precious.txt").read_text() == "mine"


def test_targets_choose_the_layers_that_get_adapters(folder: Path):
    has_experts = "experts" in architecture(read_config(folder)).projections()
    for targets, parts in ((["v"], {"wv"}), (["q", "o"], {"wq", "wo"}), (["k"], {"wk"})):
        model = model_spec(folder, lora=LoraSettings(rank=8, targets=targets)).model.build()
        assert {name.split(".")[-2] for name in versioned_tensors(model)} == parts
    if has_experts:
        engine = TrainEngine(
            ModelSettings(path=str(folder)),
            TrainerSettings(lora=LoraSettings(rank=8, targets=["experts"]), expert_balance=0.1),
        )
        assert {name.split(".")[-2] for name in engine.named_tensors() if name != BASE} == {"inner_experts"}
        for _ in range(2):  # the balance's gradient needs the loads of the step before
            engine.train_step(pack(documents(6), rows=2, row_length=200), PolicyObjective(LossSettings()))


def test_a_reference_has_adapters_only_if_it_is_refreshed():
    assert ReferenceSettings().engine_settings(SETTINGS).lora is None
    assert ReferenceSettings(refresh_every=5).engine_settings(SETTINGS).lora == LORA


@pytest.mark.parametrize(
    ("model", "overrides", "line"),
    [
        ("dense", ["trainer.lora={rank: 0}"], "trainer.lora.rank=0: must be at least 1"),
        ("dense", ["trainer.lora={alpha: 0}"], "trainer.lora.alpha=0"),
        ("dense", ["trainer.lora={targets: [router]}"], "trainer.lora.targets.0=router: must be "),
        ("dense", ["trainer.lora={targets: []}"], "trainer.lora.targets=[]: must name at least one target"),
        ("dense", ["trainer.lora={targets: [q, q]}"], "must name at least one target, and none twice"),
        ("dense", ["trainer.lora={targets: [experts]}"], "the model has no experts, must be among q, k, v, o, gate"),
        ("experts", ["trainer.lora={targets: [gate]}"], "the model has no gate, must be among q, k, v, o, experts"),
        ("dense", ["trainer.lora={rank: 200}"], "trainer.lora.rank=200: must be at most "),
        ("experts", ["trainer.lora={rank: 12}"], "trainer.lora.rank=12: must be a multiple of 8 for adapters of "),
        ("dense", ["trainer.lora={}", "generator.engine=native"], "generator.engine=native: must be torchtitan where"),
        ("latent", ["trainer.lora={}"], "trainer.lora.rank=16: adapters are not supported for the latent attention"),
        (
            "shared",
            ["trainer.lora={}"],
            "trainer.lora.rank=16: adapters are not supported for dots.llm1, whose experts",
        ),
        ("sinks", ["trainer.lora={}"], "trainer.lora.rank=16: adapters are not supported for gpt-oss, whose layers"),
    ],
)
def test_adapters_that_cannot_work_are_refused(model: str, overrides: list[str], line: str, tmp_path: Path):
    others = {"latent": write_random_deepseek, "shared": write_random_dots, "sinks": write_random_gpt_oss}
    if model in others:
        path = others[model](tmp_path)
    else:
        path = write_tiny_model(tmp_path, TinyModel(layers=1, experts=4 if model == "experts" else 0))
    with pytest.raises(ConfigError) as refused:
        load(RunConfig, [f"model.path={path}", "steps=1", *overrides], prog="", description="")
    assert [one for one in refused.value.problems if line in one] != []
