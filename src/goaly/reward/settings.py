"""Who judges a finished sequence, for how long, and what its group makes of the reward."""

from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from goaly.configuration.schema import KnownWords


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings(KnownWords):
    """The verifier and the child processes that run it."""

    verifier: str = "goaly.prompts.tasks.arithmetic:verify"
    """Function that scores one response, as `package.module:function`; it takes a Prompt and the response's text. Any
    finite number trains; metrics, curricula and evaluations count a reward of 1 or more as a pass."""
    placement: Literal["worker", "hub"] = "worker"
    """Who owns the processes: each rollout worker its own, with no message between actors for a score (0.5 ms and
    more), or the hub one pool that all workers share, for verifiers that hold much memory."""
    workers: int = 1
    """Child processes that run the verifier, in each place."""
    time_limit_seconds: float = 10.0
    """Longest time for one score; the child that exceeds it is killed and replaced."""
    on_time_limit: Literal["zero", "fail"] = "zero"
    """What a score that ran out of time becomes: reward 0, or the failure of its group."""
    on_error: Literal["zero", "fail"] = "fail"
    """What a response becomes for which the verifier raised, died twice or gave no finite number: reward 0, or the
    failure of its group. `fail` drops the other samples of the prompt too, so prompts with such responses are trained
    less often; `zero` keeps them, but also tells the policy that the response was wrong. Choose `zero` where the
    response causes the error (it can't be parsed), `fail` where the verifier does (a service is down)."""

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each. `prefix` is the section's dotted path with its dot, such as `reward.`."""
        found = []
        module, _, function = self.verifier.partition(":")
        if not module or not function or not all(part.isidentifier() for part in [*module.split("."), function]):
            found.append(f"{prefix}verifier={self.verifier}: must be package.module:function")
        if self.workers < 1:
            found.append(f"{prefix}workers={self.workers}: must be at least 1")
        if not 0 < self.time_limit_seconds < float("inf"):
            found.append(f"{prefix}time_limit_seconds={self.time_limit_seconds}: must be a time above 0")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongSettings:
    """Lowers the reward of long answers, linearly over the last tokens before the limit (DAPO's soft punishment)."""

    limit: int
    """Trained tokens from which on the whole penalty is taken off."""
    buffer: int
    """Tokens before the limit over which the penalty rises from 0."""
    penalty: float = 1.0
    """What an answer at the limit loses."""

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each."""
        found = []
        if self.buffer < 1:
            found.append(f"{prefix}buffer={self.buffer}: must be at least 1")
        if self.limit <= self.buffer:
            found.append(f"{prefix}limit={self.limit}: must be above {prefix}buffer={self.buffer}")
        if not 0 < self.penalty < inf:
            found.append(f"{prefix}penalty={self.penalty}: must be a number above 0")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSettings(KnownWords):
    """How the rewards of a batch become the advantages of its tokens; `docs/algorithms.md` has the formulas."""

    name: str = "group"
    """group, group_mean, rloo, reinforce_pp, reinforce_pp_baseline, process, gae (which needs a critic), or a function
    of your own as `package.module:function`."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the function takes after `*` in its signature, such as epsilon."""
    overlong: OverlongSettings | None = None
    """Lowers the reward of long answers; null leaves rewards as they are."""
    kl_coef: float = 0.0
    """Weight of the KL divergence from the reference model that is taken off the reward of each token; 0 needs no
    reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """How that divergence is estimated at each token."""

    @property
    def uses_values(self) -> bool:
        """Whether the advantages are over a critic's values."""
        return "values" in self.needs

    @property
    def compares_groups(self) -> bool:
        """Whether a group whose samples all have the same total teaches nothing, so that a sample alone never does."""
        from goaly.reward.advantages import ESTIMATORS  # imports torch, which `--help` can do without

        return getattr(ESTIMATORS.find(self.name), "compares_groups", False)

    @property
    def needs(self) -> tuple[str, ...]:
        """The columns that later stages must add to a batch's rows before advantages can be computed."""
        from goaly.reward.advantages import needs  # imports torch, which `--help` can do without

        return (("reference_logprobs",) if self.kl_coef > 0 else ()) + needs(self.name)

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each. `prefix` is the section's dotted path with its dot, such as `advantages.`."""
        from goaly.reward.advantages import ESTIMATORS  # imports torch, which `--help` can do without

        found = ESTIMATORS.problems(prefix, self.name, self.options)
        if not 0 <= self.kl_coef < inf:
            found.append(f"{prefix}kl_coef={self.kl_coef}: must be a number of at least 0")
        if self.kl_coef == 0 and self.kl_estimator != "k1":
            found.append(f"{prefix}kl_estimator={self.kl_estimator}: has no effect, {prefix}kl_coef is 0")
        return found
