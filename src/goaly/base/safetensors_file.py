"""A safetensors file in memory: texts and tensors, written from the tensors' own memory."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch

Buffer = bytes | bytearray | memoryview
"""Bytes; a memoryview has the format `B`."""
METADATA = "__metadata__"
MAX_FILE_BYTES = 5 * 2**30
"""Of a saved policy; a larger one is in several files."""
TYPES = {"I64": torch.int64, "I32": torch.int32, "F32": torch.float32, "BOOL": torch.bool, "U8": torch.uint8}
"""The types of tensors by their names in the file, larger ones first."""
NAMES = {dtype: name for name, dtype in TYPES.items()}


def tensor_file(metadata: Mapping[str, str], contents: Mapping[str, torch.Tensor | list[Buffer]]) -> list[Buffer]:
    """The file of these texts and contents, as buffers that follow one another and share the tensors' memory. A list of
    buffers becomes a tensor of bytes."""
    named: list[tuple[str, str, list[int], list[Buffer]]] = []
    for name, content in contents.items():
        if isinstance(content, torch.Tensor):
            named.append((NAMES[content.dtype], name, list(content.shape), [content.numpy().data.cast("B")]))
        else:
            named.append(("U8", name, [sum(map(len, content))], content))
    order = list(TYPES)
    named.sort(key=lambda one: order.index(one[0]))  # so that each is aligned
    header: dict[str, object] = {METADATA: metadata}
    end = 0
    for dtype, name, shape, buffers in named:
        begin, end = end, end + sum(map(len, buffers))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    return [start, *(buffer for *_, buffers in named for buffer in buffers)]


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The tensors and values of a file, in the file's memory."""

    metadata: dict[str, str]
    contents: dict[str, memoryview]
    types: dict[str, torch.dtype]
    shapes: dict[str, list[int]]

    @classmethod
    def read(cls, file: Buffer) -> "TensorFile":
        """The content of this file; a ValueError, KeyError or TypeError if it is none."""
        start = 8 + int.from_bytes(file[:8], "little")
        header, data = json.loads(bytes(file[8:start])), memoryview(file)[start:]
        metadata = header.pop(METADATA)
        contents = {name: data[slice(*one["data_offsets"])] for name, one in header.items()}
        types = {name: TYPES[one["dtype"]] for name, one in header.items()}
        return cls(metadata, contents, types, {name: one["shape"] for name, one in header.items()})

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its tensors, which share the file's memory: it must be a bytearray."""
        return {
            name: torch.frombuffer(self.contents[name], dtype=dtype).view(self.shapes[name])
            for name, dtype in self.types.items()
        }
