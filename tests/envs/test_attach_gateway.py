"""The endpoint of a rollouter: where it binds, what it writes down, and what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import ClientSession

from streamrl.config import load_config
from streamrl.envs.gateway import Gateway, run_token
from streamrl.errors import ConfigError
from streamrl.schema import GatewayConfig


def serving(settings: GatewayConfig, script: Callable[[Gateway], Awaitable[None]], index: int = 0) -> None:
    async def main() -> None:
        gateway = Gateway(settings, index)
        await gateway.start()
        try:
            await script(gateway)
        finally:
            await gateway.stop()

    asyncio.run(main())


def test_it_serves_on_loopback_unless_told_otherwise() -> None:
    async def script(gateway: Gateway) -> None:
        assert gateway.url.startswith("http://127.0.0.1:")
        async with ClientSession() as http:
            assert (await http.get(f"{gateway.url}/health")).status == 200

    serving(GatewayConfig(), script)


def test_a_gateway_for_all_addresses_names_the_machine() -> None:
    async def script(gateway: Gateway) -> None:
        assert gateway.url.startswith(f"http://{socket.gethostname()}:")

    serving(GatewayConfig(host="0.0.0.0"), script)


def test_with_a_fixed_port_each_process_takes_its_own() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]

    async def script(gateway: Gateway) -> None:
        assert gateway.url == f"http://127.0.0.1:{free}"

    serving(GatewayConfig(port=free - 2), script, index=2)


def test_a_port_that_is_taken_is_refused_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"gateway.host=127.0.0.1: cannot listen on port {port}: .*gateway.port=0"
        ):
            asyncio.run(Gateway(GatewayConfig(port=port), 0).start())


def test_ports_that_do_not_exist_are_refused_before_the_launch() -> None:
    with pytest.raises(ConfigError, match="gateway.port=65530: 8 rollouters and the evaluator take a port each"):
        load_config(overrides=["gateway.port=65530", "rollouts=8"])


def test_the_address_is_written_for_the_runs_user_alone_and_removed_at_the_end(tmp_path: Path) -> None:
    token = run_token(tmp_path)
    path = tmp_path / "gateways" / "rollouter-3.json"

    async def script(gateway: Gateway) -> None:
        gateway.announce(tmp_path, "rollouter-3", token)
        assert json.loads(path.read_text()) == {"url": gateway.url, "token": token}
        assert path.stat().st_mode & 0o777 == 0o600

    serving(GatewayConfig(), script)
    assert sorted(each.name for each in path.parent.iterdir()) == ["token"]


def test_rollouters_that_make_the_token_at_the_same_moment_agree_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may run on machines of their own that share the run folder, with the same pid."""
    link = Path.hardlink_to
    seen: list[str | None] = []

    def late(path: Path, target: Path) -> None:
        if not seen:
            seen.append(None)
            seen.append(run_token(tmp_path))  # another one, between this one's first look and its last
        link(path, target)

    monkeypatch.setattr(Path, "hardlink_to", late)
    assert run_token(tmp_path) == seen[1] == (tmp_path / "gateways" / "token").read_text()


def test_the_token_of_a_run_is_made_once_and_for_its_user_alone(tmp_path: Path) -> None:
    assert run_token(tmp_path) == run_token(tmp_path)
    folder = tmp_path / "gateways"
    assert [path.name for path in folder.iterdir()] == ["token"]
    assert (folder.stat().st_mode & 0o777, (folder / "token").stat().st_mode & 0o777) == (0o700, 0o600)
