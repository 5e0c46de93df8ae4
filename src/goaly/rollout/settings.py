"""How many processes run episodes, how many episodes each runs at once, and for how long."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from goaly.base.config.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, Settings

LAST_PORT = 65535

CutOffReward = Literal["worst", "exclude"] | float


class SessionSettings(Settings):
    """Limits of the agents of one episode; null is no limit."""

    turns: PositiveInt | None = None
    """Most answers of the policy in the whole episode."""
    tokens: PositiveInt | None = None
    """Most tokens that the policy writes in the whole episode. The answer that reaches it ends there."""
    parallel: PositiveInt | None = None
    """Most answers that are sampled at the same time; a request above it gets status 429, and clients repeat it."""
    malformed_penalty: NonNegativeFloat = 0.0
    """Subtracted from the reward of a turn for each malformed tool call: one that cannot be read, names an unknown
    tool, or has arguments that are no JSON object."""


class UntrainedSettings(Settings):
    """Requests of agents that are answered and recorded, but not trained: those to which one of these patterns applies.
    In a pattern `*` is any text, `?` any character."""

    models: tuple[str, ...] = ()
    """Patterns of the model that a request names, such as `*haiku*` for the small model of Claude Code."""
    headers: dict[str, str] = field(default_factory=dict)
    """Patterns of the values of HTTP headers, by their names."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Patterns of the values in a request's `metadata`, by their keys."""

    def apply_to(self, model: str | None, headers: Mapping[str, str], metadata: Any) -> bool:
        """Whether a request with this model, headers and metadata is not trained."""
        given = metadata if isinstance(metadata, Mapping) else {}
        named = [(model, pattern) for pattern in self.models]
        named += [(headers.get(name.lower()), pattern) for name, pattern in self.headers.items()]
        named += [(given.get(key), pattern) for key, pattern in self.metadata.items()]
        return any(isinstance(value, str) and fnmatchcase(value, pattern) for value, pattern in named)

    def _problems(self, at: Section) -> Iterator[str]:
        if not all(self.models):
            yield f"{at.models}: must be names or patterns, not empty; '*' is any model"
        if not all(_HEADER.fullmatch(name) for name in self.headers):
            yield f"{at.headers}: must have names of HTTP headers, without spaces and colons, as keys"
        if not all(self.metadata):
            yield f"{at.metadata}: must have keys of a request's metadata as keys"


_HEADER = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)


class EndpointSettings(Settings):
    """The HTTP endpoint of each rollout worker, with the APIs of OpenAI and Anthropic."""

    host: str = "127.0.0.1"
    """Address that it listens on. Keep loopback unless agents run on other machines: traffic is not encrypted."""
    port: Annotated[int, Ge(0), Le(LAST_PORT)] = 0
    """Port of the first worker, the next worker has the next one; 0 lets the system choose."""
    untrained: UntrainedSettings = field(default_factory=UntrainedSettings)
    """Requests that are not trained, such as those for titles and summaries; the default trains all."""


class RolloutSettings(Settings):
    """The rollout workers."""

    workers: PositiveInt = 1
    """Processes that run episodes."""
    concurrency: PositiveInt = 1024
    """Most episodes that one worker runs at once; more wait."""
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
    its group, and counts in no baseline and no loss; a late one leaves it whoever took the time. A number: this reward.
    Where an answer fills the context, the script's reward of it counts if it is a pass or lower. Choose `exclude` if
    limits say nothing of the policy, such as ones that are too short for some tasks."""
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
    session: SessionSettings = field(default_factory=SessionSettings)
    """Limits of the chats of one episode, also of those by HTTP."""
    endpoint: EndpointSettings | None = None
    """Serve the policy to agents by HTTP: `context.endpoint` has the address and the key. `{}` is enough; null serves
    nothing. It takes a worker 600 MB and some seconds at its start."""

    def _problems(self, at: Section) -> Iterator[str]:
        if self.endpoint is not None and self.endpoint.port + self.workers - 1 > LAST_PORT:
            last = LAST_PORT + 1 - self.workers
            yield f"{at}endpoint: port={self.endpoint.port} must be at most {last}, so that each worker has its own"
