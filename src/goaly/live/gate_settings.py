"""Settings of the gate between training and serving."""

from typing import Annotated

from annotated_types import Ge, Gt, Lt

from goaly.base.config.settings import NonNegativeInt, PositiveInt, Settings

ProperShare = Annotated[float, Gt(0), Lt(1)]


class GateSettings(Settings):
    """When a policy version may be served: its canary answers, and how sure the gate must be."""

    margin: ProperShare = 0.05
    """How much lower the candidate's mean score may be than that of the served version, in [0, 1], and than that of the
    first served version. Candidates as good as the served one need about 1 / margin^2 pairs where answers vary."""
    error_rate: ProperShare = 0.05
    """Largest probability that a candidate whose mean score is lower by `margin` or more is promoted, and that one
    whose is not is refused. It holds for each candidate, whenever its test ends."""
    canary: str | None = None
    """The set of `evaluation.sets` whose problems are asked; null is the first one."""
    pairs: PositiveInt = 1000
    """Most pairs of answers to canary problems before a candidate without a verdict gives way to a newer one."""
    shadow_pairs: NonNegativeInt = 0
    """Most pairs of answers to recorded prompts of users, which the judge scores. 0 asks none; otherwise a candidate
    must not be worse on these, too."""
    concurrent: Annotated[int, Ge(1)] = 8
    """Pairs that are asked at the same time."""
    baseline_samples: PositiveInt = 4
    """Answers of the first served version to each canary problem, with which scores and actions of candidates are
    compared, so that many small losses do not add up."""
    mix_bound: ProperShare = 0.2
    """How much the share of an action (tool calls, questions, refusals, malformed calls), and the mean length as a
    share of the longest allowed answer, may differ from the first served version's. A candidate beyond it is held."""
