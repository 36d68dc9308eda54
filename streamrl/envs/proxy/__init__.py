"""OpenAI- and Anthropic-compatible endpoints of the episodes of a rollouter (docs/proxy.md)."""

from streamrl.envs.proxy.desk import ProxySession, SessionDesk
from streamrl.envs.proxy.routes import add_routes

__all__ = ["ProxySession", "SessionDesk", "add_routes"]
