"""Counts what vLLM's scheduler does with requests, so that a check can show that it happened."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingCounts:
    """How often a cache was too small for what ran, a step too short for a prompt, or a prompt's start cached."""

    preemptions: int
    """As `PreemptionCounter` counts them."""
    prompts_in_parts: int
    """Requests whose prompts took several steps."""
    prefix_hits: int
    """Requests that found the beginning of their prompt in the cache when they began."""


class PreemptionCounter:
    """Counts from its start on the requests that lost their cache to others. An update of the weights, which restarts
    requests, is none."""

    def __init__(self, scheduler: Any):
        """`scheduler` is vLLM's."""
        self.count = 0
        preempt = scheduler._preempt_request

        def counted(request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
            if not drop_stale_output:  # which an update of the weights does
                self.count += 1
            preempt(request, timestamp, drop_stale_output)

        scheduler._preempt_request = counted


class SchedulingCounter:
    """Counts from its start on."""

    def __init__(self, scheduler: Any):
        """`scheduler` is vLLM's."""
        self._preemptions = PreemptionCounter(scheduler)
        self._in_parts: set[str] = set()
        self._hits: set[str] = set()
        schedule = scheduler.schedule

        def counted_schedule(*arguments: Any, **named: Any) -> Any:
            planned = schedule(*arguments, **named)
            asked = (scheduler.requests[key] for key in planned.num_scheduled_tokens)
            self._in_parts.update(one.request_id for one in asked if one.num_computed_tokens < one.num_prompt_tokens)
            for new in planned.scheduled_new_reqs:
                if new.num_computed_tokens and not scheduler.requests[new.req_id].num_preemptions:
                    self._hits.add(new.req_id)
            return planned

        scheduler.schedule = counted_schedule

    @property
    def counts(self) -> SchedulingCounts:
        """The numbers so far."""
        return SchedulingCounts(
            preemptions=self._preemptions.count, prompts_in_parts=len(self._in_parts), prefix_hits=len(self._hits)
        )
