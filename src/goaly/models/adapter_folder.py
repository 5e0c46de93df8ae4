"""Folders of adapters in PEFT's format, with the names and the row order of the Hugging Face model.

    adapter_config.json            rank, alpha, the names of the layers, the base model's folder
    adapter_model.safetensors      base_model.model.<layer>.lora_A.weight and .lora_B.weight, float32; as metadata, the
                                   digest of the base model's weights, and their type in training

and the tokenizer files of the base model. Experts have adapters one by one, as `mlp.experts.3.up_proj`. To make a whole
model of such a folder and its base model's, in a new folder:

    python -m goaly.models.adapter_folder ADAPTERS OUTPUT

Adapters are merged only with the weights that they were trained beside. Folders that PEFT wrote have no digest of
these, and are not checked. A merge replaces no files.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from goaly.base.errors import ConfigError
from goaly.models.architecture import LAYER
from goaly.models.definition import folder_tensors, layer_adapter, model_spec, versioned_tensors
from goaly.models.hf import Tensors, gathered, staged_folder, write_folder, write_gathered
from goaly.models.lora import BASE, A, B, merged
from goaly.models.settings import ADAPTER_CONFIG, LoraSettings
from goaly.weights.digest import Digest

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
DIGEST, DTYPE = "base_digest", "base_dtype"
"""Keys of the metadata: PEFT and vLLM ignore them there."""


def save_adapters(
    model: torch.nn.Module,
    spec: "ModelSpec",
    folder: str | Path,
    base: str | Path,
    lora: LoraSettings,
    gather: Callable[[Tensors], Tensors] = iter,
) -> None:
    """Write the folder of a model's adapters; `base` is the model's. Every rank must call it. `gather` as in
    `save_hf`."""
    tensors = gather(_in_peft_format(model, spec.state_dict_adapter(spec.model, None)))
    dtype = str(next(iter(folder_tensors(model).values())).dtype).removeprefix("torch.")
    metadata = {DIGEST: f"{int(model.get_buffer(BASE)) + 2**63:016x}", DTYPE: dtype}
    write_gathered(tensors, lambda whole: _write(dict(whole), Path(folder), Path(base), lora, metadata))


def merge(adapters: str | Path, folder: str | Path) -> None:
    """Write the model that these adapters and their base model make, in the base model's type, to a new folder."""
    adapters, folder = Path(adapters), Path(folder)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigError([f"{folder}: is not empty, must be a new folder for the merged model"])
    if not (adapters / ADAPTER_CONFIG).is_file():
        raise ConfigError([f"{adapters}: has no {ADAPTER_CONFIG}, must be a folder of adapters"])
    config = json.loads((adapters / ADAPTER_CONFIG).read_text())
    changes = load_file(adapters / TENSORS)
    base = Path(config["base_model_name_or_path"])
    files = sorted(base.glob("*.safetensors"))
    if not files:
        raise ConfigError([f"{base}: has no .safetensors file, must be the model that {adapters} was trained on"])
    _check_base(adapters, base)
    scale = config["lora_alpha"] / config["r"]

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for file in files:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118
                    state = {name: reader.get_tensor(name)}
                    for suffix, which in ((A, "A"), (B, "B")):
                        key = f"{PREFIX}{name.removesuffix('.weight')}.lora_{which}.weight"
                        if key in changes:
                            state[name + suffix] = changes.pop(key)
                    yield name, merged(state, scale)[name]
        if changes:
            raise ConfigError([f"{base}: has no weights for {len(changes)} adapters, such as {min(changes)}"])

    write_folder(weights(), folder, base)


def _check_base(adapters: Path, base: Path) -> None:
    """Raise unless this is the model that the adapters were trained beside."""
    with safe_open(adapters / TENSORS, framework="pt") as reader:
        metadata = reader.metadata() or {}
    expected = metadata.get(DIGEST)
    if expected is not None and (found := base_digest(base, getattr(torch, metadata[DTYPE]))) != expected:
        raise ConfigError(
            [
                f"{base}: has weights with digest {found}, must be the model that {adapters} was trained on, whose "
                f"digest is {expected}; {ADAPTER_CONFIG} has its folder as base_model_name_or_path"
            ]
        )


def base_digest(base: Path, dtype: torch.dtype) -> str:
    """The digest of this folder's weights in a process that has loaded them in this type (models-5). One layer is in
    memory at a time."""
    spec = model_spec(base, lora=LoraSettings())
    names = layer_adapter(spec)
    with torch.device("meta"):
        wanted = spec.state_dict_adapter(spec.model, None).to_hf(spec.model.build().state_dict())
    layers: dict[str, dict[str, Any]] = {}
    total = 0
    with ExitStack() as opened:
        for file in sorted(base.glob("*.safetensors")):
            reader: Any = opened.enter_context(safe_open(file, framework="pt"))
            for name in wanted.keys() & set(reader.keys()):
                layer = LAYER.match(name)
                layers.setdefault(layer[0] if layer else name, {})[name] = reader
        for readers in layers.values():
            read = {name: reader.get_tensor(name).to(dtype) for name, reader in readers.items()}
            total += int(Digest(names.from_hf(read)).compute(), 16)
    return f"{total % 2**64:016x}"


def _in_peft_format(model: torch.nn.Module, names: Any) -> Iterator[tuple[str, torch.Tensor]]:
    held = versioned_tensors(model)
    for name in [name.removesuffix(A) for name in held if name.endswith(A)]:
        a, b = (gathered(held[name + which]).float().cpu() for which in (A, B))
        rank, columns = a.shape[-2:]
        # The model's adapter of state dicts names the layer and orders its rows: it gets B with the weight's width.
        wide = names.to_hf({name: torch.nn.functional.pad(b, (0, columns - rank))})
        each = a if a.dim() == 3 else a[None]
        for (hf_name, rows), one in zip(wide.items(), each, strict=True):
            layer = PREFIX + hf_name.removesuffix(".weight")
            yield f"{layer}.lora_A.weight", one.clone()
            yield f"{layer}.lora_B.weight", rows[:, :rank].clone()


def _write(
    tensors: dict[str, torch.Tensor], folder: Path, base: Path, lora: LoraSettings, metadata: dict[str, str]
) -> None:
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
    }
    with staged_folder(folder, base) as staging:
        save_file(tensors, staging / TENSORS, metadata={"format": "pt"} | metadata)
        (staging / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m goaly.models.adapter_folder ADAPTERS OUTPUT")
    try:
        merge(*sys.argv[1:])
    except ConfigError as error:
        sys.exit(str(error))
