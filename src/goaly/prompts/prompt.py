"""What is asked of the policy: a prompt, its messages, and the split it belongs to.

Invariants
    PR-1  A problem is in one split only, for good: the split is a hash of the problem, not of its place or its order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

PASS_REWARD = 1.0
"""An answer passes at this reward or more: for metrics, curricula and evaluations alike."""
SPLIT_KEY = "split_key"
_SPLIT_BUCKETS = 1_000_000


class Split(StrEnum):
    """The two parts of a prompt source."""

    TRAIN = "train"
    """What the policy is trained on."""
    HELD_OUT = "held_out"
    """What it is only measured on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What one group of samples answers. `source` says where it came from; `answer` is for the verifier's eyes only."""

    id: str
    source: str
    messages: tuple[Message, ...]
    answer: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def split_key(self) -> str:
        """What decides the split: `metadata["split_key"]` where the source gives one, else the messages."""
        if SPLIT_KEY in self.metadata:
            return self.metadata[SPLIT_KEY]
        return "\x1e".join(f"{message.role}\x1f{message.content}" for message in self.messages)


def split_of(prompt: Prompt, held_out_fraction: float) -> Split:
    """The split a prompt belongs to (PR-1)."""
    digest = blake2b(prompt.split_key.encode(), digest_size=8).digest()
    bucket = int.from_bytes(digest, "big") % _SPLIT_BUCKETS
    return Split.HELD_OUT if bucket < held_out_fraction * _SPLIT_BUCKETS else Split.TRAIN
