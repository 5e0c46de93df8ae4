"""An MCP server with a few tools: over stdio, or with a port as argument over streamable HTTP."""

import os
import signal
import socket
import subprocess
import sys

import anyio
import uvicorn
from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator", log_level="CRITICAL")


@server.tool(description="The sum of two numbers.")
def add(a: int, b: int) -> int:
    return a + b


@server.tool()
def divide(a: int, b: int) -> float:
    return a / b


@server.tool()
async def wait_forever() -> str:
    await anyio.sleep_forever()
    return ""


@server.tool()
def process_ids() -> str:
    """Its own, and that of a child that lives in a session of its own."""
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return f"{os.getpid()} {child.pid}"


@server.tool()
def end(code: int) -> str:
    print("I was told to end", file=sys.stderr, flush=True)
    os._exit(code)


@server.tool()
def stop() -> str:
    os.kill(os.getpid(), signal.SIGSTOP)
    return ""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        config = uvicorn.Config(server.streamable_http_app(), log_level="warning")
        uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
    else:
        server.run("stdio")
