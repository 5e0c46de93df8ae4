"""What sandboxes reach when one address or some hosts are open to them."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from goaly.sandboxes.network import allow, forward
from goaly.sandboxes.sandbox import Sandbox
from tests.unit.sandboxes.conftest import LOCAL

GET = """
import sys, urllib.request
try: print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())
except Exception as error: print(type(error).__name__, error)
"""


@pytest.fixture(params=[*LOCAL, "remote"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def site() -> AsyncIterator[int]:
    """The port of a server that answers each request with its first line and Host."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        said = head[0] + b" " + next(field for field in head if field.lower().startswith(b"host"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(said) + said)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def get(sandbox: Sandbox, url: str, **env: str) -> str:
    return (await sandbox.run(["/usr/bin/python3", "-c", GET, url], env=env)).stdout.text().strip()


async def test_one_address_is_reached_by_its_port_inside_and_no_other(sandbox: Sandbox, site: int):
    assert "URLError" in await get(sandbox, f"http://127.0.0.1:{site}/")
    server = await forward(sandbox, 8000, "127.0.0.1", site)
    assert await get(sandbox, "http://127.0.0.1:8000/v1?x=1") == "GET /v1?x=1 HTTP/1.1 Host: 127.0.0.1:8000"
    assert "URLError" in await get(sandbox, f"http://127.0.0.1:{site}/")
    many = await asyncio.gather(*(get(sandbox, f"http://127.0.0.1:8000/{n}") for n in range(10)))
    assert [line.split()[1] for line in many] == [f"/{n}" for n in range(10)]
    server.close()
    assert "URLError" in await get(sandbox, "http://127.0.0.1:8000/")


async def test_only_listed_hosts_pass_the_proxy(sandbox: Sandbox, site: int):
    server = await allow(sandbox, 3128, ["localhost", ".example.org"])
    proxy = "http://127.0.0.1:3128"
    assert (
        await get(sandbox, f"http://localhost:{site}/a", http_proxy=proxy) == f"GET /a HTTP/1.1 Host: localhost:{site}"
    )
    for refused in (f"http://127.0.0.1:{site}/", "http://badexample.org/", f"http://localhost.evil:{site}/"):
        assert "403" in await get(sandbox, refused, http_proxy=proxy)
    assert "502" in await get(sandbox, "http://localhost:9/", http_proxy=proxy)
    assert "403" in await get(sandbox, f"https://127.0.0.1:{site}/", https_proxy=proxy)
    request = f"CONNECT localhost:{site} HTTP/1.1\\r\\n\\r\\n"
    tunnel = f"exec 3<>/dev/tcp/127.0.0.1/3128; printf '{request}' >&3; read -r line <&3; echo $line"
    assert "200" in (await sandbox.run(["bash", "-c", tunnel])).stdout.text()
    server.close()
