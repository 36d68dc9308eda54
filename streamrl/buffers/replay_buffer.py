"""The replay buffer: ready groups, and the batch that the trainer gets from them (C1 guarantee, C2, C4).

Pure like the ledger that it drives: time is an argument, nothing is sent, payloads are held unread. Every change is
written down before it happens (``records.py``), so that ``restore`` makes the same buffer from a dead one's journal.
``buffers/queue/server.py`` puts it on a socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from streamrl import staleness
from streamrl.buffers import records
from streamrl.buffers.held import Held, PutStatus, check_delivery
from streamrl.buffers.journal.writer import Position
from streamrl.buffers.lease import Delivery, Refund
from streamrl.buffers.ledger import Ledger
from streamrl.buffers.offer import AdvantageFn, Offer, Planner, PriorityFn, WeightFn
from streamrl.buffers.records import Record, WriteDown
from streamrl.buffers.room import Room
from streamrl.buffers.step_statistics import StepStatistics, has_zero_variance, lag_statistics
from streamrl.buffers.wire.messages import GroupMeta, InArena
from streamrl.buffers.wire.payload import Payload
from streamrl.errors import ConfigError, StreamRLError, WireError
from streamrl.schema import Config
from streamrl.staleness import OnStale
from streamrl.types import Lease

PayloadOf = Callable[[Position], Payload | None]


class ReplayBuffer:
    """Ready and handed-out groups, at most ``buffer.max_bytes`` together with what leases promise.

    Raises ``ConfigError`` for settings under which a batch could never be filled.
    """

    def __init__(
        self,
        config: Config,
        advantage_fn: AdvantageFn,
        weight_fn: WeightFn,
        priority_fn: PriorityFn | None = None,
        write_down: WriteDown = lambda record, payload: None,
    ) -> None:
        self.config = config
        self.on_stale = OnStale(config.on_stale)
        self.ledger = Ledger(
            groups_per_step=config.group.per_step,
            max_lag=config.max_lag,
            group_size=config.group.size,
            lease_timeout_s=config.buffer.lease_timeout_s,
            max_attempts=config.buffer.max_attempts,
            epochs_per_group=config.buffer.epochs_per_group,
            target_ess=config.staleness.target_ess,
        )
        self.room = Room(config)
        self.offer: Offer | None = None
        self.write_down = write_down
        self.on_close: Callable[[int], None] = lambda lease: None
        """Told of every lease that is closed: its payload is not needed any more, wherever it lies."""
        self.on_evict: Callable[[Lease], None] = lambda lease: None
        self._planner = Planner(config, advantage_fn, weight_fn)
        self._priority = priority_fn or (lambda group: 0.0)
        self._held: dict[int, Held] = {}
        self._ready: dict[int, Held] = {}
        """Those of ``_held`` that are not handed out."""
        self._offers = 0
        self._spent: list[tuple[int, Position]] = []
        """Step and record of consumed groups that the trainer may yet go behind."""
        self._statistics = StepStatistics()
        self._evicted = 0
        if config.model.max_length > config.trainer.token_budget:
            raise ConfigError(
                f"trainer.token_budget={config.trainer.token_budget} cannot hold one trajectory of "
                f"model.max_length={config.model.max_length} tokens; raise it to at least that"
            )

    # Leases -----------------------------------------------------------------------------------------------------------

    @property
    def grantable(self) -> int:
        """Leases that both pacing and the byte limit allow now."""
        return min(self.ledger.credits, self.room.leases)

    def lease(self, holder: str, count: int, now: float, asked: str = "") -> list[Lease]:
        """Up to ``count`` leases for ``holder``; ``asked`` names the request, for when it comes again."""
        count = min(count, self.grantable)
        if not count:
            return []
        granted = records.Granted(holder, count, self.room.promise, asked)
        self.write_down(granted, None)
        return self._grant(granted, now)

    def reserve(self, lease_id: int, nbytes: int) -> bool:
        """Keep room for a payload that takes more than its lease promised; False while there is none.

        Raises ``ConfigError`` where a batch of such groups could never be held.
        """
        if not self.ledger.is_in_flight(lease_id):
            return True  # its put will be told
        if not self.room.fits(lease_id, nbytes):
            return False
        self.write_down(records.Reserved(lease_id, nbytes), None)
        self.room.reserve(lease_id, nbytes)
        return True

    def fail(self, lease_id: int) -> bool:
        """The holder gave up; False when the lease is not in flight (any more)."""
        if not self.ledger.is_in_flight(lease_id):
            return False
        self._refund([lease_id], Refund.FAILED)
        return True

    def expire(self, now: float) -> list[Lease]:
        """Refund every lease in flight whose deadline has passed."""
        return self._refund(self.ledger.overdue(now), Refund.EXPIRED)

    def holder_lost(self, holder: str) -> list[Lease]:
        """A holder died: its leases in flight are refunded, and its groups whose payload was in its memory too.

        Groups that a trainer holds already stay: whether it can read them is for it to say (``drop``).
        """
        unread = {lease for lease, held in self._ready.items() if held.reference is not None}
        leases = [lease for lease, record in self.ledger.records.items() if record.holder == holder]
        return self.lose(lease for lease in leases if lease in unread or self.ledger.is_in_flight(lease))

    def lose(self, lease_ids: Iterable[int], reason: Refund = Refund.LOST) -> list[Lease]:
        """Refund leases that their holder can no longer deliver, or whose payload nobody can read."""
        return self._refund(list(lease_ids), reason)

    def publish(self, version: int) -> None:
        """Every live rollouter has committed ``version``."""
        self.write_down(records.Published(version), None)
        self.ledger.publish(version)

    # Groups -----------------------------------------------------------------------------------------------------------

    def put(self, group: GroupMeta, payload: Payload | None = None, reference: InArena | None = None) -> PutStatus:
        """Take a delivered group. Raises ``WireError`` if it does not fit its lease, which then stays in flight."""
        record = self.ledger.find(group.lease)
        if record is not None:
            check_delivery(group, record.lease, self.config.model.max_length)
        outcome = self.ledger.judge(group.lease)
        if outcome is not Delivery.ACCEPTED or record is None:
            self.ledger.deliver(group.lease)  # counts it
            return PutStatus(outcome.value)
        if reference is None and group.nbytes > (promised := self.room.promised_to(group.lease)):
            raise WireError(
                f"group of lease {group.lease}: expected a payload of at most {promised} bytes, as promised to it, got "
                f"{group.nbytes}; reserve the room first"
            )
        if self.config.group.drop_zero_variance and has_zero_variance(group):
            self._statistics.add(group)
            self._refund([group.lease], Refund.FILTERED)
            return PutStatus.FILTERED
        if self.on_stale is OnStale.WAIT and group.oldest_version < record.granted_version:
            self._statistics.add(group)
            self.evict(group.lease)
            return PutStatus.STALE
        arrived = records.Arrived(group, reference, self._priority(group))
        position = self.write_down(arrived, payload)
        self._statistics.add(group)
        self._arrive(arrived, payload, position)
        return PutStatus.ACCEPTED

    def held(self, lease_id: int) -> Held | None:
        """A ready or handed-out group."""
        return self._held.get(lease_id)

    def next_batch(self, step: int, version: int, ranks: int) -> Offer | None:
        """The batch of ``step`` for a trainer at ``version``, or ``None`` while it has to wait for groups.

        Highest priority first, then oldest. Re-checks every group against the bound (the guarantee of C1) whatever
        pacing did before. Raises ``StreamRLError`` while another step is handed out and not acknowledged.
        """
        if self.offer is not None:
            raise StreamRLError(
                f"batch {step} was asked for while step {self.offer.step} is not acknowledged; "
                "acknowledge it or hand it back"
            )
        self._evict_stale(version)
        per_step = self.config.group.per_step
        if len(self._ready) < per_step:
            return None
        ready = self._ready
        order = sorted(ready, key=lambda lease: (-ready[lease].priority, ready[lease].oldest, lease))
        chosen, left = order[:per_step], order[per_step:]
        if self.on_stale is OnStale.WAIT:
            remaining = self.ledger.granted_versions() + [ready[lease].oldest for lease in left]
            if not staleness.may_hand_out(version, self.config.max_lag, per_step, remaining):
                return None
        handed_out = records.HandedOut(step, version, ranks, chosen)
        self.write_down(handed_out, None)
        self.ledger.hand_out(step, chosen)
        return self._make_offer(handed_out, self._offers + 1)

    def acknowledge(self, step: int, attempt: int, durable_step: int, ess: float = 0.0, tokens: int = 0) -> int:
        """The optimizer step is done: number of consumed groups; 0 when it was acknowledged before.

        The journal may forget the payloads of steps up to ``durable_step``: no restart of the trainer goes behind it.
        ``ess`` over ``tokens`` trained tokens steers the leases where ``staleness.target_ess`` is set.
        Raises ``StreamRLError`` for a step that is not handed out, or for an offer that was handed back meanwhile.
        """
        offer = self.offer
        if offer is not None and offer.step == step and offer.attempt != attempt:
            raise StreamRLError(
                f"step {step} was acknowledged for offer {attempt}, but its groups were offered again as "
                f"{offer.attempt}: buffer.acknowledge_timeout_s ran out, or the trainer was thought dead"
            )
        if step not in self.ledger.steps:
            if step <= self.ledger.last_step:
                return 0
            raise StreamRLError(
                f"step {step} was acknowledged but is not handed out (any more): did it take longer than "
                f"buffer.acknowledge_timeout_s={self.config.buffer.acknowledge_timeout_s:g}?"
            )
        record = records.Acknowledged(step, durable_step, ess, tokens)
        self.write_down(record, None)
        return self._acknowledge(record)

    def drop(self, step: int, attempt: int, lease_ids: Iterable[int]) -> list[Lease]:
        """Handed-out groups whose payload nobody can read: refunded; the step goes on without them."""
        if self.offer is None or (self.offer.step, self.offer.attempt) != (step, attempt):
            raise StreamRLError(f"step {step} (offer {attempt}) is not handed out; its groups cannot be dropped")
        gone = [lease for lease in lease_ids if lease in self.ledger.steps[step]]
        if gone:
            self.write_down(records.Dropped(step, gone), None)
        return self._drop(step, gone)

    def hand_back(self) -> int:
        """The trainer died or is overdue: what it had not acknowledged is ready again. Number of groups."""
        if self.offer is None:
            return 0
        self.write_down(records.HandedBack(self.offer.step), None)
        return self._hand_back(self.offer.step)

    # Recovery ---------------------------------------------------------------------------------------------------------

    def snapshot(self) -> records.Snapshot:
        """Everything that is needed to go on from here; payloads by their position in the journal."""
        held = [records.HeldGroup(x.group, x.reference, x.position, x.priority) for x in self._held.values()]
        room = (self.room.promise, self.room.by_lease)
        snapshot = records.Snapshot(self.ledger.snapshot(), held, self._offers, self._spent, *room)
        if (offer := self.offer) is not None:
            leases = [group.lease for group in offer.groups]
            snapshot.offered = records.HandedOut(offer.step, offer.version, offer.ranks, leases)
            snapshot.dropped = [group for group in offer.groups if group.lease not in self._held]
        return snapshot

    def restore(self, record: Record, position: Position, payload_of: PayloadOf, now: float) -> None:
        """Apply one record of the journal, read at ``position``; ``payload_of`` reads the payload of a position."""
        match record:
            case records.Snapshot():
                self._restore_snapshot(record, payload_of, now)
            case records.Granted():
                self._grant(record, now)
            case records.Reserved():
                self.room.reserve(record.lease, record.nbytes)
            case records.Arrived():
                inline = record.reference is None and self.config.buffer.shards == 1
                self._arrive(record, payload_of(position) if inline else None, position)
            case records.Refunded():
                self._apply_refund(record.leases, record.reason)
            case records.HandedOut():
                self.ledger.hand_out(record.step, record.leases)
                self._make_offer(record, self._offers + 1)
            case records.HandedBack():
                self._hand_back(record.step)
            case records.Dropped():
                self._drop(record.step, record.leases)
            case records.Acknowledged():
                self._acknowledge(record)
            case records.Published():
                self.ledger.publish(record.version)

    @property
    def oldest_position(self) -> Position | None:
        """The oldest record whose payload is still needed."""
        held = [each.position for each in self._held.values() if each.position is not None]
        return min(held + [position for _, position in self._spent], default=None)

    # Numbers ----------------------------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, float]:
        """The ``buffer/`` and ``ledger/`` keys, now; handed-out groups count in ``ledger/ready`` only."""
        own = {
            "buffer/ready_groups": float(len(self._ready)),
            "buffer/bytes": float(self.room.held),
            "buffer/promised_bytes": float(self.room.promised),
        }
        return own | self.ledger.statistics()

    def summary(self) -> dict[str, int]:
        """``groups`` of ``summary.json``."""
        return self.ledger.summary()

    # Inside: the changes themselves, live or restored -----------------------------------------------------------------

    def _grant(self, granted: records.Granted, now: float) -> list[Lease]:
        leases = self.ledger.grant(granted.holder, granted.count, now, granted.nbytes, granted.asked)
        self.room.promise_to(leases)
        return leases

    def _arrive(self, arrived: records.Arrived, payload: Payload | None, position: Position | None) -> None:
        self.ledger.deliver(arrived.group.lease)
        self.room.settle(arrived.group.lease)
        self._hold(Held.of(arrived.group, payload, arrived.reference, position, arrived.priority))

    def _hold(self, held: Held) -> None:
        self._ready[held.group.lease] = self._held[held.group.lease] = held
        self.room.held += held.nbytes

    def _refund(self, lease_ids: Sequence[int], reason: Refund) -> list[Lease]:
        if not lease_ids:
            return []
        assert all(self.ledger.find(lease_id) for lease_id in lease_ids), f"not all of {lease_ids} are outstanding"
        self.write_down(records.Refunded(list(lease_ids), reason), None)
        return self._apply_refund(lease_ids, reason)

    def _apply_refund(self, lease_ids: Sequence[int], reason: Refund) -> list[Lease]:
        refunded = [self.ledger.refund(lease_id, reason) for lease_id in lease_ids]
        for lease_id, lease in zip(lease_ids, refunded, strict=True):
            self._forget(lease_id, trained=lease is None)
        return [lease for lease in refunded if lease is not None]

    def _forget(self, lease_id: int, trained: bool) -> None:
        self.on_close(lease_id)
        self.room.settle(lease_id)
        self._ready.pop(lease_id, None)
        if (held := self._held.pop(lease_id, None)) is not None:
            self.room.held -= held.nbytes
            if trained and held.position is not None:
                self._spent.append((self.ledger.last_step, held.position))

    def _evict_stale(self, version: int) -> None:
        """The guarantee: drop groups that ``on_stale`` does not let a trainer at ``version`` use."""
        oldest_allowed = staleness.oldest_allowed(version, self.config.max_lag)
        masking = self.on_stale is OnStale.MASK
        for lease, held in list(self._ready.items()):
            too_old = (held.newest if masking else held.oldest) < oldest_allowed
            if too_old or held.newest > version:  # newer than the trainer: of a version that was rolled back
                self.evict(lease)

    def evict(self, lease: int) -> None:
        """Drop a group, or a lease in flight, so that its prompt is issued again."""
        for evicted in self._refund([lease], Refund.EVICTED):
            self._evicted += 1
            self.on_evict(evicted)

    def _make_offer(self, handed_out: records.HandedOut, attempt: int, dropped: Sequence[GroupMeta] = ()) -> Offer:
        step, version, max_lag = handed_out.step, handed_out.version, self.config.max_lag
        known = {group.lease: group for group in dropped} | {lease: held.group for lease, held in self._held.items()}
        groups = [known[lease] for lease in handed_out.leases]
        for lease in handed_out.leases:
            self._ready.pop(lease, None)
        parts = self._planner.parts(groups, version, handed_out.ranks)
        stats = self._statistics.take(groups) | lag_statistics(groups, version, max_lag) | self.statistics()
        stats |= {"lag/evicted_groups": float(self._evicted), "lag/headroom": self.ledger.headroom.groups}
        self._evicted = 0
        self._offers = attempt
        oldest_allowed = staleness.oldest_allowed(version, max_lag)
        self.offer = Offer(step, version, attempt, oldest_allowed, groups, parts, stats)
        return self.offer

    def _acknowledge(self, record: records.Acknowledged) -> int:
        used = self.ledger.steps[record.step]
        consumed = self.ledger.acknowledge(record.step)
        self.ledger.steer(record.ess, record.tokens)
        self.offer = None
        for lease in consumed:
            self._forget(lease, trained=True)
        self._ready.update((lease, self._held[lease]) for lease in used if lease in self._held)
        self._spent = [(spent, position) for spent, position in self._spent if spent > record.durable]
        return len(consumed)

    def _drop(self, step: int, lease_ids: Sequence[int]) -> list[Lease]:
        lost = self.ledger.drop_from_step(step, lease_ids)
        for lease in lease_ids:
            self._forget(lease, trained=False)  # there is no payload to keep
        return lost

    def _hand_back(self, step: int) -> int:
        leases = self.ledger.hand_back(step)
        self._ready.update((lease, self._held[lease]) for lease in leases)
        self.offer = None
        return len(leases)

    def _restore_snapshot(self, snapshot: records.Snapshot, payload_of: PayloadOf, now: float) -> None:
        self.ledger.restore(snapshot.ledger, now)
        for each in snapshot.held:
            inline = each.reference is None and each.position is not None and self.config.buffer.shards == 1
            payload = payload_of(each.position) if inline and each.position is not None else None
            self._hold(Held.of(each.group, payload, each.reference, each.position, each.priority))
        self.room.restore(snapshot.promise, snapshot.promised)
        self._offers, self._spent = snapshot.offers, snapshot.spent
        if snapshot.offered is not None:
            self._make_offer(snapshot.offered, snapshot.offers, snapshot.dropped)
