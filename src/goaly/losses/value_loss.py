"""The loss of the critic: the squared distance of its values from the returns. Pure.

    sum over trained tokens of  max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2   /   trained tokens

`V_old` is the value in the batch, computed before its first optimizer step; without a clip the maximum is its first
term.
"""

from collections.abc import Mapping

import torch

from goaly.base.errors import SchemaError
from goaly.losses.objective import Contribution
from goaly.losses.tokens import Columns
from goaly.trajectory import PackedRows


class ValueLoss:
    """Regression on the batch's `returns`, clipped to a distance of `clip` from its `values`; None disables
    clipping."""

    needs_proximal = was_sampled = False

    def __init__(self, clip: float | None = None):
        self._clip = clip

    def denominator(self, packed: PackedRows) -> int:
        """The batch's trained tokens."""
        return packed.batch_trained_tokens

    def __call__(self, values_P: torch.Tensor, columns: Columns, steps_done: int) -> Contribution:
        """The part of this microbatch."""
        old_P, returns_P = _column(columns, "values"), _column(columns, "returns")
        square_P = (values_P - returns_P).square()
        mean = moments(old_P, returns_P)
        if self._clip is not None:
            clipped_P = old_P + (values_P - old_P).clamp(-self._clip, self._clip)
            clipped_square_P = (clipped_P - returns_P).square()
            mean["clip_fraction"] = (clipped_square_P > square_P).float()
            square_P = torch.maximum(square_P, clipped_square_P)
        return Contribution(total=square_P.sum() / 2, mean=mean)


def moments(values_P: torch.Tensor, returns_P: torch.Tensor) -> dict[str, torch.Tensor]:
    """Per-token values whose means give the explained variance."""
    error_P = returns_P - values_P
    return {
        "value": values_P,
        "return": returns_P,
        "return_square": returns_P.square(),
        "error": error_P,
        "error_square": error_P.square(),
    }


def explained(means: Mapping[str, float]) -> dict[str, float]:
    """The metrics to report, with the explained variance 1 - Var(returns - values) / Var(returns).

    It is 0 for constant returns.
    """
    reported = dict(means)
    variance = reported.pop("return_square") - reported["return"] ** 2
    error_variance = reported.pop("error_square") - reported.pop("error") ** 2
    reported["explained_variance"] = 1 - error_variance / variance if variance > 1e-12 else 0.0
    return reported


def _column(columns: Columns, key: str) -> torch.Tensor:
    if key not in columns:
        raise SchemaError(f"value loss: `{key}` is missing; the batch holds {', '.join(columns)}")
    return columns[key]
