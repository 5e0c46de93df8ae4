"""The verifier that scores finished sequences, and the advantages that are computed from the rewards."""

import os
import re
from collections.abc import Iterator
from dataclasses import field
from typing import Any, Literal

from goaly.base.config.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Section, Settings


class JudgeSettings(Settings):
    """A model behind an OpenAI-compatible API that scores responses."""

    url: str
    """Base URL of the API, such as `http://host:8000/v1`."""
    model: str
    """The model's name there."""
    key_variable: str | None = None
    """Environment variable with the API key; null sends none."""
    question: str = (
        "Question:\n{question}\n\nReference answer:\n{answer}\n\nResponse:\n{response}\n\n"
        "How good is the response? Reply with one number from 0 (wrong) to 1 (right)."
    )
    """The message to it. `{question}` becomes the prompt's last message, `{answer}` its reference answer or nothing,
    `{response}` what the policy wrote."""
    pattern: str = r"[-+]?\d+(?:\.\d+)?"
    """Regular expression of the score. The last match in the reply counts: its first group, or all of it."""
    scale: PositiveFloat = 1.0
    """The score is divided by this: 10 for a judge that gives up to 10 points."""
    options: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    """Other fields of the request, such as `{max_tokens: 512}`."""
    parallel: PositiveInt = 64
    """Requests at the same time, for each rollout worker."""

    def _problems(self, at: Section) -> Iterator[str]:
        if not self.url.startswith(("http://", "https://")):
            yield f"{at.url}: must begin with http:// or https://"
        if "{response}" not in self.question:
            yield f"{at}question: must contain {{response}}, which becomes what the policy wrote"
        try:
            re.compile(self.pattern)
        except re.error as error:
            yield f"{at.pattern}: must be a regular expression: {error}"
        if self.key_variable is not None and not os.environ.get(self.key_variable):
            yield f"{at.key_variable}: must name an environment variable that is set"


class RewardSettings(Settings):
    """The verifier and the child processes that run it."""

    verifier: str = "goaly.prompts.tasks.arithmetic:verify"
    """Function that scores one response, as `package.module:function`; it takes a Prompt and the response's text. A
    reward is any finite number; metrics, curricula and evaluations count a reward of 1 or more as a pass. Before a run
    starts, the function is called once with a made-up answer."""
    judge: JudgeSettings | None = None
    """A model that scores responses in place of `verifier`; null is none. Verifiers that evaluation sets name stay."""
    placement: Literal["worker", "hub"] = "worker"
    """Owner of the verifier processes. `worker`: each rollout worker has its own, which saves a message between actors
    (0.5 ms or more) for each score. `hub`: all workers share one pool at the hub, for verifiers that need much
    memory."""
    workers: PositiveInt = 1
    """Child processes that run the verifier, for each owner."""
    time_limit_seconds: PositiveFloat = 10.0
    """Time limit of one score; a child process that exceeds it is killed and replaced."""
    on_time_limit: Literal["zero", "fail"] = "zero"
    """A score that exceeds its time limit becomes reward 0 (`zero`) or fails its group (`fail`). Where failures are
    negative, an episode with a 0 in place of a score has the lowest reward of its group's other episodes, unless it
    passes."""
    on_error: Literal["zero", "fail"] = "fail"
    """A response for which the verifier raises, dies twice or returns no finite number gets reward 0 (`zero`, as
    for the time limit) or fails its group (`fail`). `fail` also drops the other samples of the prompt, so such prompts
    are trained less often; `zero` keeps them, but teaches the policy that the response was wrong. Choose `zero` if
    responses cause the error (they cannot be parsed), `fail` if the verifier does (a service is down)."""

    def _problems(self, at: Section) -> Iterator[str]:
        yield from verifier_problems(self.verifier, at)
        if self.judge is not None:
            yield from at.idle(f"{at}judge scores", "verifier")


def verifier_problems(verifier: str, at: Section) -> Iterator[str]:
    """One line if `at.verifier` is not the path of a function."""
    module, colon, function = verifier.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), function)):
        yield f"{at.verifier}: must be package.module:function"


class OverlongSettings(Settings):
    """Lowers the reward of long answers, linearly over the last tokens before the limit (DAPO's soft punishment)."""

    limit: int
    """Number of trained tokens at which the penalty is full."""
    buffer: PositiveInt
    """Tokens before the limit over which the penalty rises from 0."""
    penalty: PositiveFloat = 1.0
    """Subtracted from the reward of an answer at the limit or beyond. DAPO's is half the distance between a right and a
    wrong answer's reward: 0.5 where these are 1 and 0."""

    def _problems(self, at: Section) -> Iterator[str]:
        if self.limit <= self.buffer:
            yield f"{at.limit}: must be above {at.buffer}"


class AdvantageSettings(Settings):
    """How the rewards of a batch become the advantages of its tokens; `docs/algorithms.md` has the formulas."""

    name: str = "group"
    """group, group_mean, rloo, maxrl, reinforce_pp, reinforce_pp_baseline, process, gae (which needs a critic), or a
    function of your own as `package.module:function`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function: the parameters after `*` in its signature, such as epsilon."""
    overlong: OverlongSettings | None = None
    """Lowers the reward of long answers; null leaves rewards as they are."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the reference model, which is subtracted from each token's reward; 0 needs no
    reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of that divergence at each token."""

    @property
    def uses_values(self) -> bool:
        """Whether the advantages use a critic's values."""
        return "values" in self.needs

    @property
    def compares_groups(self) -> bool:
        """Whether the advantages of a group are 0 if its samples all have the same total: of one sample, always."""
        from goaly.reward.advantages import ESTIMATORS  # imports torch, which `--help` does not need

        return getattr(ESTIMATORS.find(self.name), "compares_groups", False)

    @property
    def needs(self) -> tuple[str, ...]:
        """The columns that other stages must add to a batch's rows before advantages can be computed."""
        from goaly.reward.advantages import needs  # imports torch, which `--help` does not need

        return (("reference_logprobs",) if self.kl_coef > 0 else ()) + needs(self.name)

    def _problems(self, at: Section) -> Iterator[str]:
        from goaly.reward.advantages import ESTIMATORS  # imports torch, which `--help` does not need

        yield from ESTIMATORS.problems(str(at), self.name, self.options)
        if self.kl_coef == 0:
            yield from at.idle(f"{at}kl_coef is 0", "kl_estimator")
