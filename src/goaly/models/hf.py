"""Hugging Face folders in and out of torchtitan models, through torchtitan's state-dict adapters.

Reading goes through distributed checkpoint: each rank reads only the slices that its shards need. Writing gathers one
tensor at a time and leaves on rank 0 a folder that plain transformers loads.

Invariants
    HF-1  Every parameter of the model (but those of a head that is not the folder's) is read, or a ConfigError names
          what the folder lacks or has in another shape.
    HF-2  A folder appears whole: it is written beside its place and renamed.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from goaly.errors import ConfigError
from goaly.models.spec import read_config

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

MAX_FILE_BYTES = 5 * 2**30
NOT_COPIED = (".safetensors", ".bin", ".safetensors.index.json")


def load_hf(model: torch.nn.Module, spec: "ModelSpec", folder: str | Path, *, head: bool = True) -> None:
    """Fill a model, parallelised or not, with the folder's weights (cast to the model's dtype).

    `head=False` leaves what stands in the output projection's place as it is.
    """
    adapter = spec.state_dict_adapter(spec.model, None)
    state = model.state_dict()
    kept = {} if head else {name: state.pop(name) for name in list(state) if name.startswith("lm_head.")}
    wanted = adapter.to_hf(state)
    _check_folder(wanted, Path(folder))
    _read(wanted, adapter, folder, alone=not dist.is_initialized())
    model.load_state_dict(adapter.from_hf(wanted) | kept)


def native_tensors(spec: "ModelSpec", folder: str | Path) -> dict[str, torch.Tensor]:
    """The folder's weights, whole, under the names and in the layout of torchtitan's `named_parameters`."""
    with torch.device("cpu"):
        model = spec.model.build()
    adapter = spec.state_dict_adapter(spec.model, None)
    wanted = adapter.to_hf(model.state_dict())
    _check_folder(wanted, Path(folder))
    _read(wanted, adapter, folder, alone=True)
    model.load_state_dict(adapter.from_hf(wanted))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def save_hf(
    model: torch.nn.Module,
    spec: "ModelSpec",
    folder: str | Path,
    source_folder: str | Path,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the model as a folder, with the config and tokenizer files of `source_folder`. Every rank must call it."""
    adapter = spec.state_dict_adapter(spec.model, None)
    writes = not dist.is_initialized() or dist.get_rank() == 0
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _whole(model):
        if writes:
            tensors[name] = tensor
    if writes:
        _write_folder(adapter.to_hf(tensors), Path(folder), Path(source_folder), max_file_bytes)
    if dist.is_initialized():
        dist.barrier()


def _read(wanted: dict[str, Any], adapter: Any, folder: str | Path, *, alone: bool) -> None:
    """Read the folder's tensors into `wanted`; on its own, or with all ranks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(wanted, storage_reader=adapter.get_hf_storage_reader(str(folder)), no_dist=alone)


def _whole(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The state dict's tensors, gathered one by one, on the CPU."""
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield name, whole.detach().cpu()


def _check_folder(wanted: dict[str, Any], folder: Path) -> None:
    """Raise a ConfigError with a line for each tensor that is missing or of another shape (HF-1)."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError([f"{folder}: has no .safetensors file"])
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as reader:
            found |= {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
    problems = [f"{folder}: `{name}` is missing" for name in wanted if name not in found]
    problems += [
        f"{folder}: `{name}` has shape {found[name]}, config.json says {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in found and found[name] != tuple(tensor.shape)
    ]
    if problems:
        raise ConfigError(problems)


def _write_folder(tensors: dict[str, Any], folder: Path, source: Path, max_file_bytes: int) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        for file in source.iterdir():
            if file.is_file() and file.name != "config.json" and not file.name.endswith(NOT_COPIED):
                shutil.copy2(file, staging / file.name)
        config = read_config(source)
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        config |= {key: dtype for key in ("dtype", "torch_dtype") if key in config}
        (staging / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        _write_tensors(tensors, staging, max_file_bytes)
        if folder.exists():
            shutil.rmtree(folder)
        staging.rename(folder)  # HF-2
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _write_tensors(tensors: dict[str, Any], folder: Path, max_file_bytes: int) -> None:
    files: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        bytes_ = tensor.numel() * tensor.element_size()
        if files[-1] and size + bytes_ > max_file_bytes:
            files.append({})
            size = 0
        files[-1][name] = tensor.contiguous()
        size += bytes_
    if len(files) == 1:
        save_file(files[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for index, content in enumerate(files, start=1):
        name = f"model-{index:05d}-of-{len(files):05d}.safetensors"
        save_file(content, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(content, name)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    (folder / "model.safetensors.index.json").write_text(index_text + "\n")
