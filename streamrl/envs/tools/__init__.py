"""Tools for agents: Python functions and MCP servers, and the loop that calls them (docs/tools.md)."""

from streamrl.envs.tools.agent import ToolAgent
from streamrl.envs.tools.function import ToolFatal, tool
from streamrl.envs.tools.mcp_server import McpServer
from streamrl.envs.tools.toolbox import Toolbox

__all__ = ["McpServer", "ToolAgent", "ToolFatal", "Toolbox", "tool"]
