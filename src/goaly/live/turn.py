"""A turn of live traffic: an answer that was served and recorded, what was said about it, and how it ends.

open ──outcome──▶ heard ──judge──▶ judged ──ticket──▶ given ──▶ trained
  └──────────────────┴────────────────┴──────────────────┴────▶ left out, with a reason
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class TurnStage(StrEnum):
    """How far a turn has come that has not ended."""

    OPEN = "open"
    """Nothing has been said about it yet."""
    HEARD = "heard"
    """It has an outcome, which a judge must turn into a reward."""
    JUDGED = "judged"
    """It has a reward, and waits for a batch."""
    GIVEN = "given"
    """It is in the group of a ticket."""


class TurnEnd(StrEnum):
    """How a turn ended."""

    TRAINED = "trained"
    """A training step consumed it."""
    NO_OUTCOME = "no_outcome"
    """Nothing was said about it within `live.outcome_seconds`."""
    UNJUDGED = "unjudged"
    """The judge failed, or did not come to it within `live.outcome_seconds`."""
    STALE = "stale"
    """Its tokens were older than the next batch allows."""
    FULL = "full"
    """The collection was full, and it was the oldest turn without a reward."""
    TOO_LONG = "too_long"
    """Its conversation does not fit in a row of the trainer."""
    NO_TOKENS = "no_tokens"
    """It has no token that can be trained."""
    REFUSED = "refused"
    """The queue did not take its group, or dropped it."""
    FORGOTTEN = "forgotten"
    """Its conversation was removed."""


class ReactionKind(StrEnum):
    """Where an outcome comes from."""

    REPLY = "reply"
    """The user's next message."""
    TOOL_RESULT = "tool_result"
    """The result of a tool that the turn called."""
    FEEDBACK = "feedback"
    """A score, a text or a corrected answer that a client sent."""
    RETRY = "retry"
    """The client asked for another answer to the same request."""
    EDIT = "edit"
    """The client changed its message and asked again."""
    MALFORMED = "malformed"
    """The turn has a tool call that cannot be read, names an unknown tool, or has arguments that are no object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaction:
    """A reaction to a turn."""

    kind: ReactionKind
    text: str | None = None
    """The reply, the tool's result, or the text of the feedback."""
    score: float | None = None
    """The reward, from a client that knows it."""
    corrected: str | None = None
    """The answer that would have been right."""

    def as_record(self) -> dict[str, Any]:
        """The outcome for a log, without what it does not have."""
        known = {"kind": self.kind.value, "text": self.text, "score": self.score, "corrected": self.corrected}
        return {key: value for key, value in known.items() if value is not None}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Reaction":
        """The outcome of a record."""
        known: dict[str, Any] = {**record, "kind": ReactionKind(record["kind"])}
        return cls(**known)


@dataclass(slots=True, kw_only=True, eq=False)
class LiveTurn:
    """A turn that has not ended."""

    id: str
    session: str
    number: int
    """Counts the turns of its session from 0."""
    key: str
    """The name of the API key that it was served to."""
    response: str
    """The last part of the id of the response."""
    siblings: str
    """The same text for answers to one prompt."""
    version: int
    """The oldest policy version of its tokens."""
    at: float
    """The time at which it was recorded, in seconds."""
    stage: TurnStage = TurnStage.OPEN
    reactions: list[Reaction] = field(default_factory=list)
    since: float = 0.0
    """The time at which it came to its stage."""
    reward: float | None = None
    """None also for a turn that is trained by a teacher alone."""
    by: str = ""
    """The source of the reward, or `hint` if a teacher alone judges it."""
    failures: int = 0
    """How often the judge failed."""
    ticket: int | None = None
    baseline: float = 0.0
    """The expected reward of its key when it was given to its ticket."""
