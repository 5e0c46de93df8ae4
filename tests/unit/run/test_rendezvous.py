"""The port of a rendezvous is free, and stays free."""

import socket
from contextlib import ExitStack
from pathlib import Path

from goaly.run.rendezvous import lasting_port


def test_a_lasting_port_is_free_and_none_that_the_system_hands_out() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = set()
    with ExitStack() as listening:
        for _ in range(50):
            port = lasting_port()
            assert not first <= port <= last
            assert port not in found
            found.add(port)
            listening.enter_context(socket.create_server(("", port)))
