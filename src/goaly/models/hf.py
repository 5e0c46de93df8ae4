"""Hugging Face folders in and out of torchtitan models, through torchtitan's state-dict adapters.

Reading goes through distributed checkpoint: each rank reads only the slices that its shards need. Writing gathers one
block at a time on every rank, and rank 0 leaves a folder that plain transformers loads.

Invariants
    HF-1  Every parameter of the model (but those of a head that is not the folder's) is read, or a ConfigError names
          what the folder lacks or has in another shape.
    HF-2  A folder appears whole: it is written beside its place, synced, and swapped with the old one, which is deleted
          after that. A crash leaves the old or the new one whole.
    HF-3  Whatever the model's size, rank 0 holds no more than a block and a file's worth of tensors beside its shards.
"""

import ctypes
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
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Of Linux's `renameat2`."""
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
    tensors = (
        (name, whole.cpu() if writes else whole)
        for state in _by_block(model)
        for name, whole in adapter.to_hf(dict(_whole(state))).items()
    )
    try:
        if writes:
            _write_folder(tensors, Path(folder), Path(source_folder), max_file_bytes)
    finally:
        for _ in tensors:  # also where rank 0 can't write, it takes part in what the others gather
            pass
        if dist.is_initialized():
            dist.barrier()


def _read(wanted: dict[str, Any], adapter: Any, folder: str | Path, *, alone: bool) -> None:
    """Read the folder's tensors into `wanted`; on its own, or with all ranks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(wanted, storage_reader=adapter.get_hf_storage_reader(str(folder)), no_dist=alone)


def _by_block(model: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """The state dict in parts, a transformer block each: torchtitan gathers fused projections when it is asked."""
    for name, child in model.named_children():
        blocks = child.named_children() if name == "layers" else [("", child)]
        for number, block in blocks:
            yield block.state_dict(prefix=f"{name}.{number}." if number else f"{name}.")


def _whole(state: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """A part's tensors, gathered one by one."""
    for name, tensor in state.items():
        yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


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


def _write_folder(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, source: Path, max_file_bytes: int) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        for file in source.iterdir():
            if file.is_file() and file.name != "config.json" and not file.name.endswith(NOT_COPIED):
                shutil.copy2(file, staging / file.name)
        dtype = str(_write_tensors(tensors, staging, max_file_bytes)).removeprefix("torch.")
        config = read_config(source)
        config |= {key: dtype for key in ("dtype", "torch_dtype") if key in config}
        (staging / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        _put_in_place(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_tensors(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, max_file_bytes: int) -> torch.dtype:
    """Write files of at most so many bytes (or one tensor), holding one at a time (HF-3); the first tensor's dtype."""
    files: list[list[str]] = []
    content: dict[str, torch.Tensor] = {}
    total = size = 0
    dtype = None

    def flush() -> None:
        nonlocal content, size
        files.append(list(content))
        save_file(content, folder / f"{len(files)}.part", metadata={"format": "pt"})
        content, size = {}, 0

    for name, tensor in tensors:
        dtype = dtype or tensor.dtype
        if content and size + tensor.nbytes > max_file_bytes:
            flush()
        content[name] = tensor.contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    assert dtype is not None, "a model has tensors"
    if len(files) == 1:
        (folder / "1.part").rename(folder / "model.safetensors")
        return dtype
    weight_map = {}
    for index, names in enumerate(files, start=1):
        name = f"model-{index:05d}-of-{len(files):05d}.safetensors"
        (folder / f"{index}.part").rename(folder / name)
        weight_map |= dict.fromkeys(names, name)
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    (folder / "model.safetensors.index.json").write_text(index_text + "\n")
    return dtype


def _put_in_place(staging: Path, folder: Path) -> None:
    """Make the written folder durable, and have it stand in place of the old one, which `staging` is then (HF-2)."""
    for path in (*staging.iterdir(), staging):
        _sync(path)
    if folder.exists():
        _exchange(staging, folder)
    else:
        staging.rename(folder)
    _sync(folder.parent)


def _exchange(one: Path, other: Path) -> None:
    """Swap two names in one step; in three where the file system can't, with the old folder whole beside them."""
    libc = ctypes.CDLL(None, use_errno=True)
    swap = getattr(libc, "renameat2", None)
    if swap is not None and swap(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return
    aside = other.with_name(f".{other.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    other.rename(aside)
    one.rename(other)
    aside.rename(one)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
