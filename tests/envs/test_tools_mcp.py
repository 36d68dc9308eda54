"""Tools of MCP servers: real servers, in processes of their own, that die, hang and are cancelled."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from aiohttp import web

from streamrl.envs.chat.tool_calls import ToolCall
from streamrl.envs.tools import McpServer, Toolbox, ToolFatal
from streamrl.errors import ConfigError

pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")

SCRIPT = str(Path(__file__).with_name("mcp_calculator.py"))


class Clipper:
    async def clip(self, text: str, tokens: int) -> str:
        return text


PATIENT_S = 150.0
"""A server's imports take a second, and many more on a busy machine."""


def local(**options: Any) -> McpServer:
    return McpServer(sys.executable, SCRIPT, start_timeout_s=PATIENT_S, **options)


async def ask(box: Toolbox, name: str, /, **arguments: Any) -> str:
    (message,) = await box.answer([ToolCall("1", name, arguments, "")])
    return str(message["content"])


OTHERS: set[psutil.Process] = set()
"""Processes that other tests started, such as the resource tracker of multiprocessing."""


@pytest.fixture(autouse=True)
def others() -> None:
    OTHERS.clear()
    OTHERS.update(psutil.Process().children())


def servers() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if each not in OTHERS]


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_servers_tools_are_offered_and_answered() -> None:
    async def main() -> None:
        server = local(prefix="calc_", only=["fail", "add"])
        async with Toolbox([server], Clipper()) as box:
            add, fail = (each["function"] for each in box.schemas)
            assert (add["name"], add["description"]) == ("calc_add", "The sum of two numbers.")
            assert add["parameters"]["required"] == ["a", "b"]
            assert fail["name"] == "calc_fail"
            assert await ask(box, "calc_add", a=2, b=3) == "5"
            assert await ask(box, "calc_fail") == "error: Error executing tool fail: no such luck"
            assert "validation error" in await ask(box, "calc_add", a="x", b=1)
            assert box.metrics == {"tool_calls": 3, "tool_errors": 2}

    asyncio.run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_server_that_dies_is_an_error_once_and_is_started_again_without_its_state(run: Any) -> None:
    async def main() -> int:
        async with Toolbox([local()], Clipper()) as box:
            assert [await ask(box, "count"), await ask(box, "count")] == ["1", "2"]
            assert (await ask(box, "die")).startswith("error: die: its server was lost during the call")
            assert await ask(box, "count") == "1"
            assert box.metrics == {"tool_calls": 4, "tool_errors": 1}
            return int(await ask(box, "process"))

    assert not is_running(run(main()))


def test_a_server_gets_the_folder_and_the_variables_that_it_is_given_and_no_secrets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    folder = str(tmp_path.resolve())

    async def main() -> None:
        async with Toolbox([local(env={"GIVEN": "yes"}, cwd=tmp_path)], Clipper()) as box:
            assert await ask(box, "folder") == folder
            assert await ask(box, "variable", name="GIVEN") == "yes"
            assert await ask(box, "variable", name="API_KEY") == "not there"

    asyncio.run(main())


def test_a_call_that_hangs_is_an_error_and_the_server_goes_on() -> None:
    async def main() -> None:
        async with Toolbox([local()], Clipper(), timeout_s=6) as box:
            assert await ask(box, "count") == "1"
            assert await ask(box, "hang") == "error: hang took longer than 6 s"
            assert await ask(box, "count") == "2"

    asyncio.run(main())


def test_episodes_have_servers_of_their_own_or_share_one() -> None:
    async def main() -> None:
        shared = local(scope="shared", only=["count"])
        own = local(prefix="own_", only=["count"])

        async def episode() -> tuple[str, str]:
            async with Toolbox([shared, own], Clipper()) as box:
                return await ask(box, "count"), await ask(box, "own_count")

        counts = await asyncio.gather(episode(), episode())
        assert sorted(count for count, _ in counts) == ["1", "2"]
        assert [count for _, count in counts] == ["1", "1"]
        assert len(servers()) == 1  # the shared one
        await shared.close()
        assert servers() == []

    asyncio.run(main())


def test_a_cancelled_episode_does_not_wait_for_its_server_and_leaves_none() -> None:
    async def main() -> None:
        server = local()
        started: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def episode() -> None:
            async with Toolbox([server], Clipper()) as box:
                started.set_result(int(await ask(box, "process")))
                await ask(box, "hang")

        playing = asyncio.create_task(episode())
        pid = await started
        playing.cancel()
        await asyncio.wait([playing])
        assert playing.cancelled()
        assert is_running(pid)
        await server.close()
        assert not is_running(pid)

    asyncio.run(main())


def test_a_server_ends_with_the_process_that_started_it_also_when_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio, sys
from streamrl.envs.chat.tool_calls import ToolCall
from streamrl.envs.tools import McpServer, Toolbox
class Clipper:
    async def clip(self, text, tokens): return text
async def main():
    async with Toolbox([McpServer(sys.executable, {SCRIPT!r}, start_timeout_s={PATIENT_S})], Clipper()) as box:
        print((await box.answer([ToolCall("1", "process", {{}}, "")]))[0]["content"], flush=True)
        await box.answer([ToolCall("1", "hang", {{}}, "")])
asyncio.run(main())
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    server = psutil.Process(int(holder.stdout.readline()))
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    psutil.wait_procs([server], timeout=60)
    assert not is_running(server.pid)


@contextmanager
def served() -> Iterator[str]:
    """The URL of a server that speaks HTTP."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, SCRIPT, "--http", str(port)], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        while "running on" not in (line := process.stderr.readline()):
            assert line, "the server ended"
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.communicate()


def test_a_server_behind_a_url_is_used_and_its_loss_is_an_error_then_fatal() -> None:
    async def main() -> None:
        with served() as url:
            async with Toolbox([McpServer(url=url)], Clipper()) as box:
                assert await ask(box, "add", a=2, b=3) == "5"
                assert (await ask(box, "die")).startswith("error: die: its server was lost during the call")
                with pytest.raises(ToolFatal, match="cannot be used: ConnectError"):
                    await ask(box, "add", a=2, b=3)

    asyncio.run(main())


def test_headers_go_to_the_server_behind_a_url() -> None:
    async def main() -> set[str | None]:
        seen: set[str | None] = set()

        async def refuse(request: web.Request) -> web.Response:
            seen.add(request.headers.get("X-Key"))
            return web.Response(status=403)

        app = web.Application()
        app.router.add_route("*", "/mcp", refuse)
        site = web.AppRunner(app)
        await site.setup()
        await web.TCPSite(site, "127.0.0.1", 0).start()
        server = McpServer(url=f"http://127.0.0.1:{site.addresses[0][1]}/mcp", headers={"X-Key": "open sesame"})
        with pytest.raises(ToolFatal, match="cannot be used"):
            async with Toolbox([server], Clipper()):
                raise AssertionError
        await site.cleanup()
        return seen

    assert asyncio.run(main()) == {"open sesame"}


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (McpServer("no-such-command"), "McpServer no-such-command: no such command on the PATH"),
        (
            McpServer(sys.executable, "-c", "exit(3)", start_timeout_s=PATIENT_S),
            "cannot be used: MCPError: Connection closed",
        ),
        (
            McpServer(sys.executable, "-c", "import signal; signal.pause()", start_timeout_s=0.5),
            "not ready within start_timeout_s=0.5",
        ),
        (McpServer(url="http://127.0.0.1:9/mcp"), "McpServer http://127.0.0.1:9/mcp: cannot be used: ConnectError"),
    ],
    ids=["missing", "ends", "mute", "nobody"],
)
def test_a_server_that_cannot_be_used_ends_the_episode_and_says_why(server: McpServer, reason: str) -> None:
    async def main() -> None:
        async with Toolbox([server], Clipper()):
            raise AssertionError

    with pytest.raises(ToolFatal) as caught:
        asyncio.run(main())
    assert reason in str(caught.value)
    assert servers() == []


def test_a_tool_that_a_server_does_not_have_is_refused_and_the_server_ended() -> None:
    async def main() -> None:
        async with Toolbox([local(only=["ad"])], Clipper()):
            raise AssertionError

    with pytest.raises(ConfigError, match=r"it has no tool 'ad'; did you mean 'add'\?"):
        asyncio.run(main())
    assert servers() == []


@pytest.mark.parametrize(
    ("words", "options", "reason"),
    [
        ((), {}, "give a command, as in McpServer('python', 'server.py'), or url=…, one of them"),
        (("python",), {"url": "http://x"}, "or url=…, one of them"),
        ((["python", "server.py"],), {}, "the command must be words"),
        (("python",), {"scope": "run"}, "scope='run': expected 'episode' or 'shared'"),
        ((), {"url": "http://x", "env": {"A": "b"}}, "env belongs to a process"),
        (("python",), {"headers": {"A": "b"}}, "headers belong to a url"),
    ],
)
def test_settings_of_a_server_that_contradict_each_other_are_refused(
    words: tuple[Any, ...], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        McpServer(*words, **options)
    assert reason in str(caught.value)
