"""How a candidate ends, and what follows a regression."""

from enum import StrEnum


class Decision(StrEnum):
    """The end of a candidate."""

    PROMOTED = "promoted"
    """Every test found it not worse: it is served."""
    REFUSED = "refused"
    """A test found it worse by more than the margin. The setting `on_regression` says what follows."""
    HELD = "held"
    """Its mix of actions differs from the baseline's by more than the bound; the served version stays."""
    UNDECIDED = "undecided"
    """The pairs ran out before a verdict; the served version stays."""


class OnRegression(StrEnum):
    """The reaction to a candidate that is worse."""

    ROLL_BACK = "roll_back"
    """The trainer goes back to the served version, with the optimizer's state of that version."""
    HOLD = "hold"
    """The trainer goes on; the next version is the next candidate."""
    STOP = "stop"
    """Training stops; the served version is served on."""
