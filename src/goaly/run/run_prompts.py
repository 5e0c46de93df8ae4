"""The prompts of a run: the next one of its mixture for each ticket. Each draw is recorded in the run's log.

run-10: A resumed run asks the prompts that the run would have asked, each of them once: a ticket that was running
    has its prompt, and the mixture goes on after the last recorded draw.
"""

from collections.abc import Callable, Mapping
from typing import Any

from goaly.backlog.events import Ticket
from goaly.journal.records import Drawn
from goaly.journal.run_log import Recovered
from goaly.prompts.curriculum import Passes
from goaly.prompts.mixture import Mixture
from goaly.prompts.prompt import Prompt


class RunPrompts:
    """Draws prompts for tickets."""

    def __init__(self, mixture: Mixture):
        self.mixture = mixture
        self._first_state: dict[str, Any] | None = None
        self._set_weights: dict[str, float] = {}
        self._record: Callable[[Drawn], None] = lambda drawn: None
        self._drawn: dict[int, Prompt] = {}
        self._learned = 0

    def begin(self, recovered: Recovered, record: Callable[[Drawn], None]) -> None:
        """Go on where the log ends, and record draws. Later draws than those in the log are forgotten."""
        state = self._first_state if recovered.mixture is None else recovered.mixture
        if state is not None:
            self.mixture.load_state_dict(state)
        else:
            self._first_state = self.mixture.state_dict()
        if self._set_weights:
            self.mixture.set_weights(self._set_weights)
        for passes in recovered.passes:
            self.mixture.learn(passes)
        self._learned = recovered.policy_version
        self._drawn = dict(recovered.prompts)
        self._record = record

    def of(self, ticket: Ticket) -> Prompt:
        """The prompt of this ticket: the one drawn for it before the run was resumed, or the next of the mixture."""
        if ticket.index in self._drawn:
            return self._drawn.pop(ticket.index)
        prompt = self.mixture.next()
        state = self.mixture.state_dict()
        self._record(Drawn(ticket=ticket.index, prompt=prompt, mixture=state, learned=self._learned))
        return prompt

    @property
    def shares(self) -> dict[str, float]:
        """The share of each source from the next prompt on."""
        return self.mixture.shares

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Set the weights of these sources from the next prompt on; other sources keep theirs."""
        self.mixture.set_weights(weights)
        self._set_weights.update(weights)

    def learn(self, batch: int, passes: Mapping[str, Passes]) -> None:
        """Update the curriculum with the passes of this batch, once."""
        if batch >= self._learned:
            self.mixture.learn(passes)
            self._learned = batch + 1
