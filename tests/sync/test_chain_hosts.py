"""The chain between hosts with network interfaces of their own: what these carry, and a host that vanishes.

A host is a process in a network namespace; a bridge in another one connects them. All of it goes with the processes.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from host_process import MODEL_BYTES, digest, tensors
from sync_support import socket_folder
from transport_support import NIXL

SCRIPT = Path(__file__).with_name("host_process.py")
TOOLS = ("unshare", "nsenter", "ip", "mount")
UNSHARED = ("unshare", "-n", "-m", "sh", "-c", 'mount -t sysfs sysfs /sys && exec "$@"', "sh")
"""Runs a command in network and mount namespaces of its own; UCX looks for interfaces in /sys."""


def _why_not() -> str:
    """Empty where network namespaces with links between them can be made."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} is not installed"
    link = ["ip", "link", "add", "va", "type", "veth", "peer", "name", "vb"]
    tried = subprocess.run([*UNSHARED, *link], capture_output=True, text=True, timeout=30, check=False)
    return tried.stderr.strip()


WHY_NOT = _why_not()
pytestmark = [*NIXL.marks, pytest.mark.skipif(bool(WHY_NOT), reason=f"no network namespaces: {WHY_NOT}")]


class Host:
    """A process in a network namespace of its own, whose interface is called ``net``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())

    async def hear(self, beginning: str) -> str:
        """The rest of its next line, which begins like that."""
        assert self.process.stdout is not None
        async with asyncio.timeout(90):
            line = (await self.process.stdout.readline()).decode().strip()
        assert line.startswith(beginning), line
        return line.removeprefix(beginning).strip()

    def carried(self) -> tuple[int, int]:
        """Bytes that its interface has received and sent."""
        for line in Path(f"/proc/{self.process.pid}/net/dev").read_text().splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == "net":
                return int(counts.split()[0]), int(counts.split()[8])
        raise AssertionError("it has no such interface")

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


def in_namespace(pid: int, *command: str) -> None:
    subprocess.run(["nsenter", "-t", str(pid), "-n", *command], check=True, timeout=30)


@asynccontextmanager
async def process(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """In a network namespace of its own; it ends with its standard input, also when the test is killed."""
    variables = {"OMP_NUM_THREADS": "1", "UCX_NET_DEVICES": "net", "UCX_TLS": "tcp,self"}
    made = await asyncio.create_subprocess_exec(
        *UNSHARED, *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | variables
    )
    try:
        yield made
    finally:
        if made.returncode is None:
            made.kill()
        await made.wait()


async def unshared(pid: int) -> None:
    """Until the process is in a namespace of its own."""
    ours = os.stat("/proc/self/ns/net").st_ino
    async with asyncio.timeout(30):
        while os.stat(f"/proc/{pid}/ns/net").st_ino == ours:  # noqa: ASYNC110 unshare(1) tells nobody
            await asyncio.sleep(0.01)


@asynccontextmanager
async def hosts(*names: str) -> AsyncIterator[dict[str, Host]]:
    """The trainer and so many rollouters, connected and ready."""
    async with AsyncExitStack() as stack:
        endpoint = stack.enter_context(socket_folder())
        switch = await stack.enter_async_context(process("cat"))
        await unshared(switch.pid)
        in_namespace(switch.pid, "ip", "link", "add", "bridge", "type", "bridge")
        in_namespace(switch.pid, "ip", "link", "set", "bridge", "up")
        made = {}
        for number, name in enumerate(("trainer", *names)):
            role = "trainer" if name == "trainer" else "rollouter"
            made[name] = Host(
                await stack.enter_async_context(process(sys.executable, str(SCRIPT), role, name, endpoint))
            )
            await connect(made[name].process.pid, switch.pid, number)
            made[name].tell("connected")
        for host in made.values():
            await host.hear("ready")
        made["trainer"].tell(f"members {' '.join(names)}")
        await made["trainer"].hear("members")
        yield made


async def connect(pid: int, switch: int, number: int) -> None:
    await unshared(pid)
    port = f"port{number}"
    in_namespace(switch, *("ip", "link", "add", port, "type", "veth", "peer", "name", "net", "netns", str(pid)))
    in_namespace(switch, "ip", "link", "set", port, "master", "bridge", "up")
    for command in (f"addr add 10.77.0.{number + 1}/24 dev net", "link set net up", "link set lo up"):
        in_namespace(pid, "ip", *command.split())


async def publish(all_hosts: dict[str, Host], version: int, seed: int, order: str) -> None:
    """Bring a version to every rollouter of ``order``, each of which asks when the one before has asked."""
    all_hosts["trainer"].tell(f"publish {version} {seed}")
    await ask(all_hosts, version, order)
    for name in order:
        await all_hosts[name].hear(f"staged {version}")
        assert await all_hosts[name].hear(f"loaded {version}") == digest(tensors(seed))
    assert await all_hosts["trainer"].hear("published") == str(len(order))


async def ask(all_hosts: dict[str, Host], version: int, order: str) -> None:
    for name in order:
        await all_hosts[name].hear(f"asks {version}")
    for name in order:
        all_hosts[name].tell("go")
        await all_hosts[name].hear("asked")


def models(after: tuple[int, int], before: tuple[int, int]) -> tuple[int, int]:
    """Received and sent, in models; what the network itself needs counts for nothing."""
    received, sent = (round((new - old) / MODEL_BYTES, 1) for new, old in zip(after, before, strict=True))
    return received, sent


def test_each_interface_carries_a_version_once_and_it_arrives_bit_for_bit() -> None:
    async def scenario() -> None:
        async with hosts("a", "b", "c") as it:
            await publish(it, 0, 1, "abc")
            before = {name: host.carried() for name, host in it.items()}
            for version, seed in ((1, 2), (2, 1), (3, 2)):
                await publish(it, version, seed, "abc")
            carried = {name: models(host.carried(), before[name]) for name, host in it.items()}
            assert carried == {"trainer": (0.0, 3.0), "a": (3.0, 3.0), "b": (3.0, 3.0), "c": (3.0, 0.0)}

    asyncio.run(scenario())


def test_when_a_host_vanishes_in_mid_version_those_behind_it_read_the_rest_from_the_trainer() -> None:
    async def scenario() -> None:
        async with hosts("a", "b", "c", "d") as it:
            trainer = it["trainer"]
            await publish(it, 0, 1, "abcd")
            before = trainer.carried()
            it["b"].tell("hold 1 4")
            await it["b"].hear("holds")
            trainer.tell("publish 1 2")
            await ask(it, 1, "abcd")
            await it["b"].hear("held")
            await it.pop("b").kill()
            trainer.tell("members a c d")  # as the controller does with a process that ended
            await trainer.hear("members")
            for name in "acd":
                await it[name].hear("staged 1")
                assert await it[name].hear("loaded 1") == digest(tensors(2))
            assert await trainer.hear("published") == "3"
            received, sent = models(trainer.carried(), before)
            assert (received, 1.5 <= sent <= 2.0) == (0.0, True), f"c alone read there, half of it or more: {sent}"

            before = {name: host.carried() for name, host in it.items()}
            await publish(it, 2, 3, "acd")
            carried = {name: models(host.carried(), before[name]) for name, host in it.items()}
            assert carried == {"trainer": (0.0, 1.0), "a": (1.0, 1.0), "c": (1.0, 1.0), "d": (1.0, 0.0)}

    asyncio.run(scenario())


def test_a_host_that_stands_still_while_it_is_read_holds_nobody_up() -> None:
    async def scenario() -> None:
        async with hosts("a", "b", "c") as it:
            await publish(it, 0, 1, "abc")
            it["c"].tell("hold 1 2")
            await it["c"].hear("holds")
            it["trainer"].tell("publish 1 2")
            await ask(it, 1, "abc")
            await it["c"].hear("held")
            for name in "ab":
                await it[name].hear("staged 1")
            it["b"].process.send_signal(signal.SIGSTOP)
            it["c"].tell("release")
            await it["c"].hear("staged 1")
            # That it goes on is not for certain: UCX may end a process whose reader went away in the meantime.
            await it.pop("b").kill()
            it["trainer"].tell("members a c")
            await it["trainer"].hear("members")
            for name in "ac":
                assert await it[name].hear("loaded 1") == digest(tensors(2))
            assert await it["trainer"].hear("published") == "2"
            await publish(it, 2, 3, "ac")

    asyncio.run(scenario())
