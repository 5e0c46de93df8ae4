"""The losses: pure functions of per-token columns, in one registry.

A loss gets the trainer's log-probs of the P trained tokens of a microbatch (with gradient), their entropies, and the
batch's columns at the same tokens; it answers with one value a token. Sums, means over the *global* batch and the
gradient's scale are the engine's business, so a loss can't depend on packing, microbatches or ranks.

Columns that every loss finds beside the trajectory's own: `documents` (i64), which numbers the sequences of the
microbatch. To add a loss, write one function and decorate it with `@loss(name, reads=…)`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from goaly.errors import SchemaError
from goaly.train.settings import LossSettings

Columns = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A loss's value for each trained token, and what to report: per-token values to average, or to take the top of."""

    loss_P: torch.Tensor
    mean: dict[str, torch.Tensor] = field(default_factory=dict)
    maximum: dict[str, torch.Tensor] = field(default_factory=dict)


LossFunction = Callable[[torch.Tensor, torch.Tensor, Columns, LossSettings], LossOutput]
BoundLoss = Callable[[torch.Tensor, torch.Tensor, Columns], LossOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Registered:
    function: LossFunction
    reads: Callable[[LossSettings], tuple[str, ...]]


_LOSSES: dict[str, _Registered] = {}


def loss(
    name: str, *, reads: Callable[[LossSettings], tuple[str, ...]] = lambda settings: ()
) -> Callable[[LossFunction], LossFunction]:
    """Register a loss under `name`; `reads` says which columns it needs."""

    def register(function: LossFunction) -> LossFunction:
        _LOSSES[name] = _Registered(function=function, reads=reads)
        return function

    return register


def loss_names() -> tuple[str, ...]:
    """The names of all losses."""
    return tuple(_LOSSES)


def policy_loss(settings: LossSettings) -> BoundLoss:
    """The settings' loss, as a function that checks its columns first."""
    registered = _LOSSES.get(settings.name)
    if registered is None:
        raise ValueError(f"loss.name={settings.name}: must be one of {', '.join(_LOSSES)}")
    needed = registered.reads(settings)

    def bound(logprobs_P: torch.Tensor, entropies_P: torch.Tensor, columns: Columns) -> LossOutput:
        for key in needed:
            if key not in columns:
                raise SchemaError(f"loss {settings.name}: `{key}` is missing; the batch holds {', '.join(columns)}")
        return registered.function(logprobs_P, entropies_P, columns, settings)

    return bound


@loss("nll")
def negative_log_likelihood(
    logprobs_P: torch.Tensor, entropies_P: torch.Tensor, columns: Columns, settings: LossSettings
) -> LossOutput:
    """Supervised training: each trained token's negative log-likelihood."""
    return LossOutput(loss_P=-logprobs_P, mean={"entropy": entropies_P})


def _grpo_reads(settings: LossSettings) -> tuple[str, ...]:
    return ("advantages", "sampler_logprobs", *(("reference_logprobs",) if settings.kl_coef > 0 else ()))


@loss("grpo", reads=_grpo_reads)
def grpo(logprobs_P: torch.Tensor, entropies_P: torch.Tensor, columns: Columns, settings: LossSettings) -> LossOutput:
    """Clipped policy gradient: `-w * min(r * A, clip(r, 1 - low, 1 + high) * A) + kl_coef * k3(reference)`.

    r is current / proximal; w is proximal / sampler, at most `importance_cap`. With the sampler as the proximal policy
    w is 1; with the trainer, whose one step a batch makes it the current policy, r is 1 and only its gradient counts.
    """
    advantages_P, sampler_P = columns["advantages"], columns["sampler_logprobs"]
    current_P = logprobs_P.detach()
    proximal_P = sampler_P if settings.proximal == "sampler" else current_P
    ratio_P = (logprobs_P - proximal_P).exp()
    clipped_P = ratio_P.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss_P = -torch.minimum(ratio_P * advantages_P, clipped_P * advantages_P)
    importance_P = (current_P - sampler_P).exp()
    mean = {
        "entropy": entropies_P,
        "ratio_mean": importance_P,
        "ratio_square": importance_P.square(),
        "approx_kl": importance_P - 1 - (current_P - sampler_P),
    }
    if settings.proximal == "trainer":
        weight_P = importance_P if settings.importance_cap is None else importance_P.clamp(max=settings.importance_cap)
        loss_P = weight_P * loss_P
        mean["importance_truncated"] = (weight_P < importance_P).float()
    else:
        outside_P = torch.where(
            advantages_P > 0, ratio_P > 1 + settings.clip_high, (advantages_P < 0) & (ratio_P < 1 - settings.clip_low)
        )
        mean["clip_fraction"] = outside_P.float()
    if settings.kl_coef > 0:
        kl_P = k3(logprobs_P, columns["reference_logprobs"])
        loss_P = loss_P + settings.kl_coef * kl_P
        mean["kl_reference"] = kl_P
    return LossOutput(loss_P=loss_P, mean=mean, maximum={"ratio_max": importance_P})


def k3(logprobs_P: torch.Tensor, reference_P: torch.Tensor) -> torch.Tensor:
    """An unbiased, never negative estimate of KL(current || reference) from tokens that the policy drew."""
    difference_P = reference_P - logprobs_P
    return difference_P.exp() - 1 - difference_P


def finish(metrics: dict[str, float]) -> dict[str, float]:
    """Turn means over the global batch into what is reported: the effective sample size needs two of them."""
    reported = dict(metrics)
    square = reported.pop("ratio_square", None)
    if square:
        reported["effective_sample_size"] = reported["ratio_mean"] ** 2 / square
    return reported
