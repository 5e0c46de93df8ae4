"""The loads and the reports of the benchmarks of agents."""

import asyncio
from typing import Any

import pytest

from bench import agents, gateway
from bench.gateway_client import Load, Seen, ask
from goaly.backlog.ledger import State
from goaly.journal.logged_episodes import LoggedEpisode

MACHINE = {"cores": 2}


def test_environments_are_as_slow_as_the_profile_says():
    seconds = [agents.delay(str(key)) for key in range(20_000)]
    assert sum(one < agents.SHORT for one in seconds) / len(seconds) == pytest.approx(0.4, abs=0.02)
    assert sum(one > agents.LONG for one in seconds) / len(seconds) == pytest.approx(0.1, abs=0.01)
    assert 0.95 * agents.LONGEST < max(seconds) <= agents.LONGEST
    assert [agents.turns(one) for one in (0.01, 0.1, 5.0)] == [2, 3, 6]


def run_of(number: int, arm: str, speed: float, seconds: float = 1.0) -> agents.Finished:
    return agents.Finished(
        round=number, arm=arm, step_seconds=seconds, machine=MACHINE, tokens_per_second=speed, step_tokens=200.0
    )


def test_ratios_of_agents_are_those_of_medians_over_rounds():
    speeds, alone = (400.0, 300.0, 900.0), (0.5, 0.5, 0.1)
    runs = [run_of(number, agents.ASYNC, speed) for number, speed in enumerate(speeds)]
    runs += [run_of(number, agents.ALONE, 0.0, seconds) for number, seconds in enumerate(alone)]
    runs += [run_of(0, "barrier", 100.0), run_of(0, "wide barrier", 200.0)]
    assert sorted((run.round, run.arm) for run in runs) == sorted(agents.schedule(3))
    found = agents.numbers(runs)
    assert found["speedup_vs_barrier"] == 4.0
    assert found["speedup_vs_wide_barrier"] == 2.0
    assert found["utilization_by_round"] == pytest.approx([1.0, 0.75, 0.45])
    assert found["utilization"] == pytest.approx(0.75)
    assert found["tokens_per_second"][agents.ASYNC] == 400.0


def test_sessions_are_compared_as_launched_and_as_trained():
    def session(ticket: int, sample: int, *, step: int | None) -> LoggedEpisode:
        facts: dict[str, Any] = {"ticket": ticket, "sample": sample, "prompt_id": f"p{ticket}"}
        count = agents.turns(agents.delay(f"p{ticket} {sample}"))
        state = State.QUEUED if step is None else State.TRAINED
        return LoggedEpisode(**facts, state=state, step=step, turns=count, versions=(ticket, ticket + 1))

    whole = [session(ticket, sample, step=ticket + 3) for ticket in range(20) for sample in range(agents.GROUP_SIZE)]
    later = [session(20, sample, step=None) for sample in range(agents.GROUP_SIZE)]
    found = agents.sessions([*whole, *later])
    assert found["trained"] == 160
    assert found["shares"]["trained"] == found["shares"]["launched"]
    assert found["staleness"] == {"median": 2, "p95": 2, "max": 2}
    shorter = agents.sessions([one for one in whole if one.turns < 6] + later)["shares"]
    assert shorter["trained"].keys() == {2, 3}
    assert shorter["launched"].keys() == {2, 3, 6}


def test_ratios_of_the_gateway_are_medians_over_rounds():
    measured = gateway.Measured()
    for arm, seconds in (("direct", (1.0, 1.0, 1.0)), ("gateway", (2.0, 1.25, 1.0)), ("vllm", (4.0, 4.0, 4.0))):
        for each in seconds:
            measured.add("many", arm, Seen(seconds=each, tokens=100, latencies=[each] * 3))
            measured.add("short", arm, Seen(seconds=each, tokens=3, latencies=[each] * 3))
            measured.add("one", arm, Seen(seconds=each, tokens=10, latencies=[each]))
    found = measured.numbers(streams=3)
    assert found["ratio"] == pytest.approx(0.8)
    assert found["over_vllm"] == pytest.approx(3.2)
    assert found["gateway_requests_per_second"] == pytest.approx(3 / 1.25)
    assert found["added_ms_at_1_stream"] == pytest.approx(250)


@pytest.mark.asyncio
async def test_the_client_counts_the_tokens_of_streamed_answers_on_one_connection():
    chunks = [b'data: {"choices": [], "usage": null}\n\n', b'data: {"usage": {"completion_tokens": 7}}\n\n']
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*chunks, b"data: [DONE]\n\n"))
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while head := await reader.readuntil(b"\r\n\r\n"):
            await reader.readexactly(int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0]))
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n")

    def ignored(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def until_closed() -> None:
            try:
                await answer(reader, writer)
            except asyncio.IncompleteReadError:
                writer.close()

        tasks.append(asyncio.create_task(until_closed()))

    tasks: list[asyncio.Task[None]] = []
    server = await asyncio.start_server(ignored, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    load = Load(streams=2, chats=3, tokens=7)
    seen = await ask(load.request(url, ["a", "b"], "2+2="))
    server.close()
    await asyncio.gather(*tasks)
    assert (seen.tokens, len(seen.latencies), connections) == (42, 6, 2)
