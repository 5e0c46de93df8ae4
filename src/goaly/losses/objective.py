"""From settings to what the engine minimizes: the loss of a microbatch's tokens, corrected, weighted and summed.

    sum over tokens of  weight * kept * (importance * loss + kl_coef * KL - entropy_coef * entropy)   /   denominator

`weight` and `denominator` are the aggregation's, `importance` is proximal / sampler (1 where they are the same), `kept`
leaves out what is rejected, too old or of a truncated answer. KL and entropy are not importance-weighted.

Invariants
    OB-1  ratio * importance is current / sampler before clipping and capping, no factor is dropped: of each token where
          both are the token's own; of the whole sequence where importance is its product and the ratio is 1.
    OB-2  A token that is left out adds nothing to the loss and has no gradient: through no term, and through no
          sequence's ratio.
    OB-3  What is returned is a sum and counts: it adds up over microbatches and ranks to that of the whole batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from goaly.errors import SchemaError
from goaly.losses import aggregation as aggregations
from goaly.losses.corrections import importance_weights, rejected, too_old
from goaly.losses.kl import divergence, k3
from goaly.losses.policy import LOSSES, nature
from goaly.losses.proximal import proximal_logprobs
from goaly.losses.settings import LossSettings
from goaly.losses.tokens import Columns, LossOutput, Tokens
from goaly.trajectory import TRUNCATED, PackedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What a microbatch adds to the batch's loss, and to what is reported."""

    total: torch.Tensor
    """The weighted sum, not yet divided."""
    count: torch.Tensor | None = None
    """What it adds to the denominator, where that is known only now; None where it was known before."""
    mean: dict[str, torch.Tensor] = field(default_factory=dict)
    """Values `[P]` to average over the batch's trained tokens."""
    maximum: dict[str, torch.Tensor] = field(default_factory=dict)
    """Values `[P]` to take the batch's greatest of."""


PROXIMAL = "proximal_logprobs"
"""The column of the trainer's log-probs before the batch, in all of its parts but the first."""


class Objective(Protocol):
    """What an engine minimizes."""

    @property
    def looks_back(self) -> bool:
        """Whether parts of a batch after the first need `PROXIMAL`."""
        ...

    def denominator(self, packed: PackedRows) -> int:
        """What the whole batch's sum is divided by, as far as it is known before the forward pass."""
        ...

    def __call__(
        self, logprobs_P: torch.Tensor, entropies_P: torch.Tensor, columns: Columns, policy_version: int
    ) -> Contribution:
        """A microbatch's share."""
        ...


class Likelihood:
    """Supervised training: the mean negative log-likelihood of the trained tokens."""

    looks_back = False

    def denominator(self, packed: PackedRows) -> int:
        """The batch's trained tokens."""
        return packed.batch_trained_tokens

    def __call__(
        self, logprobs_P: torch.Tensor, entropies_P: torch.Tensor, columns: Columns, policy_version: int
    ) -> Contribution:
        """The negative log-likelihood of these tokens."""
        return Contribution(total=-logprobs_P.sum(), mean={"entropy": entropies_P})


class PolicyObjective:
    """The policy loss that the settings describe."""

    def __init__(self, settings: LossSettings):
        if problems := settings.problems("loss."):
            raise ValueError("\n".join(problems))
        self._settings = settings
        self._loss: Callable[[Tokens], torch.Tensor | LossOutput] = LOSSES.bound(settings.name, settings.options)
        self._aggregation = settings.aggregation or nature(settings.name).aggregation

    @property
    def looks_back(self) -> bool:
        """Whether the proximal policy is the trainer's own before the batch."""
        return self._settings.proximal == "trainer"

    def denominator(self, packed: PackedRows) -> int:
        """Trained tokens or sequences of the batch, before anything is rejected."""
        return aggregations.denominator(self._aggregation, packed.batch_trained_tokens, packed.batch_sequences)

    def __call__(
        self, logprobs_P: torch.Tensor, entropies_P: torch.Tensor, columns: Columns, policy_version: int
    ) -> Contribution:
        """A microbatch's share."""
        tokens, left_out = self._tokens(logprobs_P, entropies_P, columns, policy_version)
        output = self._output(tokens)
        loss_P, terms = self._with_terms(output.loss_P, tokens)
        if left_out:
            loss_P = torch.where(tokens.kept_P, loss_P, 0.0)  # OB-2
        after = self._settings.denominator == "after"
        counted_P = tokens.kept_P if after else torch.ones_like(tokens.kept_P)
        weights_P = aggregations.token_weights(
            self._aggregation, tokens.documents_P, counted_P, self._settings.constant_length
        )
        distance = _distance(tokens)
        return Contribution(
            total=(weights_P * loss_P).sum(),
            count=aggregations.counted(self._aggregation, tokens.documents_P, counted_P) if after else None,
            mean={"entropy": entropies_P, **distance, **output.mean, **terms, **left_out},
            maximum={"ratio_max": distance["ratio_mean"], **output.maximum},
        )

    def _with_terms(self, loss_P: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss times its importance weight, plus the KL and entropy terms; and what to report of them."""
        settings, mean = self._settings, {}
        if settings.proximal != "sampler":  # else the weight is 1
            weight_P, cut_P = importance_weights(
                tokens.proximal_logprobs_P,
                tokens.sampler_logprobs_P,
                tokens.documents_P,
                settings.importance,
                settings.importance_cap,
                settings.importance_floor,
            )
            weight_P = torch.where(tokens.kept_P, weight_P, 0.0)  # a rejected weight may be infinite
            loss_P = weight_P * loss_P  # OB-1
            mean |= {"importance_mean": weight_P, "importance_truncated": cut_P.float()}
        if settings.kl_coef > 0:
            reference_P = self._column(tokens.columns, "reference_logprobs")
            mean["kl_reference"] = divergence(settings.kl_estimator, tokens.logprobs_P, reference_P)
            loss_P = loss_P + settings.kl_coef * mean["kl_reference"]
        if settings.entropy_coef > 0:
            loss_P = loss_P - settings.entropy_coef * tokens.entropies_P
        return loss_P, mean

    def _output(self, tokens: Tokens) -> LossOutput:
        output = self._loss(tokens)
        if isinstance(output, torch.Tensor):
            output = LossOutput(loss_P=output)
        found, due = tuple(output.loss_P.shape), tuple(tokens.logprobs_P.shape)
        if found != due:
            raise ValueError(f"loss {self._settings.name}: gave a tensor {found}, must be one value a token, {due}")
        return output

    def _tokens(
        self, logprobs_P: torch.Tensor, entropies_P: torch.Tensor, columns: Columns, policy_version: int
    ) -> tuple[Tokens, dict[str, torch.Tensor]]:
        """The tokens as the loss sees them; and what to report of those that are left out."""
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
        return tokens.without(masks["rejected"]), {name: mask_P.float() for name, mask_P in masks.items()}  # OB-2

    def _left_out(self, tokens: Tokens) -> dict[str, torch.Tensor]:
        """The tokens that each rule leaves out."""
        compared = {"proximal": tokens.proximal_logprobs_P, "current": tokens.logprobs_P.detach()}
        masks = {
            f"rejected_{rule.name}": rejected(
                rule, compared[rule.policy], tokens.sampler_logprobs_P, tokens.documents_P
            )
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


def policy_loss(settings: LossSettings) -> PolicyObjective:
    """The settings' objective; a ValueError if they can't work."""
    return PolicyObjective(settings)


def _distance(tokens: Tokens) -> dict[str, torch.Tensor]:
    """How far the trainer is from the sampler, at each token."""
    current_P, sampler_P = tokens.logprobs_P.detach(), tokens.sampler_logprobs_P
    ratio_P = (current_P - sampler_P).exp()
    return {"ratio_mean": ratio_P, "ratio_square": ratio_P.square(), "sampler_kl": k3(sampler_P, current_P)}


def finish(metrics: dict[str, float]) -> dict[str, float]:
    """Turn means over the global batch into what is reported: spread and effective sample size need two of them."""
    reported = dict(metrics)
    square = reported.pop("ratio_square", None)
    if square:
        mean = reported["ratio_mean"]
        reported["ratio_std"] = max(square - mean**2, 0.0) ** 0.5
        reported["effective_sample_size"] = mean**2 / square
    return reported
