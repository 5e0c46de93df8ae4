"""The line between a client and a replica that is a process of its own, without an engine in it."""

import asyncio
import sys
from pathlib import Path

import pytest
import torch
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, Port, concurrent_endpoint, this_host

from goaly.generate.line import Asked, Line, Switchboard
from goaly.generate.request import Finish, Sample, Sampling

pytestmark = pytest.mark.timeout(60)

SAMPLING = Sampling(max_tokens=4)
HELD = 99
"""The version that never comes: such requests stay under way."""


class Echo(Actor):
    """Answers a request with its prompt, and an empty one with an error; counts messages."""

    def __init__(self) -> None:
        self._switchboard = Switchboard()
        self._messages: list[list[str]] = []
        self._cancelled: list[str] = []

    @concurrent_endpoint
    async def connect(self, client: str, samples: Port) -> None:
        self._switchboard.connect(client, samples)
        await asyncio.Event().wait()

    @concurrent_endpoint
    async def submit(self, client: str, requests: list[Asked]) -> None:
        self._messages.append([asked.request_id for asked in requests])
        for asked in requests:
            tokens = torch.tensor(asked.prompt)
            result = Sample(
                tokens=tokens, logprobs=-tokens.float(), versions=tokens.to(torch.int32), finish=Finish.STOP
            )
            if asked.min_version < HELD:
                self._switchboard.deliver(
                    client, asked.request_id, result if asked.prompt else ValueError("nothing to continue")
                )

    @concurrent_endpoint
    async def cancel(self, request_ids: list[str]) -> None:
        self._cancelled += request_ids

    @concurrent_endpoint
    async def seen(self) -> tuple[list[list[str]], list[str]]:
        return self._messages, self._cancelled


async def test_requests_of_one_moment_travel_together_and_each_has_its_own_end():
    here = str(Path(__file__).parent)

    def find_this_module() -> None:
        sys.path.append(here)

    mesh = this_host().spawn_procs(per_host={"procs": 1}, bootstrap=find_this_module)
    replica = mesh.spawn("echo", Echo)
    line = Line(replica)

    together = [line.ask(str(n), [n, n + 1], SAMPLING) for n in range(50)]
    broken = line.ask("broken", [], SAMPLING)
    withdrawn = line.ask("withdrawn at once", [1], SAMPLING)
    line.cancel("withdrawn at once")
    held = line.ask("held", [1], SAMPLING, HELD)
    samples = await asyncio.gather(*together)
    assert [sample.tokens.tolist() for sample in samples] == [[n, n + 1] for n in range(50)]
    with pytest.raises(ValueError, match="nothing to continue"):
        await broken
    assert withdrawn.cancelled()
    line.cancel("held")
    assert held.cancelled()
    messages, cancelled = await replica.seen.call_one()
    assert messages == [[*map(str, range(50)), "broken", "held"]]  # LI-2
    assert cancelled == ["held"]

    other = Line(replica)
    assert (await other.ask("0", [7], SAMPLING)).tokens.tolist() == [7]
    hung_up = other.ask("1", [7], SAMPLING, HELD)
    other.close()
    assert hung_up.cancelled()

    orphaned = line.ask("orphaned", [1], SAMPLING, HELD)
    await mesh.stop()
    with pytest.raises(SupervisionError):  # LI-1
        await asyncio.wait_for(orphaned, 30)
    with pytest.raises(SupervisionError):
        await line.ask("too late", [1], SAMPLING)
    line.close()
