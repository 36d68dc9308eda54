"""One attached process as its rollouter sees it: what it plays, what it says, and that it lives."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import WSMsgType, web

from streamrl.envs.attach.protocol import (
    MAX_CALLS,
    OUTBOX_MESSAGES,
    Answer,
    Bye,
    Call,
    Cancel,
    Closed,
    Detach,
    Done,
    Failed,
    Finish,
    Fork,
    FromProcess,
    FromRollouter,
    Hello,
    Leased,
    PlayedTask,
    Refused,
    TurnReward,
    decode_from_process,
    encode,
    reward_of,
    task_in_json,
)
from streamrl.envs.environment import Environment, Reward, Task
from streamrl.envs.episode import ContextFull
from streamrl.envs.failure import FailedElsewhere, Failure
from streamrl.envs.group import GroupResult, GroupRunner
from streamrl.envs.hooks import Hooks
from streamrl.envs.session import Session
from streamrl.errors import EnvironmentFailed, StreamRLError, WireError
from streamrl.types import Lease

log = logging.getLogger(__name__)


MOST_FAILED = 5
"""Groups of one process that may fail in a row before it is sent away. Their prompts are issued again, unblamed."""


class AgentGone(StreamRLError):
    """A process that played a lease is not there any more."""

    def __init__(self, reason: str, lost: bool = True) -> None:
        super().__init__(reason)
        self.lost = lost
        """False: it gave its leases back in good order."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.lost)


@dataclass
class Seat:
    """One episode that is played elsewhere."""

    sessions: dict[int, Session]
    """By branch number."""
    result: asyncio.Future[Reward]


class PlayedLease:
    """A lease whose episodes an attached process plays: they wait here for what it says."""

    def __init__(self, lease: Lease, post: Callable[[FromRollouter], None], own_tasks: bool) -> None:
        self.lease = lease
        self.seats: list[Seat] = []
        self.env = ""
        """Name in the metrics that a process with tasks of its own gives this one."""
        self._post = post
        self._own_tasks = own_tasks
        self._task: PlayedTask | None = None

    async def episode(self, task: Task, policy: Session) -> Reward:
        """One of the lease's episodes: the lease is sent once the last of them is here."""
        if not self._own_tasks and self._task is None:
            self._task = task_in_json(task)
        seat = Seat({0: policy}, asyncio.get_running_loop().create_future())
        self.seats.append(seat)
        if len(self.seats) == self.lease.group_size:
            keys = [each.sessions[0].api_key for each in self.seats]
            lease = self.lease
            self._post(Leased(lease.id, lease.prompt, lease.attempt, lease.deadline_s, keys, self._task))
        return await seat.result


_PLAYED: contextvars.ContextVar[PlayedLease] = contextvars.ContextVar("streamrl_played_lease")


async def play_elsewhere(task: Task, policy: Session) -> Reward:
    """The ``episode`` of an environment that an attached process plays."""
    return await _PLAYED.get().episode(task, policy)


def own_environment(agent: str) -> Environment:
    """The environment of a process that brings its own tasks: only their names are known here."""
    return Environment(agent, play_elsewhere, hooks=Hooks(env_of=lambda task: _PLAYED.get().env or agent))


class Agent:
    """The process behind one WebSocket. ``runner`` runs groups whose episode is ``play_elsewhere``."""

    def __init__(
        self, hello: Hello, socket: web.WebSocketResponse, runner: GroupRunner, changed: Callable[[], None]
    ) -> None:
        """``changed`` is called when a worker may have become free."""
        self.name = hello.agent
        self.workers = hello.workers
        self.own_tasks = hello.own_tasks
        self.taken = 0
        """Workers whose lease is played, or about to be, or whose group is being delivered."""
        self.playing = 0
        """Those of them whose lease would be lost with the process."""
        self.lost_leases = 0
        """Those that were, once it is gone."""
        self.draining = False
        """It takes no more leases."""
        self._failed = 0
        """Groups that failed in a row."""
        self._socket = socket
        self._runner = runner
        self._changed = changed
        self._gone: asyncio.Future[AgentGone] = asyncio.get_running_loop().create_future()
        self._leases: dict[int, PlayedLease] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._outbox: asyncio.Queue[FromRollouter] = asyncio.Queue(OUTBOX_MESSAGES)
        self._is_behind = False
        """It was sent less than was posted."""

    @property
    def free(self) -> int:
        """Workers that could take a lease now."""
        return 0 if self.draining or self._gone.done() else self.workers - self.taken

    # Leases -----------------------------------------------------------------------------------------------------------

    def take(self) -> None:
        """A worker is about to play a lease: ``run_group``, then ``release``."""
        self.taken += 1
        self.playing += 1

    async def run_group(self, lease: Lease) -> GroupResult:
        """As ``GroupRunner.run_group``, for a worker that was taken. Raises ``AgentGone``."""
        context = contextvars.copy_context()
        context.run(_PLAYED.set, PlayedLease(lease, self.post, self.own_tasks))
        self._leases[lease.id] = context[_PLAYED]
        group = asyncio.get_running_loop().create_task(self._runner.run_group(lease), context=context)
        closed = Closed(lease.id, [], [], cut="its deadline passed, or the run ended")
        try:
            ends: set[asyncio.Future[Any]] = {group, self._gone}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not group.done():
                gone = self._gone.result()
                raise AgentGone(str(gone), gone.lost)
            result = group.result()
            closed = _closed(lease, result)
            self._judge(result)
            return result
        finally:
            group.cancel()
            await asyncio.gather(group, return_exceptions=True)
            del self._leases[lease.id]
            self.playing -= 1
            self.post(closed)

    def _judge(self, result: GroupResult) -> None:
        """A process whose groups keep failing would hand the same prompts round for ever."""
        self._failed = self._failed + 1 if result.group is None else 0
        if self._failed == MOST_FAILED:
            last = result.failures[-1].reason if result.failures else "no trajectory finished"
            self.end(Bye("refused", f"{MOST_FAILED} groups in a row failed; last: {last}"[:1_000]))

    def release(self) -> None:
        """A taken worker is free: what it played was delivered."""
        self.taken -= 1
        if self.draining and not self.taken:
            self.post(Bye("detached", "no lease is left"))
        self._changed()

    def end(self, bye: Bye) -> None:
        """Say good-bye and hang up."""
        self.draining = True
        self.post(bye)

    def leave(self, gone: AgentGone) -> None:
        """Whatever it plays is over; the first reason counts."""
        if not self._gone.done():
            self.lost_leases = self.playing if gone.lost else 0
            self._gone.set_result(gone)

    # Conversation -----------------------------------------------------------------------------------------------------

    def post(self, message: FromRollouter) -> None:
        """Send once what was posted before is sent. On the event loop only."""
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self._is_behind = True
            self.leave(AgentGone(f"agent {self.name} did not read {OUTBOX_MESSAGES} messages"))

    async def listen(self) -> None:
        """Until the process hangs up. Raises ``WireError`` for a message that breaks the protocol."""
        try:
            async for message in self._socket:
                if message.type is not WSMsgType.TEXT:
                    raise WireError(f"expected a text message, got {message.type.name.lower()}")
                self._receive(decode_from_process(message.data))
        finally:
            self.leave(AgentGone(f"the connection to agent {self.name} ended"))
            if calls := list(self._calls.values()):
                for call in calls:
                    call.cancel()
                await asyncio.wait(calls)

    async def write(self) -> None:
        """Send what is posted, up to a good-bye."""
        while True:
            message = await self._outbox.get()
            try:
                await self._socket.send_str(encode(message))
            except ConnectionError:
                return  # the reader sees its end as well
            except WireError as error:
                log.error("for agent %s: %s", self.name, error)
                message = Bye("refused", "the rollouter has an answer that cannot be sent; its log has more")
                await self._socket.send_str(encode(message))
            if isinstance(message, Bye) or self._is_behind:
                await self._socket.close()
                return

    def _receive(self, message: FromProcess) -> None:
        match message:
            case Call():
                if message.id in self._calls or len(self._calls) >= MAX_CALLS:
                    raise WireError(f"call {message.id}: expected a new id and at most {MAX_CALLS} calls under way")
                call = self._calls[message.id] = asyncio.create_task(self._call(message))
                call.add_done_callback(lambda _: self._calls.pop(message.id))  # also where it never began
            case Cancel():
                if message.id in self._calls:
                    self._calls[message.id].cancel()
            case Done() | Failed() | Finish() | Fork() | TurnReward():
                if (seat := self._seat(message.lease, message.episode)) is not None:
                    if isinstance(message, Done) and self.own_tasks:
                        self._leases[message.lease].env = message.env
                    _apply(message, seat)
            case Detach():
                self._detach(message.at_once)
            case Hello():
                raise WireError("expected one hello only")

    def _detach(self, at_once: bool) -> None:
        self.draining = True
        if at_once:
            self.leave(AgentGone(f"agent {self.name} gave it back", lost=False))
        if not self.taken:
            self.post(Bye("detached", "no lease is left"))

    def _seat(self, lease: int, episode: int) -> Seat | None:
        """None where the lease is over; what comes late changes nothing."""
        played = self._leases.get(lease)
        if played is None:
            return None
        if episode >= len(played.seats):
            raise WireError(f"lease {lease} has episodes 0 to {len(played.seats) - 1}, got {episode}")
        return played.seats[episode]

    async def _call(self, call: Call) -> None:
        self.post(await self._sampled(call))

    async def _sampled(self, call: Call) -> Answer | Refused:
        try:
            seat = self._seat(call.lease, call.episode)
            if seat is None:
                return Refused(call.id, "ended", "the lease is over")
            result = await getattr(_session(seat, call.branch), call.method)(**call.args)
        except ContextFull as error:
            return Refused(call.id, "context_full", str(error))
        except (ValueError, TypeError) as error:
            return Refused(call.id, "value", str(error))
        except RuntimeError as error:
            return Refused(call.id, "ended", str(error))
        except Exception as error:
            log.error("a call of agent %s could not be sampled", self.name, exc_info=error)
            return Refused(call.id, "engine", str(error) or type(error).__name__)
        return Answer(call.id, {"text": result} if isinstance(result, str) else msgspec.to_builtins(result))


def _session(seat: Seat, branch: int) -> Session:
    session = seat.sessions.get(branch)
    if session is None:
        raise ValueError(f"no branch {branch}; there are {', '.join(map(str, seat.sessions))}")
    return session


def _apply(message: Done | Failed | Finish | Fork | TurnReward, seat: Seat) -> None:
    """What was said of an episode; what cannot be done fails the episode."""
    if seat.result.done():
        return
    try:
        match message:
            case Done():
                seat.result.set_result(reward_of(message))
            case Finish():
                _session(seat, message.branch).finish(reward_of(message))
            case Fork():
                if message.number in seat.sessions:
                    raise ValueError(f"there is a branch {message.number} already")
                seat.sessions[message.number] = _session(seat, message.parent).branch()
            case TurnReward():
                _session(seat, message.branch).reward(message.value)
            case Failed():
                seat.result.set_exception(_failure(message))
    except (ValueError, RuntimeError, EnvironmentFailed) as error:
        seat.result.set_exception(FailedElsewhere(Failure(str(error), "")))


def _failure(message: Failed) -> Exception:
    if message.context_full:
        return ContextFull(message.reason)
    return FailedElsewhere(Failure(message.reason, message.traceback))


def _closed(lease: Lease, result: GroupResult) -> Closed:
    group = result.group
    rewards = {each.episode: each.reward for each in group.trajectories} if group is not None else {}
    reasons = [each.reason for each in result.failures] + [each.reason for each in result.stragglers]
    return Closed(lease.id, list(rewards.values()), reasons)
