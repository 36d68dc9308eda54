"""``streamrl attach``: a process outside of a run plays its leases, and may come and go (docs/attach.md)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import ClientSession, ClientTimeout

from streamrl.config import load_config, parse_override
from streamrl.envs.attach.client import Attachment, ConnectionLost, Played
from streamrl.envs.attach.protocol import Closed, Welcome
from streamrl.envs.environment import load_environment
from streamrl.envs.gateway import FOLDER
from streamrl.errors import ConfigError, StreamRLError
from streamrl.runtime.folders import PROCESS_FILE, is_alive
from streamrl.schema import Config, EnvConfig

CONNECT_S = 10.0
"""Seconds that a rollouter has to answer."""

FIRST_RETRY_S, LAST_RETRY_S = 0.1, 2.0
"""Seconds before a rollouter that is not there is looked for again; doubled each time, up to the second."""

PATIENCE_S = 30.0
"""Seconds for which a rollouter on another machine is looked for at the start."""

REPORT_S = 5.0
"""Seconds between two lines on the leases that were played."""


@dataclass(frozen=True)
class Address:
    url: str
    token: str


class RunFolder:
    """The run as its folder shows it."""

    def __init__(self, path: Path, config: Config) -> None:
        self.path = path
        self.names = [f"rollouter-{index}" for index in range(config.rollouts)]

    def address(self, name: str) -> Address | None:
        """Where a rollouter serves now; None while it does not."""
        try:
            found: dict[str, Any] = json.loads((self.path / FOLDER / f"{name}.json").read_text())
        except FileNotFoundError:
            return None
        except PermissionError:
            raise ConfigError(f"{self.path / FOLDER}: only the user who launched the run can attach to it") from None
        return Address(found["url"], found["token"])

    def ended(self) -> str | None:
        """How the run ended; None while it goes on."""
        try:
            return str(json.loads((self.path / "summary.json").read_text())["status"])
        except FileNotFoundError:
            return None

    def lives(self) -> bool | None:
        """Whether its process lives; None where it runs on another machine."""
        process = json.loads((self.path / PROCESS_FILE).read_text())
        return is_alive(process["pid"]) if process["host"] == socket.gethostname() else None


class Urls:
    """Rollouters that the user named."""

    def __init__(self, urls: Sequence[str], token: str) -> None:
        self.names = list(urls)
        self._token = token

    def address(self, name: str) -> Address | None:
        return Address(name, self._token)

    def ended(self) -> str | None:
        return None

    def lives(self) -> bool | None:
        return None


Run = RunFolder | Urls


def attach(
    run_dir: Path | None, urls: Sequence[str], token: str, agent: str, workers: int, overrides: Sequence[str]
) -> int:
    """Play leases until the run ends or a signal comes; returns the exit code.

    Raises ``ConfigError`` for what cannot be attached, and ``StreamRLError`` where the run is gone.
    """
    if workers < 1:
        raise ConfigError(f"--workers {workers}: must be at least 1")
    args = _env_args(overrides)
    if run_dir is not None:
        if urls or token:
            raise ConfigError("attach takes a run folder, or --url and --token for a run on another machine, not both")
        run, played = _of_folder(run_dir, agent, args)
    else:
        run, played = _of_urls(urls, token or os.environ.get("STREAMRL_TOKEN", ""), agent, args)
    return uvloop.run(Attaching(run, played, workers).run())


def _of_folder(run_dir: Path, agent: str, args: Mapping[str, Any]) -> tuple[Run, Played]:
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir}: no run folder, it has no config.yaml; give the one that launch printed")
    config = load_config(str(run_dir / "config.yaml"))
    run = RunFolder(run_dir, config)
    if (status := run.ended()) is not None:
        raise StreamRLError(f"{run_dir}: this run has ended ({status}); attach to one that goes on")
    if not agent:
        config.env.args = {**config.env.args, **args}
        return run, Played(load_environment(config), own_tasks=True)
    return run, _agent(agent, args)


def _of_urls(urls: Sequence[str], token: str, agent: str, args: Mapping[str, Any]) -> tuple[Run, Played]:
    if not urls:
        raise ConfigError("attach needs the run's folder, or --url URL with --token TOKEN")
    if not token:
        raise ConfigError("--url needs the run's token (RUN/gateways/token): --token TOKEN, or set STREAMRL_TOKEN")
    if not agent:
        raise ConfigError("--url needs --agent module:Name: code is not loaded because another machine names it")
    if wrong := [url for url in urls if not url.startswith(("http://", "https://"))]:
        raise ConfigError(f"--url {wrong[0]}: expected http://host:port")
    return Urls(urls, token), _agent(agent, args)


def _agent(agent: str, args: Mapping[str, Any]) -> Played:
    environment = load_environment(Config(env=EnvConfig(name=agent, args=dict(args))))
    return Played(environment, own_tasks=environment.make_task is not None)


def _env_args(overrides: Sequence[str]) -> dict[str, Any]:
    found = {}
    for override in overrides:
        key, value = parse_override(override)
        if not key.startswith("env.args."):
            raise ConfigError(
                f"attach: {override}: only options of the environment can be set here, env.args.<option>=…"
            )
        found[key.removeprefix("env.args.")] = value
    return found


class Attaching:
    """Connections to the rollouters of a run, each with its share of the workers."""

    def __init__(self, run: Run, played: Played, workers: int) -> None:
        self._run = run
        self._played = played
        shares = zip(run.names, _shares(workers, len(run.names)), strict=True)
        self._shares = {name: share for name, share in shares if share}
        self._attachments: dict[str, Attachment] = {}
        """Connected, or about to be."""
        self._leaving = asyncio.Event()
        self._report = Report()
        self._seen = dict.fromkeys(run.names, time.monotonic())
        """When each rollouter was last there."""
        self._attempts: Counter[str] = Counter()
        """To connect to each since then."""
        self._patience_s = PATIENCE_S
        self._was_attached = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        loop.add_signal_handler(signal.SIGTERM, self._leave, True)
        own = "its own tasks" if self._played.own_tasks else "the run's tasks"
        say(f"playing {self._played.environment.name} on {own}: {_described(self._shares, len(self._run.names))}")
        try:
            timeout = ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=CONNECT_S)
            async with ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as tasks:
                for name in self._shares:
                    tasks.create_task(self._serve(name, http))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await self._played.environment.close()
            self._report.end()
        return 0

    async def _serve(self, name: str, http: ClientSession) -> None:
        """One rollouter, until the run ends or this process leaves."""
        while not self._leaving.is_set():
            self._attempts[name] += 1
            try:
                if (address := self._run.address(name)) is None:
                    raise ConnectionLost(f"{name} does not serve yet")
                if await self._play(name, address, http):
                    return
            except ConnectionLost as lost:
                if self._is_over(name, lost):
                    return
            await self._pause(min(FIRST_RETRY_S * 2 ** min(self._attempts[name], 10), LAST_RETRY_S))

    async def _play(self, name: str, address: Address, http: ClientSession) -> bool:
        """One connection; True when there should be no other one."""
        attachment = Attachment(
            address.url, address.token, self._played, self._shares[name],
            on_welcome=lambda welcome: self._welcomed(name, welcome), on_closed=self._report.closed,
        )  # fmt: skip
        self._attachments[name] = attachment
        try:
            bye = await attachment.run(http)
        except ConfigError as error:
            if isinstance(self._run, RunFolder):  # another run's rollouter has got the port of one that died
                raise ConnectionLost(str(error)) from error
            raise
        finally:
            del self._attachments[name]
        self._seen[name] = time.monotonic()
        if bye.kind == "refused":
            raise StreamRLError(f"{name} refused this process: {bye.reason}")
        if bye.kind == "ended":
            self._refuse_gone(bye.reason)
            say(f"{name}: {bye.reason}")
        return bye.kind != "leaving"

    def _welcomed(self, name: str, welcome: Welcome) -> None:
        self._seen[name] = time.monotonic()
        self._attempts[name] = 0
        self._patience_s = welcome.restart_s
        self._was_attached = True
        say(f"attached to {welcome.rollouter} of run {welcome.run}: {self._shares[name]} workers, "
            f"{welcome.group_size} episodes a lease")  # fmt: skip
        if self._leaving.is_set():
            self._attachments[name].detach(at_once=False)

    def _is_over(self, name: str, lost: ConnectionLost) -> bool:
        """Whether a rollouter that is not there stays away in good order. Raises ``StreamRLError`` where it is gone."""
        if (status := self._run.ended()) is not None:
            say(f"{name}: the run has ended ({status})")
            return True
        self._refuse_gone(str(lost))
        away = time.monotonic() - self._seen[name]
        if away > self._patience_s and not self._run.lives():
            what = "the run is gone" if self._was_attached else "nothing to attach to, is the address right"
            raise StreamRLError(f"{what}: no answer for {away:.0f} s; {lost}")
        if self._attempts[name] == 1:
            say(f"{lost}; trying again")
        return False

    def _refuse_gone(self, said: str) -> None:
        if self._run.lives() is False and self._run.ended() is None:
            raise StreamRLError(f"the run is gone: its process does not live any more, and left no summary; {said}")

    async def _pause(self, seconds: float) -> None:
        """Until the next look; leaving cuts it short."""
        try:
            async with asyncio.timeout(seconds):
                await self._leaving.wait()
        except TimeoutError:
            pass

    def _interrupted(self) -> None:
        """The first signal lets the leases under way end, the second gives them back."""
        again = self._leaving.is_set()
        if not again:
            say("detaching: the leases under way are played to their end; interrupt again to give them back")
        self._leave(again)

    def _leave(self, at_once: bool) -> None:
        self._leaving.set()
        for attachment in self._attachments.values():
            attachment.detach(at_once)


class Report:
    """What was played, a line every few seconds."""

    def __init__(self, say_line: Callable[[str], None] | None = None) -> None:
        self._say = say_line or say
        self._leases = 0
        self._rewards: list[float] = []
        """Since the last line."""
        self._total = (0, 0.0)
        self._failed = 0
        self._cut = 0
        """Leases that were closed before their episodes had ended."""
        self._reason = ""
        self._next = 0.0

    def closed(self, closed: Closed) -> None:
        """A lease is over."""
        if closed.cut:
            self._cut += 1
            return
        self._leases += 1
        self._rewards += closed.rewards
        self._total = self._total[0] + len(closed.rewards), self._total[1] + sum(closed.rewards)
        self._failed += len(closed.failures)
        reason = next(iter(closed.failures), self._reason)
        if reason != self._reason:
            self._reason = reason
            self._say(f"lease {closed.lease}: {len(closed.failures)} episodes failed: {reason}")
        if time.monotonic() >= self._next and self._rewards:
            self._next = time.monotonic() + REPORT_S
            mean = sum(self._rewards) / len(self._rewards)
            self._say(
                f"{self._leases} leases played; mean reward of the last {len(self._rewards)} episodes: {mean:.3f}"
            )
            self._rewards.clear()

    def end(self) -> None:
        count, total = self._total
        mean = f", mean reward {total / count:.3f}" if count else ""
        self._say(
            f"detached after {self._leases} leases: {count} episodes{mean}, {self._failed} failed; "
            f"{self._cut} leases were cut short"
        )


def _shares(workers: int, rollouters: int) -> list[int]:
    """Workers per rollouter, as even as can be."""
    return [workers // rollouters + (index < workers % rollouters) for index in range(rollouters)]


def _described(shares: Mapping[str, int], rollouters: int) -> str:
    workers = sum(shares.values())
    text = f"{_counted(workers, 'worker')} for {_counted(len(shares), 'rollouter')}"
    left_out = rollouters - len(shares)
    return f"{text}; {left_out} more get none, raise --workers to serve them" if left_out else text


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def say(line: str) -> None:
    print(line, flush=True)
