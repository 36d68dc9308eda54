"""A small MCP server: ``python mcp_calculator.py [--http PORT]``. Its counter lives as long as its process."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("calculator")
_count = 0


@server.tool()
def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


@server.tool()
def count() -> str:
    """How often it was asked."""
    global _count
    _count += 1
    return str(_count)


@server.tool()
def process() -> str:
    """Its process id."""
    return str(os.getpid())


@server.tool()
def fail() -> str:
    """Does not work."""
    raise ToolError("no such luck")


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
async def hang() -> str:
    """Never ends."""
    await asyncio.Event().wait()
    return "unreachable"


@server.tool()
def variable(name: str) -> str:
    """A variable of its environment."""
    return os.environ.get(name, "not there")


@server.tool()
def folder() -> str:
    """Where it runs."""
    return os.getcwd()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--http"]:
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run()
