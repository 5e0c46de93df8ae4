"""Sockets between event loops of one process, and to processes that are killed or that belong to another user."""

import asyncio
import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from goaly.base.errors import ReplicaLost
from goaly.base.message_socket import Listener, MessageSocket, open_socket
from goaly.generate.connection import Connection, Ways, Withdraw, own_name
from goaly.generate.request import Finish, Sample, Sampling
from goaly.generate.versioned_tokens import VersionedTokens

CALLER = """
import os, pickle, socket, struct, sys
os.setuid(int(sys.argv[2]))
line = socket.socket(socket.AF_UNIX)
line.connect("\\0" + sys.argv[1])
message = pickle.dumps("hello")
line.sendall(struct.pack("<Q", len(message)) + message)
sys.stdin.read()
"""


class Received:
    """What came on a socket, and whether it has ended."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.ends: asyncio.Queue[None] = asyncio.Queue()
        self.end = lambda: self.ends.put_nowait(None)


async def pair(here: Received, there: Received) -> tuple[MessageSocket, MessageSocket]:
    listener = Listener()
    taken = asyncio.ensure_future(listener.take(here.messages.put_nowait, here.end))
    await asyncio.sleep(0)  # it waits before the other end is opened
    opened = await open_socket(listener.address, there.messages.put_nowait, there.end)
    return await taken, opened


def caller(address: str, user: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-IS", "-c", CALLER, address[1:], str(user)], stdin=subprocess.PIPE)


async def test_messages_arrive_whole_and_in_order_both_ways() -> None:
    here, there = Received(), Received()
    one, other = await pair(here, there)
    messages = [b"x" * size for size in (0, 1, 10**7, 3, 10**6)] + [list(range(1000))]
    for message in messages:
        one.send(message)
        other.send((message, None))
    with pytest.raises(TypeError, match="cannot pickle"):
        one.send([1, threading.Lock()])
    one.send("the last")
    for message in [*messages, "the last"]:
        assert await there.messages.get() == message
    for message in messages:
        assert await here.messages.get() == (message, None)
    one.close()
    await there.ends.get()
    other.send("too late")
    assert here.ends.empty()  # it closed itself
    assert there.ends.empty()


async def test_messages_of_several_threads_arrive_whole_and_those_of_each_in_order() -> None:
    here, there = Received(), Received()
    one, other = await pair(here, there)

    def send(thread: int) -> None:
        for number in range(300):
            one.send((thread, number, b"x" * (number % 7 * 10_000)))

    for _ in range(2):  # once the full socket has room, messages go into it directly again
        sending = asyncio.gather(*(asyncio.to_thread(send, thread) for thread in range(3)))
        came: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for _ in range(900):
            thread, number, data = await there.messages.get()
            assert len(data) == number % 7 * 10_000
            came[thread].append(number)
        await sending
        assert list(came.values()) == [list(range(300))] * 3
        assert not one._is_full
    one.close()
    await there.ends.get()
    await asyncio.to_thread(one.send, "too late")
    other.close()


async def test_what_a_thread_sent_before_the_close_arrives_also_if_the_socket_was_full() -> None:
    here, there = Received(), Received()
    one, other = await pair(here, there)
    sending = threading.Thread(target=lambda: [one.send(b"x" * 10**6) for _ in range(5)])
    sending.start()
    sending.join()  # the event loop, which would empty the socket, waits
    one.close()
    for _ in range(5):
        assert len(await there.messages.get()) == 10**6
    await there.ends.get()
    other.close()


async def test_what_only_cloudpickle_can_pickle_arrives_too() -> None:
    here, there = Received(), Received()
    one, other = await pair(here, there)

    class Own(Exception):
        pass

    one.send(Own("told"))
    assert str(await there.messages.get()) == "told"
    one.close()
    other.close()


async def test_a_connection_that_ends_before_its_socket_opens_leaves_nothing_in_the_event_loop() -> None:
    refuses: Any = SimpleNamespace(
        connect=SimpleNamespace(call_one=AsyncMock(side_effect=OSError("no route"))),
        tell=SimpleNamespace(broadcast=Mock()),
    )
    for _ in range(3):  # a descriptor that the loop still waits for would be the next one's
        connection = Connection(refuses)
        with pytest.raises(ReplicaLost, match="no route"):
            await connection.submit("asked", [1], Sampling())
        here, there = Received(), Received()
        one, other = await pair(here, there)
        one.send("hello")
        assert await there.messages.get() == "hello"
        for line in (one, other):
            line.close()
        connection.close()


async def test_what_waited_for_the_socket_can_be_withdrawn_and_a_refused_part_ends_its_own_request() -> None:
    asked: asyncio.Future[Ways] = asyncio.get_running_loop().create_future()

    async def connect(name: str, ways: Ways) -> None:
        asked.set_result(ways)
        await asyncio.Event().wait()

    replica: Any = SimpleNamespace(connect=SimpleNamespace(call_one=connect))
    connection = Connection(replica)
    turns = [connection.wait_turn(name) for name in ("never sent", "suspect")]
    connection.cancel("never sent")  # generate-2
    there = Received()
    line = await open_socket((await asked).socket, there.messages.put_nowait, there.end)
    suspect = (await there.messages.get()).request_id
    assert own_name(suspect) == "suspect"
    connection.cancel("suspect")
    assert await there.messages.get() == Withdraw([suspect])  # generate-2
    assert all(turn.cancelled() for turn in turns)

    def refuse(part: VersionedTokens) -> None:
        raise LookupError("not this one")

    refused = connection.submit("refused", [1], Sampling(), 0, refuse)
    other = connection.submit("other", [1], Sampling())
    first, second = (request.request_id for request in (await there.messages.get()).requests)
    answer = Sample.of([1], [0.0], [0], Finish.STOP)
    line.send([(first, VersionedTokens([1], [0.0], [0])), (second, answer)])
    with pytest.raises(LookupError, match="not this one"):
        await refused
    assert (await other).tokens.tolist() == [1]
    assert await there.messages.get() == Withdraw([first])
    connection.close()
    await there.ends.get()


async def test_a_message_that_cannot_be_handled_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    gave_up: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr("goaly.base.message_socket.give_up", lambda why, error: gave_up.put_nowait(f"{why}: {error}"))
    here, there = Received(), Received()
    there.messages.put_nowait = Mock(side_effect=LookupError("no such client"))
    one, other = await pair(here, there)
    one.send("hello")
    assert "no such client" in await gave_up.get()
    one.close()
    other.close()


async def test_the_end_of_a_killed_process_ends_its_socket() -> None:
    here, listener = Received(), Listener()
    with caller(listener.address, os.getuid()) as process:
        await listener.take(here.messages.put_nowait, here.end)
        assert await here.messages.get() == "hello"
        process.kill()
        await here.ends.get()
    with pytest.raises(OSError, match="refused"):
        await open_socket(listener.address, here.messages.put_nowait, here.end)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
async def test_a_process_of_another_user_gets_no_socket() -> None:
    here, listener = Received(), Listener()
    taken = asyncio.ensure_future(listener.take(here.messages.put_nowait, here.end))
    with caller(listener.address, 65534) as stranger:
        assert stranger.stdin is not None
        with caller(listener.address, os.getuid()) as ours:
            line = await taken
            assert await here.messages.get() == "hello"
            assert here.messages.empty()
            line.close()
            ours.kill()
        stranger.kill()
