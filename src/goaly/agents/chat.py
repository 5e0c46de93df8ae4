"""The policy as an episode chats with it: messages in, a message out. A session records its samples.

`docs/agent_endpoint.md` has an example with tools.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from goaly.agents.answer_parser import AnswerParser
from goaly.agents.conversation import Conversation
from goaly.agents.session import Session, SessionExhausted
from goaly.agents.turn import RecordedTurn
from goaly.base.errors import EpisodeError
from goaly.environments.protocol import EnvironmentFailed
from goaly.generate.policy import ContextFull, Policy
from goaly.generate.request import Sampling
from goaly.prompts.prompt import Message
from goaly.prompts.tokenizer import beside
from goaly.trajectory import Trajectory


class Chat:
    """Conversations of one episode with the policy: one that goes on, several, or branches of one."""

    def __init__(self, policy: Policy, session: Session, parser: AnswerParser, tools: Sequence[Mapping[str, Any]] = ()):
        """`tools` are those of calls that name none."""
        self.session = session
        self._policy = policy
        self._parser = parser
        self._tools = tools
        self._said: list[tuple[Message, RecordedTurn]] = []
        self._said_before = deque(turn for turn in session.turns if turn.key is None)
        """Turns of the same episode in a worker that died; it says them again first."""
        self.was_refused = False
        """Whether `say` has raised because a limit was reached, after its last answer: the script knows of it."""

    async def say(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: Sampling | None = None,
        *,
        trained: bool = True,
        **changes: Any,
    ) -> Message:
        """The policy's answer to these messages. If they extend an earlier chat, the policy sees the tokens of that as
        they were; `sampling`, `trained` and `changes` are those of `Policy.sample`."""
        tools = self._tools if tools is None else tools
        if self._said_before:
            return self._again(Conversation.of([message.as_dict() for message in messages], tools))
        try:
            with self.session.sampling(trained=trained):
                said = [message.as_dict() for message in messages]
                extend = partial(self.session.extend, said, tools, room=self._policy.room)
                continuation = await beside([said, tools], extend)
                completion = await self._policy.sample(
                    continuation.prompt, sampling, trained=trained, most_tokens=self.session.tokens_left, **changes
                )
                answer = self._parser.message(completion, tools)
                malformed = self._parser.malformed_calls(answer, completion, tools)
                turn = self.session.record(continuation, completion, answer.as_dict(), malformed=malformed)
        except (ContextFull, SessionExhausted):
            self.was_refused = True
            raise
        self.was_refused = False
        self._said.append((answer, turn))
        return answer

    def _again(self, request: Conversation) -> Message:
        turn = self._said_before.popleft()
        if request.digests != turn.request.digests:
            raise EnvironmentFailed(
                f"a resumed episode sent other messages than before: the last one was "
                f"{turn.request.messages[-1].key[:200]!r}, now it is {request.messages[-1].key[:200]!r}"
            )
        answer = Message.of(turn.message)
        self._said.append((answer, turn))
        return answer

    @property
    def marks(self) -> Mapping[str, Any]:
        """The values that `mark` keeps, also of a worker that died, if the episode is `resumable`."""
        return self.session.marks

    def mark(self, name: str, value: Any) -> None:
        """Keep a JSON value by which the episode can go on in another worker, such as the name of its sandbox."""
        self.session.mark(name, value)

    def credited(self, answer: Message, reward: float) -> None:
        """Give a process reward to the turn that returned this message, and to its consequences."""
        turn = next((turn for said, turn in self._said if said is answer), None)
        if turn is None:
            raise EpisodeError("credited: must get a message that `say` returned")
        self.session.credit([turn], reward)

    def rewarded(self, reward: float) -> None:
        """Add to the reward of the whole episode, which it keeps if a limit ends it (`rollout.cut_off_reward`)."""
        self.session.add_reward(reward)

    def note(self, note: Mapping[str, Any]) -> None:
        """Keep a JSON object with the episode, such as a command and its output: `goaly.journal` shows it behind the
        newest answer. The policy does not see it."""
        self.session.note(note)

    @property
    def notes(self) -> Sequence[Mapping[str, Any]]:
        """The notes so far."""
        return self.session.notes

    @property
    def was_exhausted(self) -> bool:
        """Whether its limits or a full context have refused a request, here or at the endpoint."""
        return self.session.exhausted

    @property
    def has_reward(self) -> bool:
        """Whether `rewarded`, or the agent at the endpoint, has given a reward for the whole episode."""
        return self.session.reward is not None

    def finish(self, reward: float | None = None) -> list[Trajectory]:
        """The trajectories of all that was said, each with this reward, in addition to process rewards; None is the
        one that `rewarded`, or the agent at the endpoint, gave."""
        return self.session.trajectories(reward)
