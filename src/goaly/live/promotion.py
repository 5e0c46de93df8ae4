"""Which version is served, which is the candidate, and what was decided: a state machine over the gate's records.

The state is a function of the records, so a restarted gate goes on where it was. The rules:

- At most one version is the candidate. Versions that are published meanwhile wait; when the candidate's trial ends, the
  newest of them is the next candidate, and the others are never served.
- A version that was the candidate once, or that is older, is never the candidate again.
- After `roll_back` no version is the candidate until the trainer has gone back; versions that it published before are
  never served.

    live-2: A version other than the first is served only after a record that every test found it not worse.
"""

from collections.abc import Callable, Iterable

from goaly.live.decision import Decision, OnRegression
from goaly.live.gate_records import Baseline, Chosen, ComparedPair, Decided, GateRecord, Opened, RolledBack
from goaly.live.gate_settings import GateSettings
from goaly.live.trial import Trial


class Promotion:
    """The state of the gate. Each method records what changes (live-3) before it returns."""

    def __init__(
        self,
        settings: GateSettings,
        record: Callable[[GateRecord], None],
        *,
        on_regression: OnRegression = OnRegression.ROLL_BACK,
        earlier: Iterable[GateRecord] = (),
    ):
        """`record` returns once a record is on disk; `earlier` are those of the gate before a restart."""
        self._settings = settings
        self._write = record
        self._on_regression = on_regression
        self._served: int | None = None
        self._baseline: Baseline | None = None
        self._barred = -1
        """Versions up to this one are never candidates."""
        self._newest = -1
        """The newest published version."""
        self.trial: Trial | None = None
        """That of the candidate."""
        self.last: Decided | None = None
        """The last decision."""
        self.back: RolledBack | None = None
        """The last return of the trainer."""
        self.rolls_back = False
        """Whether the trainer has to go back to the served version."""
        self.stopped = False
        """Whether a regression has stopped training."""
        for one in earlier:
            self._follow(one)
        self.stopped &= on_regression is OnRegression.STOP  # another setting lets training go on
        if self.trial is not None:
            self._decide()  # the gate may have ended between a pair and its decision

    @property
    def served(self) -> int:
        """The version that is served."""
        if self._served is None:
            raise ValueError("no version is served yet: `open` comes first")
        return self._served

    @property
    def is_open(self) -> bool:
        """Whether a version is served."""
        return self._served is not None

    @property
    def barred(self) -> int:
        """Versions up to this one are never candidates."""
        return self._barred

    @property
    def needs_baseline(self) -> bool:
        """Whether the answers of the served version are still to be recorded, before there can be a candidate."""
        return self._baseline is None

    def open(self, version: int) -> None:
        """Serve the first version, which no test compares with another one."""
        if self._served is not None:
            raise ValueError(f"version {self._served} is served already")
        self._do(Opened(version=version))

    def set_baseline(self, baseline: Baseline) -> None:
        """Compare later candidates with these answers."""
        self._do(baseline)
        self._choose()

    def published(self, version: int) -> None:
        """The trainer has published this version."""
        self._newest = max(self._newest, version)
        self._choose()

    def compared(self, pair: ComparedPair) -> Decided | None:
        """Take in a pair; the decision that it leads to, if any. A pair of an earlier candidate changes nothing."""
        if self.trial is None or pair.candidate != self.trial.candidate:
            return None
        self._do(pair)
        return self._decide()

    def withdraw(self, why: str) -> None:
        """End the trial without a verdict, such as when the candidate's weights are lost."""
        if self.trial is not None:
            self._end(Decision.UNDECIDED, why)

    def rolled_back(self, newest: int) -> None:
        """The trainer has the served version's state again; versions up to `newest` were published before."""
        self._do(RolledBack(served=self.served, newest=newest))
        self._choose()

    def _decide(self) -> Decided | None:
        if self.trial is None or self.trial.decision is None:
            return None
        return self._end(*self.trial.decision)

    def _end(self, decision: Decision, why: str) -> Decided:
        assert self.trial is not None
        decided = Decided(
            candidate=self.trial.candidate,
            served=self.trial.served,
            decision=decision,
            why=why,
            then=self._on_regression if decision is Decision.REFUSED else None,
            evidence=self.trial.evidence(),
        )
        self._do(decided)
        self._choose()
        return decided

    def _choose(self) -> None:
        """Make the newest version the candidate, if there can be one now."""
        if self._served is None or self._baseline is None or self.trial is not None:
            return
        if self._newest > self._barred and not self.rolls_back and not self.stopped:
            self._do(Chosen(candidate=self._newest, served=self._served))

    def _do(self, record: GateRecord) -> None:
        self._write(record)  # live-3
        self._follow(record)

    def _follow(self, record: GateRecord) -> None:
        match record:
            case Opened():
                self._served = self._barred = record.version
            case Baseline():
                self._baseline = record
            case Chosen():
                assert self._baseline is not None
                self.trial = Trial(record.candidate, record.served, self._settings, self._baseline.answers)
                self._barred = record.candidate
            case ComparedPair():
                assert self.trial is not None
                self.trial.add(record)
            case Decided():
                self.trial, self.last = None, record
                if record.decision is Decision.PROMOTED:  # live-2
                    self._served = record.candidate
                self.rolls_back |= record.then is OnRegression.ROLL_BACK
                self.stopped |= record.then is OnRegression.STOP
            case RolledBack():
                self.rolls_back, self.back = False, record
                self._barred = max(self._barred, record.newest)
