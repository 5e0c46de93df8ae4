"""The objective that the engine minimizes: the loss of a microbatch's tokens, corrected, weighted and summed. Pure.

    sum over tokens of  weight * kept * (form * (importance * loss + kl_coef * KL) - entropy_coef * entropy)
    -------------------------------------------------------------------------------------------------------
                                                denominator

+ distill.weight / taught tokens * sum over the tokens that a teacher judges of  kept * (its value, see distill.py)

`importance` is proximal / sampler, and `kept` masks tokens that are rejected, too old or of a truncated answer. KL and
entropy are not importance-weighted. `form` is 1, or for a token that was drawn under a form its probability without it,
divided by the one with it: the importance weight of that draw. It also weights the token in ratios of its sequence. The
aggregation gives `weight` and `denominator`:

    token_mean     sum over tokens / trained tokens
    sequence_mean  sum over sequences of (mean over its tokens) / sequences
    sequence_sum   sum over sequences of (sum over its tokens / a constant length) / sequences

The denominator counts the global batch and is known before the forward pass. A microbatch only adds its weighted sum;
no mean is taken over a microbatch, a row or a rank.

ratio * importance is current / sampler before clipping and capping: for each token if both are the token's own; for the
whole sequence if importance is the product over it and the ratio is 1. With the sampler's weights, the gradient by a
token's log-prob is -form * A * weight for every loss and correction: one ratio for a sequence carries none of another
token's gradient.

Invariants
    losses-1: The objective returns sums and counts, which add up over microbatches and ranks; the aggregate is the same
        on any packing, microbatches and number of ranks.
    losses-2: A masked token has no gradient and adds nothing to the loss, in no term and in no sequence's ratio.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from goaly.base.errors import SchemaError
from goaly.losses import distill
from goaly.losses.corrections import bound_by_sign, has_sign, importance_weights, proximal_logprobs, rejected, too_old
from goaly.losses.kl import divergence, k3
from goaly.losses.policy_losses import LOSSES, Aggregation, traits
from goaly.losses.settings import LossSettings
from goaly.losses.tokens import Columns, LossOutput, Tokens, sequence_count, sequence_sum
from goaly.trajectory import TAUGHT, TOP_LOGPROBS, TRUNCATED, PackedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """The part of a microbatch in the batch's loss and metrics."""

    total: torch.Tensor
    """The weighted sum, not yet divided."""
    taught: torch.Tensor | None = None
    """The weighted sum over tokens that a teacher judges, not yet divided by the batch's number of them; None without a
    teacher."""
    count: torch.Tensor | None = None
    """Its part of the denominator, if that is known only now; None if it was known before."""
    mean: dict[str, torch.Tensor] = field(default_factory=dict)
    """Values `[P]` to average over the batch's trained tokens."""
    maximum: dict[str, torch.Tensor] = field(default_factory=dict)
    """Values `[P]` of which to report the batch's maximum."""


PROXIMAL = "proximal_logprobs"
"""The column of the trainer's log-probs before the batch, in all minibatches of the batch but the first."""


class Likelihood:
    """Supervised training: the mean negative log-likelihood of the trained tokens."""

    needs_proximal = False
    """Whether minibatches of a batch after the first need `PROXIMAL`."""
    was_sampled = False
    """Whether the tokens were sampled by policies of this run."""

    def denominator(self, packed: PackedRows) -> int:
        """The batch's trained tokens."""
        return packed.batch_trained_tokens

    def __call__(
        self, logprobs_P: torch.Tensor, entropies_P: torch.Tensor, columns: Columns, policy_version: int
    ) -> Contribution:
        """The negative log-likelihood of these tokens."""
        return Contribution(total=-logprobs_P.sum(), mean={"entropy": entropies_P})


class PolicyObjective:
    """The policy loss that the settings describe; raises a ValueError if they can't work."""

    was_sampled = True

    def __init__(self, settings: LossSettings):
        if problems := settings.problems("loss."):
            raise ValueError("\n".join(problems))
        self._settings = settings
        self._loss: Callable[[Tokens], torch.Tensor | LossOutput] = LOSSES.bound(settings.name, settings.options)
        self._aggregation = settings.aggregation or traits(settings.name).aggregation

    @property
    def needs_proximal(self) -> bool:
        """Whether the proximal policy is the trainer's own before the batch."""
        return self._settings.proximal == "trainer"

    def denominator(self, packed: PackedRows) -> int:
        """Trained tokens or sequences of the batch, before any are masked."""
        return batch_denominator(self._aggregation, packed.batch_trained_tokens, packed.batch_sequences)

    def __call__(
        self,
        logprobs_P: torch.Tensor,
        entropies_P: torch.Tensor,
        columns: Columns,
        policy_version: int,
        top_PK: torch.Tensor | None = None,
    ) -> Contribution:
        """The part of this microbatch. `top_PK` are the policy's log-probs of the teacher's most likely tokens."""
        tokens, left_out = self._tokens(logprobs_P, entropies_P, columns, policy_version)
        output = self._output(tokens)
        importance_P, terms = self._importance(tokens)
        loss_P, more = self._with_terms(output.loss_P, importance_P, tokens)
        taught, judged = self._taught(tokens, top_PK)
        terms |= more | judged
        if left_out:
            loss_P = torch.where(tokens.kept_P, loss_P, 0.0)  # losses-2
        after = self._settings.denominator == "after"
        counted_P = tokens.kept_P if after else torch.ones_like(tokens.kept_P)
        weights_P = token_weights(self._aggregation, tokens.documents_P, counted_P, self._settings.constant_length)
        distance = _distance(tokens)
        total = (weights_P * loss_P).sum()
        if self._settings.reward_weight != 1:  # without it the loss of tokens may be infinite
            total = self._settings.reward_weight * total if self._settings.reward_weight else 0 * logprobs_P.sum()
        return Contribution(
            total=total,
            taught=taught,
            count=counted(self._aggregation, tokens.documents_P, counted_P) if after else None,
            mean={"entropy": entropies_P, **distance, **output.mean, **terms, **left_out},
            maximum={"ratio_max": distance["ratio_mean"], **output.maximum},
        )

    def _importance(self, tokens: Tokens) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """The importance weights, or None if they are 1; and their metrics."""
        settings = self._settings
        if settings.proximal == "sampler":
            return None, {}
        raised_P, lowered_P = (has_sign(tokens.advantages_P, sign) for sign in ("positive", "negative"))
        cap, floor = settings.importance_cap, settings.importance_floor
        weight_P, cut_P = importance_weights(
            tokens.proximal_logprobs_P,
            tokens.sampler_logprobs_P,
            tokens.documents_P,
            settings.importance,
            bound_by_sign(cap, settings.importance_cap_negative, lowered_P, otherwise=math.inf),
            bound_by_sign(floor, settings.importance_floor_positive, raised_P, otherwise=0.0),
            tokens.form_weights_P,
        )
        weight_P = torch.where(tokens.kept_P, weight_P, 0.0)  # the weight of a masked token may be infinite
        return weight_P, {"importance_mean": weight_P, "importance_truncated": cut_P.float()}

    def _taught(
        self, tokens: Tokens, top_PK: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """The weighted sum over the tokens that a teacher judges, and its metrics."""
        settings = self._settings.distill
        if settings is None:
            return None, {}
        taught_P = self._column(tokens.columns, TAUGHT)
        if settings.uses_top:
            assert top_PK is not None, "the engine gives the log-probs of the tokens in the teacher's column"
            value_P = distill.DIVERGENCES[settings.by](self._column(tokens.columns, TOP_LOGPROBS), top_PK)
            apart_P = value_P.detach()
        else:
            teacher_P = self._column(tokens.columns, "teacher_logprobs")
            advantages_P = torch.where(taught_P, distill.advantages(teacher_P, tokens.logprobs_P), 0.0)
            judged = replace(tokens, advantages_P=advantages_P)
            value_P, apart_P = self._output(judged).loss_P, -advantages_P
            for factor_P in (self._importance(judged)[0], tokens.form_weights_P):  # the token itself was drawn
                value_P = value_P if factor_P is None else factor_P * value_P
        value_P = torch.where(taught_P & tokens.kept_P, value_P, 0.0)  # losses-2
        metrics = {"distill/taught": taught_P.float(), "distill/divergence": torch.where(taught_P, apart_P, 0.0)}
        return settings.weight * value_P.sum(), metrics

    def _with_terms(
        self, loss_P: torch.Tensor, importance_P: torch.Tensor | None, tokens: Tokens
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss times its importance weight, plus the KL and entropy terms; and their metrics."""
        settings, mean = self._settings, {}
        if importance_P is not None:
            loss_P = importance_P * loss_P
        if settings.kl_coef > 0:
            reference_P = self._column(tokens.columns, "reference_logprobs")
            mean["kl_reference"] = divergence(settings.kl_estimator, tokens.logprobs_P, reference_P)
            loss_P = loss_P + settings.kl_coef * mean["kl_reference"]
        if tokens.form_weights_P is not None:
            mean["form_weight"] = tokens.form_weights_P
            loss_P = tokens.form_weights_P * loss_P
        if settings.entropy_coef > 0:
            loss_P = loss_P - settings.entropy_coef * tokens.entropies_P
        return loss_P, mean

    def _output(self, tokens: Tokens) -> LossOutput:
        output = self._loss(tokens)
        if isinstance(output, torch.Tensor):
            output = LossOutput(loss_P=output)
        found, due = tuple(output.loss_P.shape), tuple(tokens.logprobs_P.shape)
        if found != due:
            raise ValueError(
                f"loss {self._settings.name}: returned a tensor {found}, must be {due}: one value for each token"
            )
        return output

    def _tokens(
        self, logprobs_P: torch.Tensor, entropies_P: torch.Tensor, columns: Columns, policy_version: int
    ) -> tuple[Tokens, dict[str, torch.Tensor]]:
        """The input of the loss, and the metrics of masked tokens."""
        sampler_P = self._column(columns, "sampler_logprobs")
        ages_P = policy_version - self._column(columns, "sampler_versions").long()
        tokens = Tokens(
            logprobs_P=logprobs_P,
            entropies_P=entropies_P,
            proximal_logprobs_P=proximal_logprobs(
                self._settings.proximal, logprobs_P, sampler_P, ages_P, columns.get(PROXIMAL)
            ),
            sampler_logprobs_P=sampler_P,
            advantages_P=self._column(columns, "advantages"),
            ages_P=ages_P,
            documents_P=self._column(columns, "documents"),
            kept_P=torch.ones_like(ages_P, dtype=torch.bool),
            columns=columns,
        )
        masks = self._left_out(tokens)
        if not masks:
            return tokens, {}
        masks["rejected"] = torch.stack([*masks.values()]).any(0)
        return tokens.without(masks["rejected"]), {name: mask_P.float() for name, mask_P in masks.items()}  # losses-2

    def _left_out(self, tokens: Tokens) -> dict[str, torch.Tensor]:
        """The mask of each rule."""
        compared = {"proximal": tokens.proximal_logprobs_P, "current": tokens.logprobs_P.detach()}
        masks = {
            f"rejected_{rule.name}": rejected(
                rule,
                compared[rule.policy],
                tokens.sampler_logprobs_P,
                tokens.documents_P,
                tokens.form_weights_P,
            )
            & has_sign(tokens.advantages_P, rule.advantage)
            for rule in self._settings.rejections
        }
        if self._settings.max_age is not None:
            masks["rejected_max_age"] = too_old(tokens.ages_P, self._settings.max_age)
        if self._settings.mask_truncated:
            masks["rejected_truncated"] = self._column(tokens.columns, TRUNCATED)
        return masks

    def _column(self, columns: Columns, key: str) -> torch.Tensor:
        if key not in columns:
            raise SchemaError(f"loss {self._settings.name}: `{key}` is missing; the batch holds {', '.join(columns)}")
        return columns[key]


Objective = Likelihood | PolicyObjective
"""The objective of an engine."""


def _distance(tokens: Tokens) -> dict[str, torch.Tensor]:
    """Measures of the distance between trainer and sampler at each token."""
    current_P, sampler_P = tokens.logprobs_P.detach(), tokens.sampler_logprobs_P
    ratio_P = (current_P - sampler_P).exp()
    return {"ratio_mean": ratio_P, "ratio_square": ratio_P.square(), "sampler_kl": k3(sampler_P, current_P)}


def finish(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics to report, from means over the global batch."""
    reported = dict(metrics)
    if taught := reported.pop("distill/taught", None):
        reported["distill/divergence"] /= taught  # the mean over taught tokens
    square = reported.pop("ratio_square", None)
    if square:
        mean = reported["ratio_mean"]
        reported["ratio_std"] = max(square - mean**2, 0.0) ** 0.5
        reported["effective_sample_size"] = mean**2 / square
    return reported


def token_weights(
    aggregation: Aggregation, documents_P: torch.Tensor, counted_P: torch.Tensor, constant_length: int | None
) -> torch.Tensor:
    """The factor of each token's value (f32); `counted_P` masks the tokens that count in a sequence's length."""
    if aggregation == "sequence_mean":
        return 1 / sequence_sum(counted_P.float(), documents_P).clamp(min=1)
    if aggregation == "sequence_sum":
        assert constant_length is not None, "settings without constant_length are refused"
        return torch.full_like(documents_P, 1 / constant_length, dtype=torch.float32)
    return torch.ones_like(documents_P, dtype=torch.float32)


def batch_denominator(aggregation: Aggregation, trained_tokens: int, sequences: int) -> int:
    """The divisor of a whole batch's weighted sum."""
    return trained_tokens if aggregation == "token_mean" else sequences


def counted(aggregation: Aggregation, documents_P: torch.Tensor, counted_P: torch.Tensor) -> torch.Tensor:
    """These tokens' part of the denominator if only `counted_P`, and sequences with such a token, count."""
    return counted_P.sum() if aggregation == "token_mean" else sequence_count(documents_P[counted_P])
