"""One connection of an attached process to one rollouter: it plays the leases that come."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiohttp import ClientError, ClientSession, ClientWebSocketResponse, WSMsgType, WSServerHandshakeError

from streamrl.envs.attach.policy import Line, RemotePolicy, Seat
from streamrl.envs.attach.protocol import (
    HEARTBEAT_S,
    MESSAGE_BYTES,
    OUTBOX_MESSAGES,
    PATH,
    PROTOCOL,
    Answer,
    Bye,
    Closed,
    Detach,
    Done,
    Failed,
    FromProcess,
    FromRollouter,
    Hello,
    Leased,
    Refused,
    Welcome,
    decode_from_rollouter,
    encode,
)
from streamrl.envs.environment import Environment, Task
from streamrl.envs.episode import is_context_full
from streamrl.envs.failure import failure_of, one_line, timed_out
from streamrl.envs.guard import Expired, bounded, left_behind
from streamrl.envs.returned import checked_reward
from streamrl.envs.split import Split
from streamrl.envs.threads import EpisodeOver
from streamrl.errors import ConfigError, EnvironmentFailed, StreamRLError, WireError


class ConnectionLost(StreamRLError):
    """The rollouter is not there (any more); another one may take its place."""


@dataclass(frozen=True)
class Played:
    """Environments of this process, and whose tasks they are played on."""

    environment: Environment
    own_tasks: bool
    """The tasks are made here; else they come with the leases."""


@dataclass(frozen=True)
class Playing:
    """A lease under way."""

    task: Task
    episodes: list[asyncio.Task[None]]


class Attachment:
    """``run`` once. ``on_welcome`` and ``on_closed`` are called with what the rollouter says."""

    def __init__(
        self,
        url: str,
        token: str,
        played: Played,
        workers: int,
        on_welcome: Callable[[Welcome], None],
        on_closed: Callable[[Closed], None],
    ) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._played = played
        self._workers = workers
        self._on_welcome = on_welcome
        self._on_closed = on_closed
        self._outbox: asyncio.Queue[str] = asyncio.Queue(OUTBOX_MESSAGES)
        self._line = Line(self._post)
        self._leases: dict[int, Playing] = {}
        self._ending: set[asyncio.Task[None]] = set()
        """Episodes of closed leases that have not ended yet."""
        self._writer: asyncio.Task[None] | None = None
        self._split: Split | None = None
        self._timeout_s = 0.0

    def detach(self, at_once: bool) -> None:
        """Take no more leases; ``run`` returns once those under way are played, or now ``at_once``."""
        self._post(Detach(at_once))

    async def run(self, http: ClientSession) -> Bye:
        """Play until either side says good-bye; what the rollouter said.

        Raises ``ConnectionLost`` where it vanishes, ``ConfigError`` where it refuses the token or the process, and
        ``EnvironmentFailed`` where too much user code hangs here for good.
        """
        try:
            async with http.ws_connect(
                self._url + PATH,
                headers={"Authorization": f"Bearer {self._token}"},
                heartbeat=HEARTBEAT_S,
                max_msg_size=MESSAGE_BYTES,
            ) as socket:
                return await self._converse(socket)
        except WSServerHandshakeError as error:
            if error.status == 401:
                raise ConfigError(f"{self._url} does not know this token; take the one in RUN/gateways/token") from None
            raise ConnectionLost(f"{self._url} answered with status {error.status}") from error
        except (ClientError, OSError) as error:
            raise ConnectionLost(f"{self._url}: {error}") from error

    # Conversation -----------------------------------------------------------------------------------------------------

    async def _converse(self, socket: ClientWebSocketResponse) -> Bye:
        name = self._played.environment.name
        await socket.send_str(encode(Hello(PROTOCOL, name, self._workers, self._played.own_tasks)))
        writer = self._writer = asyncio.create_task(self._write(socket))
        reader = asyncio.create_task(self._read(socket))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if writer.cancelled():
                raise ConnectionLost(f"{self._url} did not read {OUTBOX_MESSAGES} messages")
            return await reader
        finally:
            episodes = (task for playing in self._leases.values() for task in playing.episodes)
            running = [writer, reader, *episodes, *self._ending]
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            for task in running:
                if not task.cancelled():
                    task.exception()  # the first one was raised above

    def _post(self, message: FromProcess) -> None:
        """Send after what was posted before. Raises ``WireError`` for what cannot be sent."""
        text = encode(message)
        try:
            self._outbox.put_nowait(text)
        except asyncio.QueueFull:
            if self._writer is not None:
                self._writer.cancel()  # which ends the conversation

    async def _write(self, socket: ClientWebSocketResponse) -> None:
        while True:
            text = await self._outbox.get()
            try:
                await socket.send_str(text)
            except ConnectionError:
                return  # the reader sees its end as well, and what was said before it

    async def _read(self, socket: ClientWebSocketResponse) -> Bye:
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                raise WireError(f"{self._url}: expected a text message, got {message.type.name.lower()}")
            decoded = decode_from_rollouter(message.data)
            if isinstance(decoded, Bye):
                return decoded
            self._receive(decoded)
            left_behind.check()
        raise ConnectionLost(f"{self._url} hung up")

    def _receive(self, message: FromRollouter) -> None:
        match message:
            case Welcome():
                self._timeout_s = message.timeout_s
                self._split = Split(self._played.environment, message.seed, message.held_out)
                self._on_welcome(message)
            case Leased():
                self._begin(message)
            case Answer() | Refused():
                self._line.answered(message)
            case Closed():
                self._close(message)

    def _close(self, closed: Closed) -> None:
        playing = self._leases.pop(closed.lease, None)
        if playing is not None:
            for episode in playing.episodes:
                self._ending.add(episode)
                episode.add_done_callback(self._ending.discard)
                episode.cancel()
            if self._played.own_tasks and closed.rewards:
                self._tell(playing.task, closed.rewards)
        self._on_closed(closed)

    def _tell(self, task: Task, rewards: Sequence[float]) -> None:
        environment = self._played.environment
        try:
            environment.played(task, rewards)
        except Exception as error:  # user code may raise anything; it is named
            raise EnvironmentFailed(f"{environment.name}: played raised {one_line(error)}") from error

    # Episodes ---------------------------------------------------------------------------------------------------------

    def _begin(self, lease: Leased) -> None:
        seats = [
            Seat(self._line, lease.lease, number, f"{self._url}/v1", key, itertools.count(1))
            for number, key in enumerate(lease.keys)
        ]
        try:
            task = self._task(lease)
        except (EnvironmentFailed, ConfigError) as error:
            for seat in seats:
                self._post(seat.failed(str(error)))
            return
        episodes = [asyncio.create_task(self._episode(task.copy(), seat)) for seat in seats]
        self._leases[lease.lease] = Playing(task, episodes)

    def _task(self, lease: Leased) -> Task:
        if self._played.own_tasks:
            assert self._split is not None, "a rollouter welcomes before it sends leases"
            return self._split.train(lease.prompt)
        if lease.task is None:
            raise EnvironmentFailed("the lease came without a task")
        return Task(lease.task.prompt, lease.task.answer, lease.task.metadata, lease.task.index)

    async def _episode(self, task: Task, seat: Seat) -> None:
        outcome = await self._outcome(task, seat)
        try:
            self._post(outcome)
        except WireError as error:
            self._post(seat.failed(f"what became of the episode cannot be sent: {error}"))

    async def _outcome(self, task: Task, seat: Seat) -> Done | Failed:
        """What became of one episode. Raises only ``CancelledError``, when it is cancelled itself."""
        environment = self._played.environment
        try:
            name = environment.name_of(task) if self._played.own_tasks else ""
            timeout_s = self._timeout_s - _ahead(self._timeout_s)
            returned = await bounded(environment.episode(task, RemotePolicy(seat)), timeout_s)
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            failure = failure_of(error, "cancelled by itself: user code awaited something that was cancelled")
        except Expired as error:
            failure = timed_out(error.__cause__, self._timeout_s)
        except (Exception, SystemExit, EpisodeOver) as error:  # noqa: BLE001 user code may raise anything
            if is_context_full(error):
                return seat.failed(str(error), context_full=True)
            failure = failure_of(error)
        else:
            return _worth(seat, returned, name)
        return seat.failed(failure.reason, failure.traceback)


def _worth(seat: Seat, returned: object, name: str) -> Done | Failed:
    try:
        return seat.done(checked_reward(returned), name)
    except EnvironmentFailed as error:
        return seat.failed(str(error))


def _ahead(timeout_s: float) -> float:
    """Seconds by which an episode times out here before it does in the rollouter, which cannot name the user's line."""
    return min(1.0, 0.1 * timeout_s)
