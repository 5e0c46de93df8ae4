"""Loads torchtitan models from Hugging Face folders and saves them, with torchtitan's state-dict adapters.

Loading uses distributed checkpoint: each rank reads only the slices of its shards. Saving gathers one block at a time
on every rank, and rank 0 writes a folder that plain transformers loads. Rank 0 holds at most a block and a file of
tensors in addition to its shards.

Invariants
    models-1: Every parameter of the model, except adapters and those of a new head, is read. A ConfigError names
    tensors that the folder lacks or has in another shape.
    models-2: A folder appears atomically: it is written next to its place, synced, and swapped with the old one, which
    is then deleted. A crash leaves the old or the new folder complete.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from goaly.base.atomic_files import put_in_place
from goaly.base.errors import ConfigError
from goaly.base.safetensors_file import MAX_FILE_BYTES
from goaly.models.families import read_config
from goaly.models.lora import is_adapter, merged
from goaly.models.weight_files import shapes_in

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

Tensors = Iterator[tuple[str, torch.Tensor]]

NOT_COPIED = (".safetensors", ".bin", ".safetensors.index.json", "policy_score.json", "sft.json")
"""Ends of the names of weights, and of what runs say of the folder that they made."""


def load_hf(model: torch.nn.Module, spec: "ModelSpec", folder: str | Path, *, head: bool = True) -> None:
    """Load the folder's weights into a model, cast to the model's dtype. If ranks divide the model, all must call it.

    `head=False` does not load the output projection, for models with another head.
    """
    adapter = spec.state_dict_adapter(spec.model, None)
    state = model.state_dict()
    is_divided = any(isinstance(tensor, DTensor) for tensor in state.values())
    new = [name for name in state if is_adapter(name) or (not head and name.startswith("lm_head."))]
    kept = {name: state.pop(name) for name in new}
    wanted = adapter.to_hf(state)
    _check_folder(wanted, Path(folder))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        reader = adapter.get_hf_storage_reader(str(folder))
        dcp.load(wanted, storage_reader=reader, no_dist=not is_divided)
    model.load_state_dict(adapter.from_hf(wanted) | kept)


def save_hf(
    model: torch.nn.Module,
    spec: "ModelSpec",
    folder: str | Path,
    source_folder: str | Path,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    scale: float = 0.0,
    gather: Callable[[Tensors], Tensors] = iter,
) -> None:
    """Write the model as a folder, with the config and tokenizer files of `source_folder`. Every rank must call it.

    Adapters are added to their weights with the factor `scale`. On rank 0 `gather` adds the tensors of other stages to
    those of this one.
    """
    adapter = spec.state_dict_adapter(spec.model, None)
    tensors = (
        (name, whole.cpu() if _writes() else whole)
        for state in _by_block(model)
        for name, whole in adapter.to_hf(merged({key: gathered(one) for key, one in state.items()}, scale)).items()
    )
    write_gathered(
        gather(tensors), lambda whole: write_folder(whole, Path(folder), Path(source_folder), max_file_bytes)
    )


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor. Every rank that has a part must call it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def write_gathered(tensors: Tensors, write: Callable[[Tensors], None]) -> None:
    """Call `write` on rank 0 with the `tensors` that all ranks gather. Every rank must call it."""
    try:
        if _writes():
            write(tensors)
    finally:
        for _ in tensors:  # rank 0 must take part in all gathers, also if it can't write
            pass
        if dist.is_initialized():
            dist.barrier()


def _writes() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _by_block(model: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """The state dict in parts of one transformer block: torchtitan gathers fused projections of a whole state dict."""
    for name, child in model.named_children():
        blocks = child.named_children() if name == "layers" else [("", child)]
        for number, block in blocks:
            yield block.state_dict(prefix=f"{name}.{number}." if number else f"{name}.")


def _check_folder(wanted: dict[str, Any], folder: Path) -> None:
    """Raise a ConfigError with a line for each tensor that is missing or of another shape (models-1)."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError([f"{folder}: has no .safetensors file"])
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        found |= shapes_in(file)
    problems = [f"{folder}: `{name}` is missing" for name in wanted if name not in found]
    problems += [
        f"{folder}: `{name}` has shape {found[name]}, config.json says {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in found and found[name] != tuple(tensor.shape)
    ]
    if problems:
        raise ConfigError(problems)


@contextmanager
def staged_folder(folder: Path, source: Path) -> Iterator[Path]:
    """A hidden folder with the tokenizer files of `source`, which takes the place of `folder` at the end (models-2)."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        for file in source.iterdir():
            if file.is_file() and file.name != "config.json" and not file.name.endswith(NOT_COPIED):
                shutil.copy2(file, staging / file.name)
        yield staging
        put_in_place(staging, folder)  # models-2
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_folder(
    tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, source: Path, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write a model's folder with these tensors, and with the config and tokenizer files of `source`."""
    with staged_folder(folder, source) as staging:
        dtype = str(_write_tensors(tensors, staging, max_file_bytes)).removeprefix("torch.")
        config = read_config(source)
        config |= {key: dtype for key in ("dtype", "torch_dtype") if key in config}
        (staging / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _write_tensors(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, max_file_bytes: int) -> torch.dtype:
    """Write files of at most `max_file_bytes` (or one tensor), one at a time, and return the dtype."""
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
