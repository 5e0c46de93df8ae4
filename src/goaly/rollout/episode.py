"""The context of a script's `episode` coroutine, and the `Episode` that records its turns as a trajectory.

`apps/grpo/main.py` has an episode of one turn, and `docs/episodes.md` one of several turns. A reward that is not a
finite number fails its own group, never a batch.

    rollout-6: Tokens of the policy are trained and carry the sampler's log-probabilities and versions. All other tokens
        are not trained, and have log-probability 0 and no version.
    rollout-7: Of the expert choices that two completions have for one token, those of the first are recorded: the
        log-probs of its trained tokens were sampled with them (trajectory-2).
"""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from goaly.base.errors import EpisodeError
from goaly.generate.finite_logprobs import without_non_finite
from goaly.generate.policy import Completion, Policy
from goaly.generate.request import Finish
from goaly.prompts.prompt import Message, Prompt
from goaly.reward.reward_value import reward_value
from goaly.trajectory import (
    ENVIRONMENT,
    EXPERT_CHOICES,
    FORM_WEIGHTS,
    NO_VERSION,
    POLICY,
    PROMPT,
    Outcome,
    TensorDict,
    Trajectory,
    Turn,
)

if TYPE_CHECKING:
    from goaly.agents.chat import Chat
    from goaly.agents.gateway import Endpoint
    from goaly.prompts.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeContext:
    """The tools of an episode."""

    policy: Policy
    reward: Callable[[Prompt, str], Awaitable[float]]
    """The verifier's score of a response to a prompt."""
    prompt: Prompt
    """The prompt that this episode answers."""
    sample_index: int
    """The number of this sample of the prompt, from 0."""
    chat: "Chat"
    """Chats with the policy: messages in, a message out."""
    tokenizer: "ChatTokenizer"
    """The model's tokenizer and chat template."""
    _endpoint: "Endpoint | None" = None

    @property
    def evaluation(self) -> bool:
        """Whether this is an evaluation: nothing is trained, and any sampling values are allowed."""
        return self.policy.evaluation

    @property
    def endpoint(self) -> "Endpoint":
        """Where an agent of this episode reaches the policy by HTTP; what it samples there is recorded in `chat`."""
        if self._endpoint is None:
            raise EpisodeError(
                "context.endpoint: the run has no endpoint; set rollout.endpoint={} in the run's settings"
            )
        return self._endpoint

    def render(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt's messages, up to where the policy's answer begins."""
        return self.tokenizer.render(prompt.messages, tools=prompt.tools)

    def render_more(
        self, messages: Sequence[Message], tokens: Sequence[int], *, as_recorded: bool = False
    ) -> list[int]:
        """The tokens that extend `tokens`, recorded so far, to the chat `messages`, up to the policy's next answer.

        `messages` is the whole chat, with the policy's answer. Raises EpisodeError if the chat template now renders the
        recorded part differently; with `as_recorded` it is kept as recorded."""
        return self.tokenizer.render_more(messages, tokens, self.prompt.tools, as_recorded=as_recorded)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens, for `.observed()`."""
        return self.tokenizer.encode(text)


EpisodeFunction = Callable[[Prompt, EpisodeContext], Coroutine[Any, Any, Trajectory | Sequence[Trajectory]]]
"""A script's `episode`. It may make several trajectories, of which each has the episode's reward."""


E = TypeVar("E", bound=EpisodeFunction | type[Any])


def resumable(episode: E) -> E:
    """Say of an episode, or of its class, that it goes on in another worker when its own died: there
    `context.chat.say` first returns what was said, and `context.chat.marks` is what the script has done. It must say
    the same, and do nothing twice."""
    setattr(episode, _RESUMABLE, True)
    return episode


def is_resumable(episode: EpisodeFunction) -> bool:
    """Whether `resumable` was said of an episode."""
    return hasattr(getattr(episode, "func", episode), _RESUMABLE)  # or of that of a partial one


_RESUMABLE = "goes_on_in_another_worker"


def trajectories_of(made: Any) -> tuple[Trajectory, ...]:
    """The trajectories that an episode has returned; EpisodeError if it returned something else."""
    trajectories = tuple(made) if isinstance(made, Sequence) else (made,)
    if not trajectories or not all(isinstance(one, Trajectory) for one in trajectories):
        kinds = ", ".join(dict.fromkeys(type(one).__name__ for one in trajectories)) or "no trajectory"
        raise EpisodeError(f"the episode returned {kinds}, must be a Trajectory or several")
    return trajectories


class Episode:
    """Records the turns of one sample, in order."""

    def __init__(self, prompt: Prompt, tokens: Sequence[int], sample_index: int = 0, *, environment: str = ""):
        self._prompt = prompt
        self._sample_index = sample_index
        self._environment = environment
        self._tokens: list[int] = []
        self._columns: list[dict[str, torch.Tensor]] = []
        self._choices: list[torch.Tensor] = []
        self._form_weights: dict[int, torch.Tensor] = {}
        """Those of answers with a form, by their first token."""
        self._turns: list[Turn] = []
        self._credits: dict[int, float] = {}
        self._outcome = Outcome.COMPLETE
        self._read(PROMPT, tokens)

    @property
    def tokens(self) -> list[int]:
        """All tokens recorded so far, which the policy continues next."""
        return list(self._tokens)

    def wrote(self, completion: Completion) -> "Episode":
        """Record a completion of the policy, which is trained."""
        if list(completion.prompt) != self._tokens:
            raise EpisodeError(
                f"prompt {self._prompt.id}: the completion continues {len(completion.prompt)} other tokens; "
                f"it must continue the {len(self._tokens)} recorded so far"
            )
        if not completion.trained:
            raise EpisodeError(
                f"prompt {self._prompt.id}: the completion was sampled with trained=False; record it with "
                ".observed(completion.tokens.tolist()), which is not trained"
            )
        columns = {
            "tokens": completion.tokens,
            "trained": torch.ones(len(completion.tokens), dtype=torch.bool),
            "sampler_logprobs": completion.logprobs,
            "sampler_versions": completion.versions,
        }
        if completion.form_weights is not None:
            self._form_weights[len(self._tokens)] = completion.form_weights
        if completion.choices is not None:
            self._choices.append(completion.choices[sum(map(len, self._choices)) :])  # rollout-7
        self._outcome = Outcome.TRUNCATED if completion.finish is Finish.LENGTH else Outcome.COMPLETE
        return self._turn(POLICY, completion.tokens.tolist(), columns)

    def observed(self, tokens: Sequence[int]) -> "Episode":
        """Record tokens that the policy did not write, such as a tool's answer or the next message."""
        return self._read(ENVIRONMENT, tokens)

    def credited(self, reward: float) -> "Episode":
        """Give a process reward to the policy's last turn and its consequences."""
        if all(turn.author != POLICY for turn in self._turns):
            raise EpisodeError(f"prompt {self._prompt.id}: a reward of {reward} before the policy wrote anything")
        last = len(self._tokens) - 1
        self._credits[last] = self._credits.get(last, 0.0) + reward_value(reward, self._prompt.id)
        return self

    def finish(self, reward: float) -> Trajectory:
        """The trajectory, with this reward for the whole of it, in addition to its process rewards."""
        columns = {key: torch.cat([turn[key] for turn in self._columns]) for key in self._columns[0]}
        if self._form_weights:
            columns[FORM_WEIGHTS] = torch.ones(len(self._tokens))
            for start, weights in self._form_weights.items():
                columns[FORM_WEIGHTS][start : start + len(weights)] = weights
        columns = without_non_finite(columns)
        if self._choices:
            choices = torch.cat(self._choices)
            rest = choices.new_zeros(len(self._tokens) - len(choices), *choices.shape[1:])
            columns[EXPERT_CHOICES] = torch.cat([choices, rest])
        columns["rewards"] = torch.zeros(len(self._tokens))
        written = columns["trained"].nonzero()
        columns["rewards"][int(written[-1]) if len(written) else -1] = reward_value(reward, self._prompt.id)
        for position, credit in self._credits.items():
            columns["rewards"][position] += credit
        return Trajectory(
            tokens=TensorDict(columns, batch_size=[len(self._tokens)]),
            prompt_id=self._prompt.id,
            sample_index=self._sample_index,
            turns=tuple(self._turns),
            environment=self._environment,
            outcome=self._outcome,
        )

    def _read(self, author: str, tokens: Sequence[int]) -> "Episode":
        count = len(tokens)
        columns = {
            "tokens": torch.tensor(tokens, dtype=torch.int64),
            "trained": torch.zeros(count, dtype=torch.bool),
            "sampler_logprobs": torch.zeros(count),
            "sampler_versions": torch.full((count,), NO_VERSION, dtype=torch.int32),
        }
        return self._turn(author, tokens, columns)

    def _turn(self, author: str, tokens: Sequence[int], columns: dict[str, torch.Tensor]) -> "Episode":
        start = len(self._tokens)
        self._tokens.extend(tokens)
        self._columns.append(columns)
        self._turns.append(Turn(author=author, start=start, stop=len(self._tokens)))
        return self
