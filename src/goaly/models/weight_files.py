"""Checks a folder's weights before a run starts: its files are whole, and have the sizes of its `config.json`.

Only headers are read. Loading compares every tensor (models-1).
"""

import json
from collections.abc import Iterator
from pathlib import Path

from goaly.models.architecture import LAYER, Architecture

INDEX = "model.safetensors.index.json"
LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Errors that reading a damaged file raises."""


def weight_problems(folder: str | Path, shape: Architecture, where: str, *, head: bool = True) -> Iterator[str]:
    """One line for each reason why this folder's weights are not those of a model of this shape. `where` names the
    folder; without `head` the output projection is not needed."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        yield f"{where}: has no .safetensors file, must have the model's weights"
        return
    found: dict[str, tuple[int, ...]] = {}
    problems = list(_absent_files(Path(folder), {file.name for file in files}))
    for file in files:
        try:
            found |= shapes_in(file)
        except DAMAGED as error:
            problems.append(f"{file.name} is damaged: {error}")
    problems = problems or list(_contradictions(found, shape, head=head))
    yield from (f"{where}: {problem}" for problem in problems)


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a safetensors file, by name; a ValueError if the file is not whole."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = LENGTH_BYTES + int.from_bytes(opened.read(LENGTH_BYTES), "little")
        if size < start:
            raise ValueError(f"it has {size} bytes, its header alone must have {start}")
        header = json.loads(opened.read(start - LENGTH_BYTES))
    header.pop("__metadata__", None)
    whole = start + max((one["data_offsets"][1] for one in header.values()), default=0)
    if size != whole:
        raise ValueError(f"it has {size} bytes, must have the {whole} of its header")
    return {name: tuple(one["shape"]) for name, one in header.items()}


def _absent_files(folder: Path, present: set[str]) -> Iterator[str]:
    """A line for each fault of a folder's index of its files."""
    index = folder / INDEX
    if not index.is_file():
        return
    try:
        listed = set(json.loads(index.read_bytes())["weight_map"].values())
    except DAMAGED as error:
        yield f"{INDEX} is damaged: {type(error).__name__}: {error}"
    else:
        yield from (f"has no {name}, which {INDEX} lists" for name in sorted(listed - present))


def _contradictions(found: dict[str, tuple[int, ...]], shape: Architecture, *, head: bool) -> Iterator[str]:
    """The first tensor that is missing, the first of another shape, and layers beyond the model's."""
    wanted = {name: size for name, size in shape.folder_shapes() if head or name != "lm_head.weight"}
    missing = [name for name in wanted if name not in found]
    if missing:
        yield f"its weights have no `{missing[0]}`, which its config.json asks for"
    for name, size in wanted.items():
        if name in found and found[name] != size:
            yield f"`{name}` has shape {found[name]}, must have the {size} of its config.json"
            break
    last = max((int(layer[1]) for name in found if (layer := LAYER.match(name))), default=0)
    if last >= shape.layers and not shape.has_unloaded_layers:
        yield f"its weights have {last + 1} layers, its config.json has num_hidden_layers={shape.layers}"
