"""An MCP server with one tool, which adds two numbers: `python -m apps.agent.adder`.

It prints the URL at which it listens, and ends with its standard input.
"""

import os
import sys
import threading

import uvicorn
from mcp.server.mcpserver import MCPServer

from goaly.agents.listeners import listening

HOST = "127.0.0.1"

server = MCPServer("calculator", log_level="WARNING")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


def main() -> None:
    """Serve until standard input ends, as it does with the process that holds its other end."""
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    listener = listening(HOST, 0)
    print(f"http://{HOST}:{listener.getsockname()[1]}/mcp", flush=True)
    app = server.streamable_http_app(stateless_http=True, json_response=True, host=HOST)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
