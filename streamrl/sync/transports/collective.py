"""Transport ``collective``: one gloo broadcast per bucket, to all members of a process group of their own.

::

    sender                                                 receiver
    set receiver/… ?                  store (a file)   ←   register: one entry for each process
    begin: plan of the version    →
    offer: broadcast in a thread  ═══ gloo, loopback ═══►  fetch: broadcast into its place
    anything asked for alone      ═══ zmq            ═══►  fetch: pulled

The group is kept from version to version. It is made anew only when other processes take part than before, or when it
broke because one of them died: then everybody pulls the rest of that version, and nobody fails for another's sake.
Retries, late joiners and members that had not registered when the version began pull as well.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import msgspec
import torch.distributed as dist

from streamrl.errors import WeightSyncError
from streamrl.sync.arena import Arena
from streamrl.sync.manifest import Manifest
from streamrl.sync.staging import as_tensor
from streamrl.sync.transport import BucketId, Receiver, Sender
from streamrl.sync.transports.zmq_pull import ZmqReceiver, ZmqSender

PATIENCE_S = 10.0
"""That a group may take to come together, and then for each bucket. Who waited in vain pulls."""


class Plan(msgspec.Struct, frozen=True):
    """Who takes part in the broadcasts of one version; ranks from 1 on, in this order, after the sender."""

    generation: int = 0
    tokens: tuple[str, ...] = ()
    """What each receiver registered as: of two processes with one name only one is meant."""


class Group:
    """One process group and the thread that works for it. ``broken`` once anything failed: it is of no use then."""

    def __init__(self, store: dist.Store, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.broken = False
        self._closed = False
        self._store = store
        self._rank = rank
        self._group: dist.ProcessGroupGloo | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="weights-broadcast")
        self._worker.submit(self._guarded, self._connect)

    def broadcast(self, memory: memoryview, wanted: Callable[[], bool]) -> Future[bool]:
        """Take part in the next broadcast, unless nobody wants it any more; whether it came about."""

        def take_part() -> None:
            if not wanted():
                raise RuntimeError("not wanted any more")
            assert self._group is not None
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            self._group.broadcast([as_tensor(memory)], options).wait()  # type: ignore[attr-defined]

        return self._worker.submit(self._guarded, take_part)

    def close(self) -> None:
        """Leave, without waiting; idempotent. The thread ends with the operation under way.

        Then the connections close, which at once ends what the others wait for.
        """
        self.broken = True
        if not self._closed:
            self._closed = True
            self._worker.submit(self._leave)
            self._worker.shutdown(wait=False)

    def _leave(self) -> None:
        self._group = None

    def _connect(self) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # Nothing but its time limit ends an operation that waits for a process which is there and does not join.
        options._timeout = timedelta(seconds=PATIENCE_S)
        # By default gloo binds to whatever the host name resolves to, which may be public or not resolve at all.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        store = dist.PrefixStore(f"group-{self.plan.generation}", self._store)
        self._group = dist.ProcessGroupGloo(store, self._rank, 1 + len(self.plan.tokens), options)

    def _guarded(self, work: Callable[[], None]) -> bool:
        if self.broken:
            return False
        try:
            work()
        except RuntimeError:  # a peer is gone or did not come: torch has no other class for it
            self.broken = True
        return not self.broken


class CollectiveSender(Sender):
    name = "collective"

    def __init__(self, arena: Arena, endpoint: str) -> None:
        self._pull = ZmqSender(arena, endpoint)
        path = f"{endpoint.removeprefix('ipc://')}-group-{os.urandom(4).hex()}"
        self.address = msgspec.json.encode([self._pull.address, path]).decode()
        self._path = Path(path)
        self._store = _open_store(path)
        self._members: set[str] = set()
        self._group: Group | None = None
        self._generation = 0
        self._wanted: set[int] = set()
        """Versions that are broadcast."""

    async def run(self) -> None:
        await self._pull.run()

    def set_members(self, names: set[str]) -> None:
        self._members = set(names)

    async def begin(self, version: BucketId) -> None:
        await self._pull.begin(version)
        if version.private or version.attempt:
            return
        tokens = await asyncio.to_thread(self._registered, sorted(self._members))
        if self._group is None or self._group.broken or self._group.plan.tokens != tokens:
            self._regroup(tokens)
        self._wanted.add(version.version)
        plan = self._group.plan if self._group else Plan()
        await asyncio.to_thread(self._store.set, _plan_key(version), msgspec.json.encode(plan).decode())

    async def offer(self, bucket: BucketId, payload: memoryview) -> None:
        await self._pull.offer(bucket, payload)
        if self._group is not None and bucket.version in self._wanted and not (bucket.private or bucket.attempt):
            self._group.broadcast(payload, lambda: bucket.version in self._wanted)

    async def complete(self, version: BucketId) -> None:
        """Each bucket is there as soon as it is offered."""

    def withdraw(self, version: int) -> None:
        self._pull.withdraw(version)
        self._wanted.discard(version)

    def close(self) -> None:
        self._pull.close()
        if self._group is not None:
            self._group.close()
            self._group = None
        self._path.unlink(missing_ok=True)

    def _registered(self, members: list[str]) -> tuple[str, ...]:
        keys = [_member_key(member) for member in members]
        return tuple(self._store.get(key).decode() for key in keys if self._store.check([key]))

    def _regroup(self, tokens: tuple[str, ...]) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        if tokens:
            self._generation += 1
            self._group = Group(self._store, Plan(self._generation, tokens), 0)


class CollectiveReceiver(Receiver):
    in_place = False

    def __init__(self, address: str, manifest: Manifest, *, member: str, timeout_s: float) -> None:
        pull, path = msgspec.json.decode(address, type=tuple[str, str])
        if not os.path.exists(path):
            raise WeightSyncError(f"{path} is missing: the publisher is gone, or on another host")
        self._pull = ZmqReceiver(pull, manifest, timeout_s=timeout_s)
        self._store = _open_store(path)
        self._token = f"{member}#{os.urandom(8).hex()}"
        self._group: Group | None = None
        self._planned: tuple[str, int] | None = None
        """Session and version that the group was looked up for."""
        self._store.set(_member_key(member), self._token)

    def memory(self, slot: int) -> memoryview:
        return self._pull.memory(slot)

    async def fetch(self, bucket: BucketId, out: memoryview) -> None:
        group = None if bucket.private or bucket.attempt else await self._group_of(bucket)
        if group is None or group.broken or not await self._receive(group, out):
            await self._pull.fetch(bucket, out)

    async def _receive(self, group: Group, out: memoryview) -> bool:
        receiving = asyncio.wrap_future(group.broadcast(out, lambda: True))
        try:
            return await asyncio.shield(receiving)
        except asyncio.CancelledError:
            group.broken = True
            await asyncio.wait([receiving])  # it may write to ``out`` up to its end
            raise

    async def _group_of(self, bucket: BucketId) -> Group | None:
        if self._planned != (bucket.session, bucket.version) or bucket.index == 0:
            plan = await asyncio.to_thread(self._look_up, _plan_key(bucket))
            self._planned = bucket.session, bucket.version
            if self._group is not None and self._group.plan != plan:
                self._group.close()
                self._group = None
            if self._group is None and self._token in plan.tokens:
                self._group = Group(self._store, plan, 1 + plan.tokens.index(self._token))
        return self._group

    def _look_up(self, key: str) -> Plan:
        """That of nobody where the version was never begun: a store would wait for it."""
        return msgspec.json.decode(self._store.get(key), type=Plan) if self._store.check([key]) else Plan()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        self._pull.close()


def _open_store(path: str) -> dist.Store:
    store = dist.FileStore(path)
    store.set_timeout(timedelta(seconds=PATIENCE_S))  # else it looks five minutes for a file that is gone
    return store


def _member_key(member: str) -> str:
    return f"receiver/{member}"


def _plan_key(version: BucketId) -> str:
    return f"plan/{version.session}/{version.version}"
