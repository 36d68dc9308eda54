"""How many engines a run has and who holds them, from the settings (``rollouters_per_engine``, ``engine.urls``)."""

from __future__ import annotations

from urllib.parse import urlsplit

from streamrl.errors import ConfigError
from streamrl.schema import Config

SERVERS = ("vllm", "sglang")
"""Engines whose running servers can take part in a run."""


def engine_hosts(config: Config) -> int:
    """Processes that hold an engine for the rollouters; 0: each rollouter holds its own."""
    if config.engine.urls:
        return len(config.engine.urls)
    return -(-config.rollouts // config.rollouters_per_engine) if config.rollouters_per_engine else 0


def engine_holder(config: Config) -> str:
    """Kind of the actors that hold the engines of the rollouters and take part in weight updates."""
    return "engine" if engine_hosts(config) else "rollouter"


def check_sharing(config: Config) -> None:
    """``ConfigError`` for servers and shares that cannot be."""
    urls, name = config.engine.urls, config.engine.name
    if config.rollouters_per_engine > config.rollouts:
        raise ConfigError(
            f"rollouters_per_engine={config.rollouters_per_engine} is more than rollouts={config.rollouts}; "
            f"set rollouters_per_engine={config.rollouts} for one engine that all share"
        )
    if not urls:
        return
    if name not in SERVERS:
        raise ConfigError(
            f"engine.urls is for running servers of {' and '.join(SERVERS)}, got engine.name={name}; leave engine.urls "
            "empty, or set engine.name to one of these"
        )
    if config.rollouters_per_engine:
        raise ConfigError(
            f"engine.urls={urls} and rollouters_per_engine={config.rollouters_per_engine}: all rollouters share all "
            "servers; set rollouters_per_engine=0"
        )
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"engine.urls: expected http://HOST:PORT, got {url!r}")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ConfigError(f"engine.urls: expected http://HOST:PORT without a user, password or query, got {url!r}")
    if len({url.rstrip("/") for url in urls}) < len(urls):
        raise ConfigError(f"engine.urls={urls} names a server twice, and each takes its weights once; name it once")
