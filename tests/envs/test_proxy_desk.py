"""Keys of episodes."""

from __future__ import annotations

import asyncio

import pytest
from proxy_server import ScriptedSession, says

from streamrl.envs.gateway import Gateway
from streamrl.envs.proxy import desk as desks
from streamrl.envs.proxy.desk import SessionDesk
from streamrl.envs.proxy.errors import ApiError
from streamrl.schema import GatewayConfig


def status(desk: SessionDesk, key: str | None) -> int:
    try:
        desk.recognise(key)
    except ApiError as error:
        return error.status
    return 200


def test_a_key_opens_its_own_session_until_it_is_closed():
    async def scene() -> None:
        desk, first, second = SessionDesk(), ScriptedSession(says("1")), ScriptedSession(says("2"))
        keys = desk.open(first), desk.open(second)
        assert [desk.recognise(key).session for key in keys] == [first, second]
        desk.close(keys[0])
        desk.close(keys[0])
        assert [status(desk, key) for key in keys] == [410, 200]
        assert len(desk) == 1

    asyncio.run(scene())


def test_ended_keys_are_remembered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(desks, "ENDED_KEYS", 2)

    async def scene() -> None:
        desk, session = SessionDesk(), ScriptedSession(says("1"))
        keys = [desk.open(session) for _ in range(3)]
        for key in keys:
            desk.close(key)
        assert [status(desk, key) for key in keys] == [401, 410, 410]

    asyncio.run(scene())


@pytest.mark.parametrize("key", [None, "", "sk", "sk-", "sk--", "-", "sk-abc", "sk-abc-"])
def test_what_is_no_key_is_unknown(key: str | None):
    assert status(SessionDesk(), key) == 401


def test_keys_hold_256_bits_that_are_not_the_name():
    async def scene() -> None:
        desk, session = SessionDesk(), ScriptedSession(says("1"))
        secrets = {desk.open(session).split("-", 2)[2] for _ in range(100)}
        assert len(secrets) == 100
        assert {len(each) for each in secrets} == {43}  # 32 bytes in base64

    asyncio.run(scene())


def test_closing_ends_every_call_of_the_session_and_no_other():
    async def scene() -> None:
        desk = SessionDesk()
        ended, going = ScriptedSession(says("1"), hold=True), ScriptedSession(says("2"), hold=True)
        key, other = desk.open(ended), desk.open(going)

        async def call(name: str, session: ScriptedSession) -> str:
            async with desk.recognise(name).call(1):
                return (await session.chat([])).text

        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(outcome(call(key, ended))) for _ in range(2)]
            lasting = tasks.create_task(call(other, going))
            await ended.started.wait()
            await going.started.wait()
            desk.close(key)
            await asyncio.wait(calls)
            going.hold.set()
        assert [each.result() for each in calls] == [410, 410]
        assert lasting.result() == "2"

    async def outcome(call: object) -> int:
        try:
            await call  # type: ignore[misc]
        except ApiError as error:
            return error.status
        return 200

    asyncio.run(scene())


def test_the_gateway_is_as_strict_as_its_settings_say():
    async def scene() -> None:
        for strict in (False, True):
            gateway = Gateway(GatewayConfig(strict=strict), 0)
            _, key = gateway.open(ScriptedSession(says("1")))
            assert gateway.desk.recognise(key).strict is strict

    asyncio.run(scene())
