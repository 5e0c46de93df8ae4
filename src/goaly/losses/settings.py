"""The loss that the trainer minimizes: its aggregation, its off-policy corrections and its KL term."""

from collections.abc import Iterator
from dataclasses import field
from typing import Any, Literal

from goaly.base.config.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, Settings

Importance = Literal["token", "sequence", "geometric"]
Proximal = Literal["sampler", "trainer", "interpolated"]
Sign = Literal["any", "negative", "positive"]


class Rejection(Settings):
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
    advantage: Sign = "any"
    """The sign of the advantage of the tokens that the rule may reject. `negative` with `low` rejects a token that is
    pushed further down, and keeps a right one that has become unlikely: only that one can bring it back."""
    low: float | None = None
    """Reject a measure below this; null is no bound."""
    high: float | None = None
    """Reject a measure above this; null is no bound."""

    @property
    def name(self) -> str:
        """Its name in metrics."""
        policy = "_current" if self.policy == "current" else ""
        return f"{self.measure}_{self.level}{policy}" + ("" if self.advantage == "any" else f"_{self.advantage}")

    def _problems(self, at: Section) -> Iterator[str]:
        bounds = {name: bound for name in ("low", "high") if (bound := getattr(self, name)) is not None}
        too_low = {name: bound for name, bound in bounds.items() if bound <= 0}
        if not bounds:
            yield f"{at}high: is not set, and neither is {at}low: one is needed"
        elif too_low and self.measure not in ("k1", "log_ratio"):
            for name, bound in too_low.items():
                yield f"{at}{name}={bound}: must be above 0, or null: no {self.measure} is below 0"
        elif len(bounds) == 2 and bounds["low"] >= bounds["high"]:
            yield f"{at.low}: must be below {at.high}"


class DistillSettings(Settings):
    """A part of the loss that makes the policy more like a teacher: the model of the section `reference`."""

    by: Literal["advantage", "reverse_kl", "forward_kl"] = "advantage"
    """`advantage`: the policy loss with the advantage log teacher - log policy of each token. `reverse_kl` and
    `forward_kl`: the divergence over the teacher's `top_k` tokens and a tail, KL(policy || teacher) or
    KL(teacher || policy). Divergences have less noise, and take K + 1 times the space in the queue and the log."""
    top_k: PositiveInt = 20
    """The teacher's most likely tokens at each place over which a divergence is taken. 20 is about as good as the whole
    vocabulary."""
    tokens: Literal["all", "context"] = "all"
    """Trained tokens that the teacher judges: `all`, or with `context` only those for which the script gave it a
    context of its own, such as a hint."""
    weight: PositiveFloat = 1.0
    """Weight of this part, which is a mean over the tokens that the teacher judges."""

    @property
    def uses_top(self) -> bool:
        """Whether it needs the teacher's most likely tokens."""
        return self.by != "advantage"

    def _problems(self, at: Section) -> Iterator[str]:
        if not self.uses_top:
            yield from at.idle(f"{at}by is advantage", "top_k")


class LossSettings(Settings):
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
    proximal: Proximal = "sampler"
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
    importance_floor_positive: PositiveFloat | None = None
    """Lower bound of the importance weight where the advantage is positive; null is `importance_floor`. At 1 a right
    answer that the policy is about to lose teaches at full strength, whatever its age."""
    importance_cap_negative: PositiveFloat | None = None
    """Upper bound of the importance weight where the advantage is negative; null is `importance_cap`. At 1 no token is
    pushed down harder than fresh data would push it."""
    rejections: tuple[Rejection, ...] = ()
    """Rules that leave tokens out, each with these keys:"""
    max_age: NonNegativeInt | None = None
    """Leave out tokens older than this many policy versions; null leaves none out."""
    mask_truncated: bool = False
    """Leave out answers that a limit cut off; their rewards still count in their groups. Set it if the limit
    says nothing about the quality of an answer."""
    denominator: Literal["before", "after"] = "before"
    """Whether the aggregation divides by the tokens and sequences before or after some are left out."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the reference model in the loss; 0 needs no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence at each token."""
    distill: DistillSettings | None = None
    """Distillation from a teacher, beside the reward's part of the loss; null is none. `{}` has the defaults."""
    reward_weight: NonNegativeFloat = 1.0
    """Weight of the reward's part of the loss, with its KL and entropy; 0 trains by distillation alone."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the policy's entropy at each trained token, which is subtracted from the loss. Raise it from 0 (to
    1e-3, say) if the entropy falls before rewards have risen."""

    @property
    def taught(self) -> Literal["all", "context"] | None:
        """The trained tokens that a teacher judges; None: there is no teacher."""
        return None if self.distill is None else self.distill.tokens

    def _problems(self, at: Section) -> Iterator[str]:
        from goaly.losses.policy_losses import LOSSES, traits  # imports torch, which `--help` does not need

        yield from LOSSES.problems(str(at), self.name, self.options)
        aggregation = self.aggregation or traits(self.name).aggregation
        if aggregation == "sequence_sum" and self.constant_length is None:
            yield f"{at}constant_length: is not set, the aggregation sequence_sum needs it"
        if aggregation != "sequence_sum":
            yield from at.idle(f"the aggregation is {aggregation}", "constant_length")
        if self.importance == "token" and self.proximal != "sampler" and traits(self.name).ratio == "sequence":
            yield (
                f"{at.importance}: must be sequence or geometric, because with {at.proximal} the weight goes with the "
                f"ratio, and the loss {self.name} has one ratio a sequence"
            )
        floor, cap = self.importance_floor, self.importance_cap
        if floor is not None and cap is not None and floor >= cap:
            yield f"{at.importance_floor}: must be below {at.importance_cap}"
        positive, negative = self.importance_floor_positive, self.importance_cap_negative
        if positive is not None and cap is not None and positive > cap:
            yield f"{at.importance_floor_positive}: must be at most {at.importance_cap}"
        if negative is not None and floor is not None and negative < floor:
            yield f"{at.importance_cap_negative}: must be at least {at.importance_floor}"
        if self.proximal == "sampler":
            why = f"with {at.proximal} the weight is 1"
            names = ("importance", "importance_cap", "importance_floor")
            yield from at.idle(why, *names, "importance_floor_positive", "importance_cap_negative")
        yield from self._rejection_problems(at)
        if self.denominator == "after" and not self.rejections and self.max_age is None and not self.mask_truncated:
            yield f"{at.denominator}: has no effect, nothing is left out"
        if self.kl_coef == 0:
            yield from at.idle(f"{at}kl_coef is 0", "kl_estimator")
        yield from self._distill_problems(at)

    def _distill_problems(self, at: Section) -> Iterator[str]:
        if self.distill is None:
            if self.reward_weight == 0:
                yield f"{at.reward_weight}: must be above 0 where {at}distill is null: nothing would be trained"
            return
        if self.denominator == "after":
            yield f"{at.denominator}: must be before where {at}distill is set, which has a denominator of its own"
        if self.reward_weight == 0:
            yield from at.idle(f"{at.reward_weight}", "kl_coef", "entropy_coef", "aggregation", "constant_length")
            if self.distill.uses_top:
                yield from at.idle(f"{at.reward_weight} and {at}distill.by is {self.distill.by}", "name", "options")

    def _rejection_problems(self, at: Section) -> Iterator[str]:
        names = [rule.name for rule in self.rejections]
        for number, rule in enumerate(self.rejections):
            key = f"{at}rejections.{number}"
            yield from rule.problems(f"{key}.")
            if rule.name in names[:number]:
                yield f"{key}: must differ from earlier rules, one of which is {rule.measure} by {rule.level}"
            if rule.policy == "proximal" and self.proximal == "sampler":
                yield (
                    f"{key}.policy=proximal: has no effect, with {at.proximal} the proximal policy is the sampler "
                    "itself; current compares the policy that is trained"
                )
