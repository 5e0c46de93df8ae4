"""The loss that the trainer minimizes: its aggregation, its off-policy corrections and its KL term."""

from dataclasses import field
from typing import Any, Literal

from goaly.config.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, settings
from goaly.config.wording import idle

Importance = Literal["token", "sequence", "geometric"]


@settings
class Rejection:
    """A rule that leaves tokens out of the loss where the trainer and the sampler disagree about them."""

    measure: Literal["ratio", "log_ratio", "k1", "k2", "k3", "binary_kl"]
    """`ratio` is policy / sampler, `log_ratio` its logarithm; k1, k2, k3 are estimates of KL(sampler || policy);
    `binary_kl` is the KL divergence over two outcomes, this token or any other, in its greater direction."""
    level: Literal["token", "sequence", "sequence_sum", "veto"]
    """`token` judges each token; `sequence` each sequence by the mean of its tokens (the geometric mean of ratios);
    `sequence_sum` by their sum (the product of ratios); `veto` by its worst token."""
    policy: Literal["proximal", "current"] = "proximal"
    """The policy that is compared with the sampler. `proximal`, as in the papers: a batch's own optimizer steps reject
    nothing. `current`: the policy that is trained."""
    low: float | None = None
    """Reject a measure below this; null is no bound."""
    high: float | None = None
    """Reject a measure above this; null is no bound."""

    @property
    def name(self) -> str:
        """Its name in metrics."""
        return f"{self.measure}_{self.level}" + ("_current" if self.policy == "current" else "")

    def problems(self, prefix: str) -> list[str]:
        """One line for each combination that cannot work. `prefix` is the rule's path with its dot."""
        bounds = {name: bound for name in ("low", "high") if (bound := getattr(self, name)) is not None}
        if not bounds:
            return [f"{prefix}high: is not set, and neither is {prefix}low: one is needed"]
        found = [
            f"{prefix}{name}={bound}: must be above 0, or null: no {self.measure} is below 0"
            for name, bound in bounds.items()
            if self.measure not in ("k1", "log_ratio") and bound <= 0
        ]
        if not found and len(bounds) == 2 and bounds["low"] >= bounds["high"]:
            found.append(f"{prefix}low={self.low}: must be below {prefix}high={self.high}")
        return found


@settings
class LossSettings:
    """The loss that the trainer minimizes; `docs/algorithms.md` has the formulas."""

    name: str = "grpo"
    """ppo, grpo, dr_grpo, dapo, cispo, gspo, gspo_token, sapo, reinforce, dppo, or a function of your own as
    `package.module:function`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the loss: the parameters after `*` in its signature, such as clip_low and clip_high."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] | None = None
    """How the losses of tokens become one number; null is the loss's own: sequence_mean for gspo, gspo_token and sapo,
    sequence_sum for dr_grpo, token_mean for all others."""
    constant_length: PositiveInt | None = None
    """Number of tokens by which sequence_sum divides the sum of each sequence: the length of the longest possible
    answer."""
    proximal: Literal["sampler", "trainer", "interpolated"] = "sampler"
    """Log-probs in the ratio's denominator: the sampler's, the trainer's at the start of the step, or an interpolation
    between the two by age. With the last two, an importance weight corrects for the distance from the sampler."""
    importance: Importance = "token"
    """Importance weight from the sampler to the proximal policy: each token's own (`token`), the product over its
    sequence (`sequence`), or the geometric mean over its sequence (`geometric`)."""
    importance_cap: PositiveFloat | None = 2.0
    """Upper bound of the importance weight; null is no bound."""
    importance_floor: PositiveFloat | None = None
    """Lower bound of the importance weight; null is no bound. Set it to keep some weight on tokens that have become
    unlikely."""
    rejections: tuple[Rejection, ...] = ()
    """Rules that leave tokens out, each with these keys:"""
    max_age: NonNegativeInt | None = None
    """Leave out tokens that weights of more than so many versions ago sampled; null leaves none out."""
    mask_truncated: bool = False
    """Leave out answers that the token limit cut off; their rewards still count in their groups. Set it if the limit
    says nothing about the quality of an answer."""
    denominator: Literal["before", "after"] = "before"
    """Whether the aggregation divides by the tokens and sequences before or after some are left out."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the reference model in the loss; 0 needs no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence at each token."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the policy's entropy at each trained token, which is subtracted from the loss. Raise it from 0 (to
    1e-3, say) if the entropy falls before rewards have risen."""

    def options_have_no_effect(self, optimizer_steps: int) -> bool:
        """Whether the loss's options are without effect in a batch of so many steps, because all ratios are 1."""
        from goaly.losses.policy import traits  # imports torch, which `--help` does not need

        return self.proximal == "trainer" and optimizer_steps == 1 and traits(self.name).bounds_ratio

    def problems(self, prefix: str) -> list[str]:
        """One line for each setting that cannot work. `prefix` is the section's path with its dot, such as `loss.`."""
        from goaly.losses.policy import LOSSES  # imports torch, which `--help` does not need

        lines = LOSSES.problems(prefix, self.name, self.options)
        lines += self._aggregation_problems(prefix) + self._correction_problems(prefix)
        if self.kl_coef == 0:
            lines += idle(self, prefix, f"{prefix}kl_coef is 0", "kl_estimator")
        return lines

    def _aggregation_problems(self, prefix: str) -> list[str]:
        from goaly.losses.policy import traits

        aggregation = self.aggregation or traits(self.name).aggregation
        if aggregation == "sequence_sum" and self.constant_length is None:
            return [f"{prefix}constant_length: is not set, the aggregation sequence_sum needs it"]
        if aggregation != "sequence_sum" and self.constant_length is not None:
            return [f"{prefix}constant_length={self.constant_length}: has no effect, the aggregation is {aggregation}"]
        return []

    def _correction_problems(self, prefix: str) -> list[str]:
        from goaly.losses.policy import traits

        lines = []
        if self.importance == "token" and self.proximal != "sampler" and traits(self.name).ratio == "sequence":
            lines.append(
                f"{prefix}importance=token: must be sequence or geometric, because with "
                f"{prefix}proximal={self.proximal} the weight goes with the ratio, and the loss {self.name} has one "
                "ratio a sequence"
            )
        floor, cap = self.importance_floor, self.importance_cap
        if floor is not None and cap is not None and floor >= cap:
            lines.append(f"{prefix}importance_floor={floor}: must be below {prefix}importance_cap={cap}")
        if self.proximal == "sampler":
            why = f"with {prefix}proximal=sampler the weight is 1"
            lines += idle(self, prefix, why, "importance", "importance_cap", "importance_floor")
        names = [rule.name for rule in self.rejections]
        for at, rule in enumerate(self.rejections):
            lines += rule.problems(f"{prefix}rejections.{at}.")
            if rule.name in names[:at]:
                lines.append(f"{prefix}rejections.{at}: {rule.measure} by {rule.level} is there already")
            if rule.policy == "proximal" and self.proximal == "sampler":
                lines.append(
                    f"{prefix}rejections.{at}.policy=proximal: has no effect, with {prefix}proximal=sampler the "
                    "proximal policy is the sampler itself; current compares the policy that is trained"
                )
        if self.denominator == "after" and not self.rejections and self.max_age is None and not self.mask_truncated:
            lines.append(f"{prefix}denominator=after: has no effect, nothing is left out")
        return lines
