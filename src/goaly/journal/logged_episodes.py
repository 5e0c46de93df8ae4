"""The episodes in a run's log, and the end of each: the queue of the run is replayed from its log, so states, steps and
advantages are those of the run.

Every ticket that the log knows is there: with its episodes, or as one entry without tokens if it has none. An episode
of a failed group has the tokens that its chats sampled, and how it ended.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from goaly.agents.session import Session
from goaly.backlog.batch import Batch, column_of_samples
from goaly.backlog.events import Dropped, Formed, Ticket, Trained
from goaly.backlog.group_queue import GroupQueue
from goaly.backlog.group_statistics import NO_SIGNAL
from goaly.backlog.ledger import State
from goaly.base.atomic_files import whole_lines
from goaly.base.errors import CorruptLog
from goaly.journal.log_reader import segment_starts
from goaly.journal.records import Drawn, Snapshot
from goaly.journal.run_folder import RunFolder
from goaly.journal.run_log import RunState, first_version, records
from goaly.journal.turn_tree import turns_of
from goaly.prompts.prompt import Prompt
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.reward.settings import AdvantageSettings
from goaly.trajectory import LATER, POLICY, Group, Trajectory, episode_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEpisode:
    """The facts about an episode; or about a ticket of which nothing is known, because it failed or runs."""

    ticket: int
    sample: int | None = None
    state: State
    why: str | None = None
    """The reason of a rejection or failure."""
    step: int | None = None
    """The training step whose batch it is in; the step makes the policy version of the same number."""
    prompt_id: str = "?"
    source: str = "?"
    reward: float | None = None
    advantage: float | None = None
    """The mean over its trained tokens."""
    trajectories: int = 0
    turns: int = 0
    """Answers of the policy."""
    calls: int = 0
    """Tool calls in them."""
    tokens: int = 0
    trained: int = 0
    versions: tuple[int, int] | None = None
    """The oldest and the newest version that sampled a trained token."""
    environment: str = ""
    outcome: str = ""

    @property
    def id(self) -> str:
        """Its name on the command line: TICKET.SAMPLE, or TICKET."""
        return str(self.ticket) if self.sample is None else f"{self.ticket}.{self.sample}"

    @property
    def staleness(self) -> tuple[int, int] | None:
        """How many versions the policy was ahead of its newest and its oldest trained token, when it trained them."""
        if self.versions is None or self.step is None:
            return None
        oldest, newest = self.versions
        return self.step - 1 - newest, self.step - 1 - oldest


@dataclass(slots=True, kw_only=True)
class ReadEpisode:
    """An episode with its tokens."""

    facts: LoggedEpisode
    prompt: Prompt | None
    """None if its record was deleted."""
    trajectories: tuple[Trajectory, ...]
    columns: list[Mapping[str, Tensor]]
    """The columns that later stages added to each trajectory `[T]`: advantages, log-probs of the reference, values."""


@dataclass(slots=True, kw_only=True)
class Reading:
    """The result of reading a log."""

    begins: int = 0
    """The policy version at which the log begins; older records were deleted."""
    before: Mapping[str, int] = field(default_factory=dict)
    """Tickets by `state: why` that had ended by then, and of which the log knows no more."""
    policy_version: int = 0
    tickets: dict[int, list[LoggedEpisode]] = field(default_factory=dict)
    read: list[ReadEpisode] = field(default_factory=list)
    """The episodes of the tickets that were asked for."""
    knows_advantages: bool = True

    @property
    def episodes(self) -> list[LoggedEpisode]:
        """All entries, in the order of admission."""
        return [one for ticket in sorted(self.tickets) for one in self.tickets[ticket]]


def read_log(run: RunFolder, wanted: Collection[int] | None = None, *, sessions: bool = False) -> Reading:
    """The facts about all episodes; or the episodes of these tickets with their tokens, and facts as far as needed.
    With `sessions` also what episodes under way, and failed ones, have recorded."""
    while True:
        beginning = segment_starts(run.log)[:1]
        try:
            return _LogReader(run, wanted, sessions).read()
        except (CorruptLog, FileNotFoundError):
            if segment_starts(run.log)[:1] == beginning:
                raise
            # the run has deleted old segments meanwhile


class _LogReader:
    """Replays a log, and notes what becomes of each ticket."""

    def __init__(self, run: RunFolder, wanted: Collection[int] | None, sessions: bool):
        self._run = run
        self._wanted = frozenset(wanted or ())
        self._all = wanted is None
        self._sessions = sessions
        advantages = run.advantages
        self._queue = GroupQueue(run.backlog, advantages or AdvantageSettings(), dp_ranks=1, pad_token=0)
        self._found = Reading(begins=first_version(run.log), knows_advantages=advantages is not None)
        self._prompts: dict[int, Prompt] = {}
        """Those of tickets without an end, and of the wanted ones."""
        self._groups: dict[int, list[ReadEpisode]] = {}
        """Groups that are in the queue, and the wanted ones."""

    def read(self) -> Reading:
        state, begins, found = RunState(self._queue), self._found.begins, self._found
        for number, record in enumerate(state.replay(records(self._run.log), keep=begins)):
            match record:
                case Snapshot() if number == 0:
                    self._begin(record)
                case Ticket():
                    found.tickets[record.index] = [LoggedEpisode(ticket=record.index, state=State.RUNNING)]
                case Drawn():
                    self._draw(record)
                case Group():
                    self._end(record)
                case Dropped():
                    self._change(record.ticket, state=record.state, why=record.why)
                    self._forget(record.ticket)
                case Formed():
                    for ticket in record.tickets:
                        self._change(ticket, step=record.batch + 1)
                case Trained():
                    self._train(record)
            if not self._all and all(self._has_ended(ticket) for ticket in self._wanted):
                break
        for batch in self._queue.open_batches(0).values():
            self._add_columns(batch)
        found.policy_version = self._queue.counts()["policy_version"]
        if self._sessions:
            self._add_sessions()
        found.read = [one for ticket in sorted(self._wanted) for one in self._groups.get(ticket, ())]
        for one in found.read:
            one.facts = next(each for each in found.tickets[one.facts.ticket] if each.sample == one.facts.sample)
        return found

    def _begin(self, snapshot: Snapshot) -> None:
        """Take in the state at which a log without its beginning begins."""
        for record in snapshot.records:
            if isinstance(record, Group):
                self._found.tickets[record.ticket] = []
                self._end(record)
        for ticket in filter(self._queue.is_running, range(self._queue.counts()["admitted"])):
            self._found.tickets[ticket] = [LoggedEpisode(ticket=ticket, state=State.RUNNING)]
        for record in snapshot.records:
            if isinstance(record, Drawn):
                self._draw(record)
        for number, batch in self._queue.open_batches(0).items():
            for ticket in batch.tickets:
                self._change(ticket, step=number + 1)
        reasons = self._queue.reasons()
        self._found.before = {State.TRAINED.value: self._queue.counts()[State.TRAINED], **reasons}

    def _draw(self, record: Drawn) -> None:
        ticket, prompt = record.ticket, record.prompt
        if ticket in self._found.tickets:
            self._prompts[ticket] = prompt
            self._change(ticket, prompt_id=prompt.id, source=prompt.source)

    def _end(self, group: Group) -> None:
        queued = self._queue.state(group.ticket) is not State.REJECTED
        state, why = (State.QUEUED, None) if queued else (State.REJECTED, NO_SIGNAL)
        entries = [
            replace(_facts(group.ticket, group.source, one), state=state, why=why, reward=episode_reward(one))
            for one in group.episodes
        ]
        self._found.tickets[group.ticket] = entries
        prompt = self._prompts.get(group.ticket)
        self._groups[group.ticket] = [
            ReadEpisode(facts=facts, prompt=prompt, trajectories=episode, columns=[{} for _ in episode])
            for facts, episode in zip(entries, group.episodes, strict=True)
        ]
        if not queued:
            self._forget(group.ticket)

    def _train(self, record: Trained) -> None:
        batch = self._queue.open_batches(record.batch).get(record.batch)
        if batch is not None:
            self._add_columns(batch)
            self._queue.trained(record.batch, record.batch + 1)  # which forgets its rows
        for ticket in record.tickets:
            self._change(ticket, state=State.TRAINED)
            self._forget(ticket)

    def _add_columns(self, batch: Batch) -> None:
        """Take the columns of a batch's rows: they may still be read when the batch is forgotten."""
        keys = [key for key in LATER if key in batch.ranks[0].rows]
        if not self._found.knows_advantages:
            keys = [key for key in keys if key not in ("advantages", "returns")]
        columns = {key: iter(column_of_samples(batch, key)) for key in keys}
        for ticket in batch.tickets:
            entries = self._found.tickets[ticket]
            for place, episode in enumerate(self._groups[ticket]):
                episode.columns = [{key: next(column) for key, column in columns.items()} for _ in episode.trajectories]
                entries[place] = replace(entries[place], advantage=_advantage(episode))

    def _add_sessions(self) -> None:
        """Add what the sessions of groups under way and of failed groups have recorded."""
        found, chat = self._found.tickets, self._run.tokenizer()
        for ticket in found if self._all else self._wanted & found.keys():
            if found[ticket][0].state not in (State.RUNNING, State.FAILED):
                continue
            (known,) = found[ticket]
            self._groups[ticket] = []
            for sample, file in self._run.sessions(ticket, failed=known.state is State.FAILED):
                trajectories, end = _recorded(chat, file, known.prompt_id, sample)
                if trajectories:
                    facts = replace(_facts(ticket, known.source, trajectories), state=known.state, why=known.why)
                    read = ReadEpisode(
                        facts=facts if end is None else replace(facts, outcome=end),
                        prompt=self._prompts.get(ticket),
                        trajectories=trajectories,
                        columns=[{} for _ in trajectories],
                    )
                    self._groups[ticket].append(read)
            found[ticket] = [one.facts for one in self._groups[ticket]] or found[ticket]

    def _change(self, ticket: int, **changes: Any) -> None:
        entries = self._found.tickets.get(ticket, [])
        entries[:] = [replace(one, **changes) for one in entries]

    def _forget(self, ticket: int) -> None:
        if ticket not in self._wanted:
            self._prompts.pop(ticket, None)
            self._groups.pop(ticket, None)

    def _has_ended(self, ticket: int) -> bool:
        return any(one.state.ended for one in self._found.tickets.get(ticket, ()))


def _facts(ticket: int, source: str, trajectories: tuple[Trajectory, ...]) -> LoggedEpisode:
    """The entry of an episode, from its tokens."""
    first = trajectories[0]
    versions = torch.cat([one.tokens["sampler_versions"][one.tokens["trained"]] for one in trajectories])
    answers = [one.turn for one in turns_of(trajectories) if one.author == POLICY]
    outcomes = dict.fromkeys(str(one.outcome) for one in trajectories)
    return LoggedEpisode(
        ticket=ticket,
        sample=first.sample_index,
        state=State.QUEUED,
        prompt_id=first.prompt_id,
        source=source,
        trajectories=len(trajectories),
        turns=len(answers),
        calls=sum(len(turn.calls) for turn in answers),
        tokens=sum(map(len, trajectories)),
        trained=len(versions),
        versions=(int(versions.min()), int(versions.max())) if len(versions) else None,
        environment=first.environment,
        outcome=", ".join(outcomes),
    )


def _advantage(episode: ReadEpisode) -> float | None:
    """The mean advantage of its trained tokens; None if it has none."""
    found = [
        columns["advantages"][one.tokens["trained"]]
        for one, columns in zip(episode.trajectories, episode.columns, strict=True)
        if "advantages" in columns
    ]
    values = torch.cat(found) if found else torch.empty(0)
    return values.double().mean().item() if len(values) else None


def _recorded(
    chat: ChatTokenizer, file: Path, prompt_id: str, sample: int
) -> tuple[tuple[Trajectory, ...], str | None]:
    """The trajectories of a session; empty if it has none, or its file is gone. And how it failed, if it did."""
    try:
        told = [json.loads(line) for line in whole_lines(file)]
    except FileNotFoundError:
        return (), None
    failed = told.pop() if told and told[-1]["kind"] == "failed" else None
    session = Session(chat, prompt_id=prompt_id, sample_index=sample).replay(told)
    end = None if failed is None else f"{session.ended}, {failed['why'] or 'its group failed'}"
    return tuple(session.trajectories(session.reward or 0.0)), end
