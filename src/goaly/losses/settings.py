"""What the trainer minimizes: the loss, its aggregation, its corrections and its KL term."""

from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Literal

from goaly.configuration.schema import KnownWords

Importance = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection(KnownWords):
    """Tokens that are left out because the trainer and the sampler disagree about them."""

    measure: Literal["ratio", "log_ratio", "k1", "k2", "k3", "binary_kl"]
    """`ratio` is policy / sampler, `log_ratio` its logarithm; k1, k2, k3 are estimates of KL(sampler || policy);
    `binary_kl` is the divergence of two outcomes, this token or another, in the direction in which it is greater."""
    level: Literal["token", "sequence", "sequence_sum", "veto"]
    """`token` judges each token; `sequence` each sequence by its mean (of ratios the geometric one); `sequence_sum` by
    its sum (of ratios the product); `veto` by its worst token."""
    policy: Literal["proximal", "current"] = "proximal"
    """What is compared with the sampler: the proximal policy, as the papers do, so that a batch's own optimizer steps
    reject nothing; or the policy that is being trained."""
    low: float | None = None
    """Reject what is below; null has no bound."""
    high: float | None = None
    """Reject what is above; null has no bound."""

    @property
    def name(self) -> str:
        """What metrics call it."""
        return f"{self.measure}_{self.level}" + ("_current" if self.policy == "current" else "")

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each."""
        bounds = {name: bound for name in ("low", "high") if (bound := getattr(self, name)) is not None}
        if not bounds:
            return [f"{prefix}high: is not set, and neither is {prefix}low: one is needed"]
        found = [
            f"{prefix}{name}={bound}: must be a finite number, or null"
            for name, bound in bounds.items()
            if not isfinite(bound)
        ]
        found += [
            f"{prefix}{name}={bound}: must be above 0, or null: no {self.measure} is below 0"
            for name, bound in bounds.items()
            if self.measure not in ("k1", "log_ratio") and bound <= 0 and isfinite(bound)
        ]
        if not found and len(bounds) == 2 and bounds["low"] >= bounds["high"]:
            found.append(f"{prefix}low={self.low}: must be below {prefix}high={self.high}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings(KnownWords):
    """What the trainer minimizes; `docs/algorithms.md` has the formulas."""

    name: str = "grpo"
    """ppo, grpo, dr_grpo, dapo, cispo, gspo, gspo_token, sapo, reinforce, dppo, or a function of your own as
    `package.module:function`."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the loss takes after `*` in its signature, such as clip_low and clip_high."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] | None = None
    """How tokens become one number; null is the loss's own: sequence_mean of gspo, gspo_token and sapo, sequence_sum of
    dr_grpo, token_mean of all others."""
    constant_length: int | None = None
    """Tokens by which sequence_sum divides each sequence's sum: the longest answer there can be."""
    proximal: Literal["sampler", "trainer", "interpolated"] = "sampler"
    """Whose log-probs the ratio is taken against: the sampler's, the trainer's own at the start of the step, or between
    the two by age. Then the distance from the sampler is an importance weight."""
    importance: Importance = "token"
    """Whether the weight from sampler to proximal policy is each token's own, the product over its sequence
    (`sequence`), or the geometric mean over it (`geometric`)."""
    importance_cap: float | None = 2.0
    """Upper bound of the importance weight; null doesn't bound it."""
    importance_floor: float | None = None
    """Lower bound of the importance weight; null doesn't bound it. Set it where what has become unlikely
    should keep some weight."""
    rejections: tuple[Rejection, ...] = ()
    """Rules by which tokens are left out."""
    max_age: int | None = None
    """Leave out tokens drawn by weights more than so many versions old; null leaves none out."""
    mask_truncated: bool = False
    """Leave out answers that the token limit ended; their rewards still count in their groups. Set it when a limit says
    nothing about an answer's quality."""
    denominator: Literal["before", "after"] = "before"
    """Whether the aggregation counts tokens and sequences before or after what is left out."""
    kl_coef: float = 0.0
    """Weight of the KL divergence from the reference model in the loss; 0 needs no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How that divergence is estimated at each token."""
    entropy_coef: float = 0.0
    """Weight of the policy's entropy at each trained token, which is taken off the loss. Raise it from 0 (to 1e-3, say)
    when the entropy falls before rewards have risen."""

    def options_have_no_effect(self, optimizer_steps: int) -> bool:
        """Whether the loss's options are without effect in a batch of so many steps: its ratio is 1 in all of them."""
        from goaly.losses.policy import traits  # imports torch, which `--help` can do without

        return self.proximal == "trainer" and optimizer_steps == 1 and traits(self.name).bounds_ratio

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each. `prefix` is the section's dotted path with its dot, such as `loss.`."""
        from goaly.losses.policy import LOSSES  # imports torch, which `--help` can do without

        lines = LOSSES.problems(prefix, self.name, self.options)
        lines += self._aggregation_problems(prefix) + self._correction_problems(prefix)
        if not 0 <= self.kl_coef < inf:
            lines.append(f"{prefix}kl_coef={self.kl_coef}: must be a number of at least 0")
        if not 0 <= self.entropy_coef < inf:
            lines.append(f"{prefix}entropy_coef={self.entropy_coef}: must be a number of at least 0")
        if self.kl_coef == 0 and self.kl_estimator != _default("kl_estimator"):
            lines.append(f"{prefix}kl_estimator={self.kl_estimator}: has no effect, {prefix}kl_coef is 0")
        return lines

    def _aggregation_problems(self, prefix: str) -> list[str]:
        from goaly.losses.policy import traits

        aggregation = self.aggregation or traits(self.name).aggregation
        if aggregation == "sequence_sum" and self.constant_length is None:
            return [f"{prefix}constant_length: is not set, the aggregation sequence_sum needs it"]
        if aggregation != "sequence_sum" and self.constant_length is not None:
            return [f"{prefix}constant_length={self.constant_length}: has no effect, the aggregation is {aggregation}"]
        if self.constant_length is not None and self.constant_length < 1:
            return [f"{prefix}constant_length={self.constant_length}: must be at least 1"]
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
        bounds = {key: getattr(self, key) for key in ("importance_floor", "importance_cap")}
        unsound = [key for key, bound in bounds.items() if bound is not None and not 0 < bound < inf]
        lines += [f"{prefix}{key}={bounds[key]}: must be a number above 0, or null" for key in unsound]
        if not unsound and None not in bounds.values() and self.importance_floor >= self.importance_cap:
            lines.append(
                f"{prefix}importance_floor={self.importance_floor}: must be below {prefix}importance_cap="
                f"{self.importance_cap}"
            )
        for key in ("importance", "importance_cap", "importance_floor"):
            if self.proximal == "sampler" and getattr(self, key) != _default(key):
                lines.append(
                    f"{prefix}{key}={getattr(self, key)}: has no effect, with {prefix}proximal=sampler the weight is 1"
                )
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
        if self.max_age is not None and self.max_age < 0:
            lines.append(f"{prefix}max_age={self.max_age}: must be at least 0, or null")
        if self.denominator == "after" and not self.rejections and self.max_age is None and not self.mask_truncated:
            lines.append(f"{prefix}denominator=after: has no effect, nothing is left out")
        return lines


def _default(key: str) -> Any:
    return LossSettings.__dataclass_fields__[key].default
