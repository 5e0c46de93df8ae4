"""Length-prefixed pickled messages over the pipes between a pool and its verifier processes.

To the child: `list[tuple[Prompt, str]]`, to be scored in order. From the child: None when the verifier is imported, or
a `Refused`; then a score or a `Refused` for each pair. Both ends are trusted and on one host, so pickle is safe.
"""

import pickle
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

_HEADER = struct.Struct("!I")
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, slots=True)
class Refused:
    """The verifier could not be imported, raised, or returned no finite number."""

    why: str
    is_returned: bool = False
    """Whether it returned something that is no number."""


def encode_message(message: Any) -> bytes:
    """The frame of a message: length and pickle."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """The length of the body after this header."""
    return int(_HEADER.unpack(header)[0])


def decode_message(body: bytes) -> Any:
    """The message of a frame's body."""
    return pickle.loads(body)


def read_message(source: BinaryIO) -> Any | None:
    """The next message; None at the end of the stream."""
    header = source.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    return decode_message(source.read(body_length(header)))
