"""Tokens to which the sampler gave no finite log-prob are context (trajectory-1)."""

from collections.abc import Mapping

import torch

from goaly.base.telemetry.metrics import count
from goaly.trajectory import FORM_WEIGHTS


def without_non_finite(columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The columns, in which tokens without a finite log-prob are not trained (trajectory-1); they count as a metric."""
    finite_T = columns["sampler_logprobs"].isfinite()
    if finite_T.all():
        return dict(columns)
    count("rollout/non_finite_logprobs", int((~finite_T).sum()))
    changed = {"trained": columns["trained"] & finite_T, "sampler_logprobs": columns["sampler_logprobs"]}
    if FORM_WEIGHTS in columns:
        changed[FORM_WEIGHTS] = columns[FORM_WEIGHTS]
    for key in changed.keys() - {"trained"}:
        changed[key] = changed[key].where(finite_T, 1.0 if key == FORM_WEIGHTS else 0.0)
    return {**columns, **changed}
