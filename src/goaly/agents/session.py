"""A session: the tree of everything that the policy sampled for one episode of an agent.

It finds the prompt of each request, and makes the episode's trajectories (docs/agent_endpoint.md draws the tree). The
gateway sends the requests and keeps the time. An ended session takes neither turns nor rewards: its log is complete.

Invariants
    agents-1: The prompt of a request is exactly the tokens of its path, the sampled ones as the engine gave them.
    agents-2: A request continues the deepest recorded turn whose conversation its messages extend, and from which the
        chat template only appends. Without one it begins a branch at the root.
    agents-3: Each sampled token is trained in one trajectory, with its log-prob and version; elsewhere it is context.
    agents-4: A session that is rebuilt from its records equals the one that wrote them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from goaly.agents.bridge import bridge, left_out
from goaly.agents.conversation import PLAIN, Conversation
from goaly.agents.session_trajectory import own_turns, trajectory_of
from goaly.agents.settings import SessionSettings
from goaly.agents.turn import Continuation, Record, RecordedTurn, RenderedPrompt
from goaly.base.errors import EpisodeError
from goaly.generate.policy import Completion, ContextFull
from goaly.prompts.prompt import ASSISTANT, Message
from goaly.prompts.tokenizer import ChatTokenizer, Room
from goaly.reward.reward_value import reward_value
from goaly.trajectory import Trajectory

LIMITS, LAST = "limits", "last"


class SessionEnd(StrEnum):
    """How a session ended."""

    COMPLETE = "complete"
    """The agent finished."""
    TRUNCATED = "truncated"
    """It was exhausted: its turns or tokens were used up, or the context was full for the last request."""
    TIMED_OUT = "timed_out"
    """The time limit ended it."""
    ABANDONED = "abandoned"
    """The agent stopped sending requests, or died."""


class SessionExhausted(EpisodeError):
    """The session has used up its turns or tokens, or has ended."""


class SessionBusy(EpisodeError):
    """As many of the session's requests are under way as may be; a later one can succeed."""


class Session:
    """Finds the prompt of each request, records the answers, and yields the trajectories."""

    def __init__(
        self,
        chat: ChatTokenizer,
        *,
        prompt_id: str,
        sample_index: int = 0,
        environment: str = "",
        limits: SessionSettings | None = None,
        log: Callable[[Record], None] | None = None,
    ):
        """`log` receives a record of each change, for `replay`."""
        self.limits = limits or SessionSettings()
        self.ended: SessionEnd | None = None
        self.turns: list[RecordedTurn] = []
        self._sampled_tokens = 0
        self.overridden_requests = self.left_out_messages = 0  # both count again from 0 in another worker
        """Requests whose sampling parameters were replaced, and messages that the chat template did not show."""
        self.reward: float | None = None
        self.rewarded: set[str | None] = set()
        """The keys of the rewards that it got."""
        self.notes: list[Record] = []
        """Notes of the episode's script, for the run's log."""
        self.marks: dict[str, Any] = {}
        """Values by which the script goes on in another worker; gone with the session."""
        self._chat = chat
        self._prompt_id = prompt_id
        self._sample_index = sample_index
        self._environment = environment
        self._log = log
        self._refused: set[str] = set()
        """LIMITS if they have refused a request for good, LAST if the last one was refused."""
        self._under_way = 0
        self._credits: list[float] = []
        self._continued: set[int] = set()
        self._by_key: dict[str, RecordedTurn] = {}
        self._by_conversation: dict[bytes, list[RecordedTurn]] = {}

    @property
    def tokens_left(self) -> int | None:
        """The most tokens that an answer may have by the session's limit; None: it has none."""
        most = self.limits.tokens
        return (
            None if most is None else max(1, most - self._sampled_tokens)
        )  # a parallel answer may have taken the rest

    @contextmanager
    def sampling(self, answers: int = 1, *, trained: bool = True) -> Iterator[None]:
        """Counts answers as under way. SessionExhausted or SessionBusy if the limits don't allow them. The end
        of the context for one that is not `trained` says nothing of the session."""
        turns, used, limits = len(self.turns) + self._under_way + answers, self._sampled_tokens, self.limits
        self._check_open()
        if limits.turns is not None and turns > limits.turns:
            self._refuse(LIMITS if len(self.turns) >= limits.turns else LAST)
            raise SessionExhausted(f"{self._where}: {turns} turns, the limit is {limits.turns}")
        if limits.tokens is not None and used >= limits.tokens:
            self._refuse(LIMITS)
            raise SessionExhausted(f"{self._where}: {used} sampled tokens, the limit is {limits.tokens}")
        if limits.parallel is not None and self._under_way + answers > limits.parallel:
            raise SessionBusy(f"{self._where}: at most {limits.parallel} answers can be sampled at the same time")
        self._under_way += answers
        try:
            yield
        except ContextFull:
            if trained:
                self._refuse(LAST)
            raise
        finally:
            self._under_way -= answers

    def extend(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
        room: Room | None = None,
    ) -> Continuation:
        """The place of a request in the tree, and its prompt (agents-1, agents-2). Records nothing. `room` is as in
        `ChatTokenizer.encode`. ValueError if the chat template can't render the messages."""
        turn, request = self.deepest(Conversation.of(messages, tools, template_args))
        if any(message.role == PLAIN for message in request.messages):
            raise ValueError(f"role={PLAIN!r}: no message of a chat can have this role")
        try:
            text = self._chat.render_text(request.messages, True, request.tools, request.template_args)
        except Exception as error:  # A template is a program of its own, and says nothing about what it raises.
            raise ValueError(f"the chat template can't render the messages: {error}") from error
        rendered = RenderedPrompt.of(text)
        while turn is not None:
            context = self._bridge(turn, request, text, room)
            if context is not None:
                return Continuation(parent=turn, request=request, rendered=rendered, context=tuple(context))
            turn = turn.parent
        context = tuple(self._chat.encode(text, room))
        if not context:
            raise ValueError("the chat template renders the messages as an empty text")
        return Continuation(parent=None, request=request, rendered=rendered, context=context)

    def extend_text(self, prompt: str | Sequence[int], room: Room | None = None) -> Continuation:
        """The place of a prompt without messages in the tree: it continues the turn with the longest path that begins
        it. Records nothing."""
        text = prompt if isinstance(prompt, str) else self._chat.decode(prompt, skip_special_tokens=False)
        plain = [turn for turn in self.turns if turn.request.messages[0].role == PLAIN]
        for turn in sorted(plain, key=lambda turn: -len(turn.path())):
            path = turn.path_tokens()
            if not isinstance(prompt, str):
                rest = list(prompt[len(path) :]) if list(prompt[: len(path)]) == path else None
            else:
                before = self._chat.decode(path, skip_special_tokens=False)
                rest = self._chat.encode(text[len(before) :], room) if text.startswith(before) else None
            if rest is not None:
                request = turn.conversation.followed_by(Message(role=PLAIN, content=text))
                return Continuation(parent=turn, request=request, rendered=RenderedPrompt.of(text), context=tuple(rest))
        context = tuple(self._chat.encode(prompt, room) if isinstance(prompt, str) else prompt)
        if not context:
            raise ValueError("the prompt is empty")
        request = Conversation.of([{"role": PLAIN, "content": text}])
        return Continuation(parent=None, request=request, rendered=RenderedPrompt.of(text), context=context)

    def record(
        self,
        continuation: Continuation,
        completion: Completion,
        message: Mapping[str, Any],
        key: str | None = None,
        *,
        malformed: int = 0,
    ) -> RecordedTurn:
        """Add a completion, which was returned to the client as `message`, with its number of malformed tool calls.
        Each call is a turn of its own, also for equal requests. `key` names the request for `turn_of`."""
        self._check_open()
        if completion.prompt != continuation.prompt:  # agents-1
            raise EpisodeError(
                f"{self._where}: the completion continues {len(completion.prompt)} other tokens; it must continue the "
                f"{len(continuation.prompt)} of its request"
            )
        if key is not None and key in self._by_key:
            raise EpisodeError(f"{self._where}: the request {key} has been answered; return `turn_of` it")
        parent, choices = continuation.parent, completion.choices if completion.trained else None
        first = self._is_first(parent)
        if choices is not None and parent is not None and first:
            choices = choices[parent.covered :]  # rollout-7
        turn = RecordedTurn(
            number=len(self.turns),
            parent=parent,
            first=first,
            key=key,
            request=continuation.request,
            rendered=continuation.rendered,
            context=continuation.context,
            tokens=completion.tokens,
            logprobs=completion.logprobs,
            versions=completion.versions,
            trained=completion.trained,
            finish=completion.finish,
            choices=choices,
            form_weights=completion.form_weights,
            message=message,
            malformed=malformed,
        )
        self._add(turn)
        self.left_out_messages += left_out(self._chat, continuation)
        if self._log is not None:
            self._log(turn.record())
        if completion.trained and completion.filled:
            self._refuse(LAST)
        return turn

    @property
    def exhausted(self) -> bool:
        """Whether its limits have refused a request for good, or they or a full context refused or ended the last."""
        return bool(self._refused)

    @property
    def malformed_calls(self) -> int:
        """The number of malformed tool calls in its answers."""
        return sum(turn.malformed for turn in self.turns)

    @property
    def untrained_turns(self) -> int:
        """The number of its answers that cannot be trained."""
        return sum(not turn.trained for turn in self.turns)

    @property
    def keys(self) -> list[str]:
        """The keys of its turns and rewards."""
        return [key for key in (*self._by_key, *self.rewarded) if key is not None]

    def turn_of(self, key: str) -> RecordedTurn | None:
        """The turn that was recorded under this key, which a retry gets again."""
        return self._by_key.get(key)

    def credit(self, turns: Sequence[RecordedTurn], reward: float, key: str | None = None) -> None:
        """Give each of these turns a process reward, in addition to those that it has. `key` is as in `record`."""
        numbers = [turn.number for turn in turns]
        self._reward({"kind": "credit", "key": key, "turns": numbers, "reward": reward_value(reward, self._prompt_id)})

    def add_reward(self, reward: float, key: str | None = None) -> None:
        """Add to the reward of the whole episode, which its agent may know best. `key` is as in `record`."""
        self._reward({"kind": "reward", "key": key, "reward": reward_value(reward, self._prompt_id)})

    def note(self, note: Mapping[str, Any]) -> None:
        """Keep a JSON object with the episode. A session that has ended keeps none."""
        if self.ended is None:
            self.notes.append({**note, "after": len(self.turns)})
            self._write({"kind": "note", "note": self.notes[-1]})

    def mark(self, name: str, value: Any) -> None:
        """Keep a JSON value for a worker that takes over, in place of an earlier one of this name."""
        self.marks[name] = value
        self._write({"kind": "mark", "name": name, "value": value})

    def end(self, how: SessionEnd) -> None:
        """Refuse further requests; only the first call counts. One that is complete, but `exhausted`, is truncated."""
        if self.ended is None:
            self.ended = SessionEnd.TRUNCATED if how is SessionEnd.COMPLETE and self.exhausted else how
            self._write({"kind": "end", "how": self.ended.value})

    def trajectories(self, reward: float | None = None) -> list[Trajectory]:
        """One for each leaf, in the order of their last turns, each with this reward in addition to the process rewards
        of the turns that it trains; None is the sum of what `add_reward` got.

        A turn that several leaves share is trained in the one that follows the first recorded turn at each fork
        (agents-3). A leaf that trains nothing and has no reward of its own, such as a judge's, is left out, unless
        there is no other. All are truncated if the session is `exhausted`, or the time limit has ended it."""
        if reward is None and (reward := self.reward) is None:
            raise EpisodeError(f"{self._where}: no reward; its agent must send one, or its episode give one")
        return [
            trajectory_of(
                leaf,
                self._credits,
                reward_value(reward, self._prompt_id),
                prompt_id=self._prompt_id,
                sample_index=self._sample_index,
                environment=self._environment,
                truncated=self.exhausted or self.ended is SessionEnd.TIMED_OUT,
                notes=() if place else tuple(self.notes),
            )
            for place, leaf in enumerate(self._leaves())
        ]

    def records(self) -> Iterator[Record]:
        """Records of which `replay` makes a session of the same turns and rewards, if it has no penalty of its own."""
        yield from (turn.record() for turn in self.turns)
        yield from ({"kind": "note", "note": note} for note in self.notes)
        yield from ({"kind": "mark", "name": name, "value": value} for name, value in self.marks.items())
        for number, reward in enumerate(self._credits):
            if reward:
                yield {"kind": "credit", "key": None, "turns": [number], "reward": reward}
        if self.reward is not None:
            yield {"kind": "reward", "key": None, "reward": self.reward}
        yield from ({"kind": "refused", "by": by} for by in sorted(self._refused))
        if self.ended is not None:
            yield {"kind": "end", "how": self.ended.value}

    def replay(self, records: Iterable[Record]) -> "Session":
        """Make the changes that another session logged, without logging them again (agents-4). Returns this session."""
        for record in records:
            match record["kind"]:
                case "turn":
                    parent = None if record["parent"] is None else self.turns[record["parent"]]
                    self._add(RecordedTurn.of(record, len(self.turns), parent, self._is_first(parent)))
                case "credit" | "reward":
                    self._add_reward(record)
                case "note":
                    self.notes.append(record["note"])
                case "mark":
                    self.marks[record["name"]] = record["value"]
                case "refused":
                    self._refused.add(record["by"])
                case "end":
                    self.ended = SessionEnd(record["how"])
                case other:
                    raise ValueError(f"kind={other!r}: must be turn, credit, reward, note, mark, refused or end")
        return self

    def _leaves(self) -> list[RecordedTurn]:
        leaves = [turn for turn in self.turns if turn.number not in self._continued]
        counts = [any(turn.trained or self._credits[turn.number] for turn in own_turns(leaf)) for leaf in leaves]
        return [leaf for leaf, has in zip(leaves, counts, strict=True) if has] or leaves

    def deepest(self, request: Conversation) -> tuple[RecordedTurn | None, Conversation]:
        """The turn with the longest conversation that begins the request, and the request with its messages. Of several
        the first one that was sent back unchanged, or else the first with the same ids of calls, or else the first."""
        digests = request.digests
        for at in reversed(range(len(digests))):
            if request.messages[at].role == ASSISTANT:
                equal = [
                    (turn, turn.conversation.extended(request)) for turn in self._by_conversation.get(digests[at], ())
                ]
                if found := [(turn, extended) for turn, extended in equal if extended is not None]:
                    return max(found, key=lambda one: (one[1].call_ids == request.call_ids, one[1] == request))
        return None, request

    def _bridge(self, turn: RecordedTurn, request: Conversation, text: str, room: Room | None) -> list[int] | None:
        if not turn.rendered.begins(text):
            return None
        stopped = len(turn.tokens) > 0 and int(turn.tokens[-1]) in self._chat.stop_token_ids
        answer = len(turn.request.messages)
        return bridge(self._chat, request, text, answer=answer, prompt=turn.rendered.length, stopped=stopped, room=room)

    def _is_first(self, parent: RecordedTurn | None) -> bool:
        return parent is None or parent.number not in self._continued

    def _add(self, turn: RecordedTurn) -> None:
        self.turns.append(turn)
        if turn.trained:  # such as the first of a shorter chat
            self._refused.discard(LAST)
        self._credits.append(-self.limits.malformed_penalty * turn.malformed * turn.trained)
        self._sampled_tokens += len(turn.tokens)
        if turn.parent is not None:
            self._continued.add(turn.parent.number)
        if turn.key is not None:
            self._by_key[turn.key] = turn
        self._by_conversation.setdefault(turn.conversation.digests[-1], []).append(turn)

    def _refuse(self, by: str) -> None:
        if by not in self._refused and self.ended is None:
            self._refused.add(by)
            self._write({"kind": "refused", "by": by})

    def _reward(self, record: Record) -> None:
        self._check_open()
        self._add_reward(record)
        self._write(record)

    def _add_reward(self, record: Record) -> None:
        if record["kind"] == "credit":
            for turn in record["turns"]:
                self._credits[turn] += record["reward"]
        else:
            self.reward = (self.reward or 0.0) + record["reward"]
        self.rewarded.add(record["key"])

    def _write(self, record: Record) -> None:
        if self._log is not None:
            self._log(record)

    def _check_open(self) -> None:
        if self.ended is not None:
            raise SessionExhausted(f"{self._where}: it has ended as {self.ended}")

    @property
    def _where(self) -> str:
        return f"session of prompt {self._prompt_id}/{self._sample_index}"
