"""`context.chat` of an episode whose policy is behind an API elsewhere: messages go out, messages come back.

No tokens are known there, so nothing of it can be trained. The trajectory at the end only has the episode's reward.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import torch

from goaly.agents.conversation import Conversation
from goaly.agents.forwarder import parameters
from goaly.base.errors import EpisodeError
from goaly.generate.policy import ContextFull, PromptFillsContext, sampling_of
from goaly.generate.request import Sampling
from goaly.prompts.prompt import ASSISTANT, Message
from goaly.reward.reward_value import reward_value
from goaly.trajectory import NO_VERSION, Outcome, Trajectory, token_data

if TYPE_CHECKING:
    import openai

MODEL = "policy"
"""The endpoint puts the real name in its place."""


class ChatElsewhere:
    """Conversations of one episode with the policy, as `Chat` has them. A chat that extends an earlier one goes on."""

    def __init__(self, client: "openai.AsyncOpenAI", prompt_id: str, tools: Sequence[Mapping[str, Any]] = ()):
        """`client` asks the episode's endpoint, which adds the sampling parameters that a call does not name."""
        self._client = client
        self._prompt_id = prompt_id
        self._tools = tools
        self._said: list[tuple[Message, bytes]] = []
        self._leaves: Counter[bytes] = Counter()
        self._uncounted: set[bytes] = set()
        """Chats that train nothing and have no reward: a session makes no trajectory of them."""
        self._credits = 0.0
        self.notes: list[Mapping[str, Any]] = []
        self.marks: dict[str, Any] = {}
        self._reward: float | None = None

    async def say(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: Sampling | None = None,
        *,
        trained: bool = True,
        **changes: Any,
    ) -> Message:
        """The policy's answer to these messages; the arguments are those of `Chat.say`."""
        tools = self._tools if tools is None else tools
        asked: dict[str, Any] = {"messages": [message.as_dict() for message in messages]}
        if tools:
            asked["tools"] = tools
        named = parameters((sampling or Sampling()).changed(sampling_of(changes)))
        try:
            made = await self._client.chat.completions.create(model=MODEL, **asked, extra_body=named)
        except Exception as error:  # its class is in a package that takes a second to import
            if not tells_of_full_context(error):
                raise
            raise (ContextFull if self._said else PromptFillsContext)(str(error)) from error
        said = made.choices[0].message
        calls = tuple(call.model_dump(include={"id", "type", "function"}) for call in said.tool_calls or ())
        extra = said.model_extra or {}
        reasoning = extra.get("reasoning_content") or extra.get("reasoning")
        answer = Message(
            role=ASSISTANT, content=said.content, reasoning_content=reasoning or None, tool_calls=calls or None
        )
        *earlier, ended = Conversation.of([*asked["messages"], answer.as_dict()], tools).digests
        begun = [digest for digest in earlier if self._leaves[digest] > 0]
        if begun or trained:
            self._leaves[ended] += 1
        else:
            self._uncounted.add(ended)
        if begun:
            self._leaves[begun[-1]] -= 1
        self._said.append((answer, ended))
        return answer

    def credited(self, answer: Message, reward: float) -> None:
        """Give a process reward to the turn that returned this message."""
        ended = next((ended for said, ended in self._said if said is answer), None)
        if ended is None:
            raise EpisodeError("credited: must get a message that `say` returned")
        if ended in self._uncounted:
            self._uncounted.remove(ended)
            self._leaves[ended] += 1
        self._credits += reward_value(reward, self._prompt_id)

    def rewarded(self, reward: float) -> None:
        """Add to the reward of the whole episode."""
        self._reward = (self._reward or 0.0) + reward_value(reward, self._prompt_id)

    def mark(self, name: str, value: Any) -> None:
        """Keep a JSON value by which the episode could go on; an evaluation begins again instead."""
        self.marks[name] = value

    def note(self, note: Mapping[str, Any]) -> None:
        """Keep a JSON object with the episode."""
        self.notes.append({**note, "after": len(self._said)})

    @property
    def was_exhausted(self) -> bool:
        """Whether limits have refused a request: an API elsewhere has none of ours."""
        return False

    @property
    def has_reward(self) -> bool:
        """Whether `rewarded` has given a reward."""
        return self._reward is not None

    def finish(self, reward: float | None = None) -> list[Trajectory]:
        """A trajectory with the mean reward of those that a session would have: one for each chat that none extends."""
        if reward is None and (reward := self._reward) is None:
            raise EpisodeError(
                f"prompt {self._prompt_id}: no reward; give it to `finish` or `rewarded`, an API elsewhere takes none"
            )
        total = reward_value(reward, self._prompt_id) + self._credits / max(1, self._leaves.total())
        columns = {
            "tokens": torch.zeros(1, dtype=torch.int64),
            "trained": torch.zeros(1, dtype=torch.bool),
            "sampler_logprobs": torch.zeros(1),
            "sampler_versions": torch.full((1,), NO_VERSION, dtype=torch.int32),
            "rewards": torch.tensor([total]),
        }
        return [
            Trajectory(
                tokens=token_data(columns),
                prompt_id=self._prompt_id,
                sample_index=0,
                turns=(),
                environment="",
                outcome=Outcome.COMPLETE,
                notes=tuple(self.notes),
            )
        ]


def tells_of_full_context(error: Exception) -> bool:
    """Whether an API has refused a request because its messages leave no room for an answer."""
    return getattr(error, "status_code", None) == HTTPStatus.BAD_REQUEST and all(
        word in str(error) for word in ("context", "length")
    )


class NoTokens:
    """Stands where a policy and a tokenizer are, which an API elsewhere does not give."""

    evaluation = True

    def __getattr__(self, name: str) -> Any:
        raise EpisodeError(
            f"{name}: the policy is behind an API elsewhere, which takes messages and not tokens; use context.chat or "
            "context.endpoint"
        )
