"""How many processes run episodes, how many episodes each runs at once, and for how long."""

from collections.abc import Iterator
from dataclasses import field
from string import Formatter
from typing import Literal

from goaly.agents.settings import LAST_PORT, EndpointSettings, SessionSettings
from goaly.base.config.settings import NonNegativeInt, PositiveFloat, PositiveInt, Section, Settings

MOST_EPISODES = 4096
"""The limit of a worker with `rollout.concurrency=auto`."""
CutOffReward = Literal["worst", "exclude"] | float


HINT_FIELDS = ("question", "response", "answer", "sibling")


class HintSettings(Settings):
    """A hint that the teacher of `loss.distill` sees before an answer in one turn, and the policy did not: the policy
    learns to answer as if it had seen it. Scripts may give contexts of their own instead (`Trajectory.taught`)."""

    text: str
    """The teacher's last message of the prompt. `{question}` becomes that of the policy, `{response}` the answer,
    `{answer}` the reference answer, and `{sibling}` the first answer of the group that passed. Answers of which one of
    the last two is not known get no hint."""
    to: Literal["failed", "all"] = "failed"
    """The answers that get a hint: those that did not pass, or all."""

    @property
    def fields(self) -> frozenset[str]:
        """The names in braces in the text."""
        return frozenset(name for _, name, _, _ in Formatter().parse(self.text) if name is not None)

    def _problems(self, at: Section) -> Iterator[str]:
        known = ", ".join(f"{{{name}}}" for name in HINT_FIELDS)
        try:
            unknown = self.fields - set(HINT_FIELDS)
        except ValueError as error:
            yield f"{at.text}: {error}; write {{{{ and }}}} for braces"
            return
        if unknown:
            yield f"{at.text}: {{{min(unknown)}}} is unknown; known are {known}"
        elif not self.fields - {"question"}:
            yield f"{at.text}: must say more than the policy saw, by one of {known}"


class RolloutSettings(Settings):
    """The rollout workers."""

    workers: PositiveInt = 1
    """Processes that run episodes."""
    concurrency: PositiveInt | Literal["auto"] = 1024
    """Most episodes that one worker runs at once; more wait. "auto" runs as many as the engines have room for and a
    tenth more, at least those of one training step and at most 4,096: it grows while no request queues at an engine and
    the key-value caches have room, and shrinks when requests queue or are preempted. Choose it for agents of several
    turns, whose conversations lose their cache while too many others are under way."""
    episode_seconds: PositiveFloat | None = 3600.0
    """Time limit of an episode, from its start to its trajectory; null is no limit. An episode that takes longer is
    cancelled, and cut off if the time was the policy's: it was generating when time ran out, and for at least half of
    the time before. If its own code, a tool or an environment took the time, it leaves its group, and counts in no
    baseline and no loss. If its chats have nothing to train, if it waited for its score, or if all episodes of the
    group were late, the group fails (`episode_timeout`). In an evaluation its reward is 0. Raise it for agents that
    work for hours."""
    cut_off_reward: CutOffReward = "worst"
    """Reward of an episode whose chats a limit cut off (`episode_seconds`, `session`, or the context) before its script
    or its agent gave one. `worst`: the lowest reward of the group's finished episodes, at most 0. `exclude`: it leaves
    its group, and counts in no baseline and no loss; a late one leaves it, also where its environment was slow. A
    number: this reward. Where an answer fills the context, the script's reward of it counts if it is a pass or
    lower. Choose `exclude` if limits say nothing of the policy, such as ones that are too short for some tasks."""
    episode_retries: NonNegativeInt = 0
    """How often an episode may begin again after its environment or tool server died, was disconnected or exceeded a
    time limit of its own. Nothing of a failed attempt is trained, and each has the time of `episode_seconds`. Raise it
    where environments fail now and then: a group of many episodes would fail for one of them."""
    group_seconds: PositiveFloat | None = None
    """Time limit of all episodes of a group, from the start of the first; null is no limit. A group that takes longer
    fails (`group_timeout`). Set it if late groups hold up the batches behind them for too long."""
    repeatable: bool = False
    """Draw every answer with a seed made of `generator.seed`, its ticket and its sample. With
    `backlog.max_staleness=0`, and `model.numerics=bitwise` or `generator.max_running=1`, a resumed run then equals, to
    the last bit, one that was not interrupted; otherwise it equals it in distribution. It slows sampling down, because
    each request has a random generator of its own."""
    blocked_seconds: PositiveFloat | None = 600.0
    """Longest time for which an episode may block its worker's event loop, and with it all other episodes there; then
    the worker logs the stack that blocks it and exits. Null is no limit. Rather than raise it, move the blocking code
    into `asyncio.to_thread`."""
    hint: HintSettings | None = None
    """Text that a teacher sees beside the prompt; null is none. Needs `loss.distill`."""
    session: SessionSettings = field(default_factory=SessionSettings)
    """Limits of the chats of one episode, also of those by HTTP."""
    endpoint: EndpointSettings | None = None
    """Serve the policy to agents by HTTP: `context.endpoint` has the address and the key. `{}` is enough; null serves
    nothing. It takes a worker 600 MB and some seconds at its start."""

    @property
    def most_episodes(self) -> int:
        """The most episodes that `concurrency` ever allows in a worker."""
        return MOST_EPISODES if self.concurrency == "auto" else self.concurrency

    def _problems(self, at: Section) -> Iterator[str]:
        if self.endpoint is not None and self.endpoint.port + self.workers - 1 > LAST_PORT:
            last = LAST_PORT + 1 - self.workers
            yield f"{at}endpoint: port={self.endpoint.port} must be at most {last}, so that each worker has its own"
