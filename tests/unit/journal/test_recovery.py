"""A run that writes a log, killed at any moment and with any byte behind the durable mark lost, goes on.

Hypothesis plays the script and kills it. Whatever came before: the run goes on from its newest snapshot exactly as one
that replays all records, a batch that was given out comes again as it was, and no ticket and no prompt is lost, doubled
or unaccounted.
"""

import asyncio
import os
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from queues import KINDS, assert_same, assert_same_rows, now
from trajectories import grouped, sampled

from goaly.backlog.events import Dropped, Formed, Ticket, Trained
from goaly.backlog.group_queue import GroupQueue
from goaly.backlog.settings import BacklogSettings
from goaly.journal import log_reader as log
from goaly.journal.log_reader import durable_mark, frames
from goaly.journal.records import Drawn, Published, Record, Resumed, Snapshot
from goaly.journal.run_log import RunLog, RunState, delete_before, first_version, recover
from goaly.prompts.prompt import Message, Prompt
from goaly.reward.settings import AdvantageSettings
from goaly.trajectory import Group

SEGMENT_BYTES = 3000
"""So small that a log of a few groups has several segments."""
KEPT = 2
"""Checkpoints."""


def assert_same_state(queue: GroupQueue, other: GroupQueue) -> None:
    """Both queues are in the same state."""
    assert_same(queue, other, queue._batches, loaded=True)
    assert [batch.handle for batch in queue._batches.values()] == [batch.handle for batch in other._batches.values()]
    state, others = queue.state_dict(), other.state_dict()
    if state is None or others is None:
        assert state is others
        return
    with_tensors = ("groups", "annotated")
    assert {name: state[name] for name in state if name not in with_tensors} == {
        name: others[name] for name in others if name not in with_tensors
    }
    assert queue._groups.keys() == other._groups.keys()
    for group, same in zip(queue._groups.values(), other._groups.values(), strict=True):
        for sample, as_sample in zip(group.samples, same.samples, strict=True):
            assert_same_rows(sample.tokens, as_sample.tokens)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "save", "admit", "admit", "complete", "complete", "give", "train", "fail"]),
        st.integers(0, 99),
    ),
    min_size=5,
    max_size=40,
)


class Recovery(RuleBasedStateMachine):
    """A script with its queue and its log, which is killed now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.temporary = TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.history: list[Record] = []
        """All records that the log has, and those that were deleted at its beginning."""
        self.deleted = 0
        self.durable = 0
        """How many records must survive."""
        self.given: dict[int, Any] = {}
        """The rows of each batch that was given out."""
        self.checkpoints = [0]
        self.running: list[Ticket] = []
        self.formed: list[int] = []
        """Batches that are given out and not trained."""

    @initialize(kind=st.sampled_from(KINDS), keep_log=st.booleans())
    def start(self, kind: BacklogSettings, keep_log: bool) -> None:
        self.kind, self.keep_log = kind, keep_log
        self.open(0)
        self.sync()

    def queue_of(self, record: Any = lambda event: None) -> GroupQueue:
        return GroupQueue(self.kind, AdvantageSettings(), dp_ranks=1, pad_token=0, record=record)

    def record(self, record: Record) -> None:
        self.log.record(record)
        self.history.append(record)
        self.state.follow(record)

    def open(self, version: int) -> None:
        """What the hub does when a process begins to work on the run, with a trainer of this version."""
        expected = RunState(self.queue_of())
        for _ in expected.replay([one for one in self.history if not isinstance(one, Snapshot)], keep=version):
            pass
        self.log = RunLog(self.folder, segment_bytes=SEGMENT_BYTES)
        self.queue = self.queue_of(self.record)
        self.state = RunState(self.queue)
        resumed = Resumed(policy_version=version, trainer={"record": len(self.history)})
        self.log.record(resumed)
        self.history.append(resumed)
        found = recover(self.folder, self.state, version)
        self.state.follow(resumed)
        assert found == expected.restart(version)  # journal-2
        assert_same_state(self.queue, expected.queue)  # backlog-8
        self.version = version
        self.running, self.formed = [], []
        self.prompts = found.prompts
        self.position = 0 if found.mixture is None else found.mixture["position"]
        self.learned = found.policy_version

    def sync(self) -> None:
        """Wait for durability."""
        self.loop.run_until_complete(asyncio.wait_for(self.log.durable(), 20))
        self.mark = (self.folder / "durable").read_bytes()
        self.durable = len(self.history)

    def now(self, call: Any) -> Any:
        return self.loop.run_until_complete(now(call))

    def play(self, actions: list[tuple[str, int]]) -> None:
        """The script does what it can of this."""
        for what, choice in actions:
            match what:
                case "admit":
                    self.admit()
                case "complete" if self.running:
                    self.complete(choice)
                case "fail" if self.running:
                    self.queue.report(Dropped.failed(self.running.pop(choice % len(self.running)).index, "broken"))
                case "give":
                    self.give()
                case "train" if self.formed:
                    self.train(annotates=choice % 2 == 0, publishes=choice % 3 > 0, saves=choice % 5 > 0)
                case "step":
                    self.play([("admit", 0), ("complete", choice)] * 3)
                    self.play([("give", 0), ("give", 0), ("train", choice)])
                case "save":
                    self.save()

    def admit(self) -> None:
        ticket = self.now(self.queue.admit())
        if ticket is not None:
            assert ticket not in self.running  # backlog-9
            self.running.append(ticket)
            if ticket.index not in self.prompts:
                content = (Message(role="user", content="?"),)
                drawn = Prompt(id=f"p{self.position}", source="s", messages=content, tools=[])
                self.position += 1
                mixture = {"position": self.position}
                self.record(Drawn(ticket=ticket.index, prompt=drawn, mixture=mixture, learned=self.learned))

    def complete(self, choice: int) -> None:
        ticket = self.running.pop(choice % len(self.running))
        pair = ((3 + choice % 7, 0.0), (5, float(choice % 4 > 0)))
        samples = [
            sampled(size, index=at, reward=reward, version=ticket.min_version) for at, (size, reward) in enumerate(pair)
        ]
        self.queue.report(grouped(ticket.index, samples, source=f"s{choice % 2}"))

    def give(self) -> None:
        batch = self.now(self.queue.next_batch())
        if batch is None:
            return
        assert batch.id == self.version + len(self.formed)  # backlog-9
        self.sync()  # journal-5
        rows = self.queue.rows(batch.id, 0).rows.exclude("reference_logprobs")
        if batch.id in self.given:
            assert_same_rows(rows, self.given[batch.id])
        self.given[batch.id] = rows.clone()
        self.formed.append(batch.id)

    def train(self, *, annotates: bool, publishes: bool, saves: bool) -> None:
        batch = self.formed[0]
        if annotates:
            for one in self.formed:  # also of one that is not trained yet
                rows = self.queue.rows(one, 0).rows
                self.queue.annotate(one, 0, "reference_logprobs", rows["tokens"] * 0.5)
        if publishes:
            self.record(Published(version=batch + 1, digest=f"d{batch + 1}"))
        self.queue.trained(batch, batch + 1)
        del self.formed[0]
        self.version = batch + 1
        self.learned = max(self.learned, batch + 1)
        if saves and (snapshot := self.state.snapshot()) is not None:
            self.log.record(snapshot)
            self.history.append(snapshot)

    def save(self) -> None:
        """A checkpoint, and what may then be deleted."""
        self.sync()  # run-4
        if self.version > self.checkpoints[-1]:
            self.checkpoints = [*self.checkpoints, self.version][-KEPT:]
        if not self.keep_log and self.checkpoints[0]:
            before = sum(1 for _ in frames(self.folder))
            delete_before(self.folder, self.checkpoints[0])
            self.deleted += before - sum(1 for _ in frames(self.folder))
            assert first_version(self.folder) <= self.checkpoints[0]

    @rule(actions=ACTIONS, data=st.data(), back=st.sampled_from([0, 0, 1]))
    def play_and_die(self, actions: list[tuple[str, int]], data: Any, back: int) -> None:
        """Any byte that was not durable may be lost; the newest checkpoint may be damaged."""
        self.play(actions)
        self.log.close()
        (self.folder / "durable").write_bytes(self.mark)
        mark = durable_mark(self.folder)
        last = data.draw(
            st.sampled_from([one for one in log.segment_starts(self.folder) if one.segment >= mark.segment])
        )
        path = log.segment_file(self.folder, last.segment)
        least = mark.offset if last.segment == mark.segment else 0
        os.truncate(path, data.draw(st.integers(least, path.stat().st_size)))
        for later in log.segment_starts(self.folder):
            if later > last:
                log.segment_file(self.folder, later.segment).unlink()
        survived = self.deleted + sum(1 for _ in frames(self.folder))
        assert survived >= self.durable  # journal-1
        self.history = self.history[:survived]
        self.checkpoints = self.checkpoints[: max(1, len(self.checkpoints) - back)]
        self.open(self.checkpoints[-1])

    def teardown(self) -> None:
        if not hasattr(self, "log"):
            return
        while (ticket := self.now(self.queue.admit())) is not None:
            self.running.append(ticket)
        for ticket in self.running:
            self.queue.report(Dropped.failed(ticket.index, "the end"))
        while self.formed or self.queue._give_again or self.queue._order.ready(self.kind.groups_per_step):
            self.give()
            self.train(annotates=False, publishes=True, saves=False)
        self.log.close()
        assert len(self.history) == self.deleted + sum(1 for _ in frames(self.folder))
        self.account()
        self.loop.close()
        self.temporary.cleanup()

    def account(self) -> None:
        """Every ticket was admitted once and ended once, and every prompt was drawn once."""
        admitted = [one.index for one in self.history if isinstance(one, Ticket)]
        assert admitted == list(range(len(admitted)))
        ends = Counter(one.ticket for one in self.history if isinstance(one, Group | Dropped))
        assert ends == Counter(admitted)
        trained = Counter(ticket for one in self.history if isinstance(one, Trained) for ticket in one.tickets)
        formed = Counter(ticket for one in self.history if isinstance(one, Formed) for ticket in one.tickets)
        assert trained == formed <= ends
        drawn = [one for one in self.history if isinstance(one, Drawn)]
        assert len({one.ticket for one in drawn}) == len(drawn)
        assert [one.prompt.id for one in drawn] == [f"p{number}" for number in range(len(drawn))]
        counts = self.queue.counts()
        assert counts["running"] == 0
        assert counts["queued"] < self.kind.groups_per_step


Recovery.TestCase.settings = settings(max_examples=30, stateful_step_count=8, deadline=None)
TestRecovery = Recovery.TestCase
