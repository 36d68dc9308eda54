"""Random schedules of slow groups, crashes, expiries, lost payloads, restarts and version bumps against C1, C2 and C10.

A model of the whole ring drives the real buffer: rollouters commit versions at their own pace and sample tokens, the
trainer takes batches, publication waits for every rollouter. At any moment the buffer may die and come back from what
it wrote down. Whatever the schedule does: no trained token is over the bound, each group is trained exactly
``epochs_per_group`` times unless it grew too old or its payload was lost, nothing is lost, and the ring can always go
on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from buffer_support import balance, centred, describe, durable_state, leases_in, settings, token_mean, trajectory
from hypothesis import example, given
from hypothesis import settings as budget
from hypothesis import strategies as st

from streamrl.buffers import records
from streamrl.buffers.held import PutStatus
from streamrl.buffers.journal.writer import Position
from streamrl.buffers.offer import Offer
from streamrl.buffers.replay_buffer import ReplayBuffer
from streamrl.buffers.wire.messages import GroupMeta, InArena
from streamrl.buffers.wire.payload import Payload
from streamrl.buffers.wire.reference import Reference
from streamrl.errors import StreamRLError
from streamrl.types import Group, Lease, VersionSpans, append_version

PER_STEP = 2
TIMEOUT_S = 10.0


class Rollouter:
    def __init__(self, name: str, committed: int) -> None:
        self.name = name
        self.committed = committed
        self.open: list[tuple[Lease, VersionSpans]] = []


class RingModel:
    """Every operation is always possible; one that makes no sense now does nothing."""

    def __init__(self, max_lag: int, on_stale: str, epochs: int, drop: bool, by_reference: bool) -> None:
        self.config = settings(
            per_step=PER_STEP,
            max_lag=max_lag,
            on_stale=on_stale,
            group__drop_zero_variance=drop,
            buffer__lease_timeout_s=TIMEOUT_S,
            buffer__max_attempts=10_000,
            buffer__epochs_per_group=epochs,
        )
        if drop and max_lag and epochs == 1:
            self.config.staleness.target_ess = 0.9
        self.max_lag = max_lag
        self.on_stale = on_stale
        self.epochs = epochs
        self.by_reference = by_reference
        self.priority = (lambda group: float(group.lease % 3)) if by_reference and on_stale != "wait" else None
        self.now = 0.0
        self.version = 0
        """Of the trainer; staged for every rollouter to commit."""
        self.journal: list[bytes] = []
        """Records since ``origin``, the snapshot that a restart begins with."""
        self.origin = b""
        self.buffer = self.empty_buffer()
        self.take_snapshot()
        self.rollouters = [Rollouter(f"rollouter-{index}", -1) for index in range(3)]
        self.undelivered: list[GroupMeta] = []
        """Groups whose holder crashed after it sampled them: they may still arrive."""
        self.delivered: list[GroupMeta] = []
        self.uses: Counter[int] = Counter()
        """Acknowledged steps that trained on each lease."""
        self.closed_early: set[int] = set()
        """Leases that were trained, and then evicted or dropped."""
        self.absent = 0
        """Places in acknowledged batches whose group was dropped."""
        self.evicted_or_masked = 0.0

    def empty_buffer(self) -> ReplayBuffer:
        return ReplayBuffer(self.config, centred, token_mean, self.priority, self.write_down)

    def write_down(self, record: records.Record, payload: Payload | None) -> Position:
        self.journal.append(records.encode(record))
        return Position(1, len(self.journal))

    def take_snapshot(self) -> None:
        self.origin, self.journal[:] = records.encode(self.buffer.snapshot()), []

    # Operations: ``which`` picks among what there is ------------------------------------------------------------------

    def commit(self, which: int) -> None:
        self.rollouters[which % 3].committed = self.version
        self.buffer.publish(min(rollouter.committed for rollouter in self.rollouters))

    def lease(self, which: int) -> None:
        rollouter = self.rollouters[which % 3]
        for lease in self.buffer.lease(rollouter.name, 1 + which % 4, self.now):
            rollouter.open.append((lease, [(rollouter.committed, 1)]))

    def sample(self, which: int) -> None:
        rollouter = self.rollouters[which % 3]
        if rollouter.open:
            _, spans = rollouter.open[which % len(rollouter.open)]
            append_version(spans, rollouter.committed, 1 + which % 2)

    def reserve(self, which: int) -> None:
        """A group turns out to be larger than its lease promised."""
        rollouter = self.rollouters[which % 3]
        if rollouter.open:
            lease, _ = rollouter.open[which % len(rollouter.open)]
            assert self.buffer.reserve(lease.id, lease.nbytes + 100 * which)

    def deliver(self, which: int) -> None:
        rollouter = self.rollouters[which % 3]
        if rollouter.open:
            lease, spans = rollouter.open.pop(which % len(rollouter.open))
            append_version(spans, rollouter.committed)
            self.put(self.group(lease, spans, flat=which % 5 == 0))

    def deliver_late(self, which: int) -> None:
        if self.undelivered:
            self.put(self.undelivered.pop(which % len(self.undelivered)))

    def deliver_again(self, which: int) -> None:
        if self.delivered:
            status = self.buffer.put(self.delivered[which % len(self.delivered)])
            assert status in (PutStatus.DUPLICATE, PutStatus.LATE)

    def turn(self, which: int) -> None:
        """A whole step in which everybody commits, and what rollouter 0 holds stays in flight and gets older."""
        for index in range(3):
            self.commit(index)
        for index in (1, 2):
            self.lease(index + 3 * which)
            while self.rollouters[index].open:
                self.deliver(index + 3 * which)
        self.train(1)

    def fail(self, which: int) -> None:
        rollouter = self.rollouters[which % 3]
        if rollouter.open:
            lease, _ = rollouter.open.pop(which % len(rollouter.open))
            self.buffer.fail(lease.id)

    def crash(self, which: int) -> None:
        rollouter = self.rollouters[which % 3]
        self.undelivered += [self.group(lease, spans) for lease, spans in rollouter.open]
        held = self.held()
        self.buffer.holder_lost(rollouter.name)
        self.note_evictions(held)
        self.rollouters[which % 3] = Rollouter(rollouter.name, self.version)
        self.buffer.publish(min(rollouter.committed for rollouter in self.rollouters))

    def pass_time(self, which: int) -> None:
        self.now += TIMEOUT_S * (which % 4) / 4
        self.buffer.expire(self.now)

    def train(self, which: int) -> None:
        if (offer := self.next_offer(1 + which % 2)) is None:
            return
        if which % 7 == 0:  # the trainer dies before the step; its successor asks again
            offer = self.hand_back_and_offer(offer)
        if which % 5 == 0:  # some payloads of the batch cannot be read
            self.drop(offer, which)
            if which % 3 == 0:  # and then the trainer dies: what is left is ready again
                if (again := self.hand_back_and_offer(offer)) is None:
                    return
                offer = again
        if which % 11 == 0:
            self.restart(which)
        self.acknowledge(offer)

    def next_offer(self, ranks: int) -> Offer | None:
        held = self.held()
        offer = self.buffer.next_batch(self.version, self.version, ranks)
        self.note_evictions(held)
        if offer is not None:
            self.check_offer(offer)
        return offer

    def hand_back_and_offer(self, old: Offer) -> Offer | None:
        self.buffer.hand_back()
        offer = self.next_offer(old.ranks)
        if offer is not None:
            with pytest.raises(StreamRLError, match="offered again"):
                self.buffer.acknowledge(self.version, old.attempt, self.version)
        return offer

    def drop(self, offer: Offer, which: int) -> None:
        leases = [group.lease for group in offer.groups]
        gone = leases if which % 2 else leases[: 1 + which % PER_STEP]
        self.buffer.drop(offer.step, offer.attempt, gone)
        self.closed_early.update(lease for lease in gone if self.uses[lease])

    def acknowledge(self, offer: Offer) -> None:
        used = [lease for lease in (group.lease for group in offer.groups) if self.buffer.held(lease)]
        done = [lease for lease in used if self.uses[lease] + 1 == self.epochs]
        for _ in range(2):  # the answer to the first may be lost
            consumed = self.buffer.acknowledge(
                self.version, offer.attempt, self.version - self.max_lag, *self.measured()
            )
            assert consumed == len(done)
            done = []
        self.uses.update(used)
        self.absent += PER_STEP - len(used)
        self.version += 1

    def measured(self) -> tuple[float, int]:
        """ESS and trained tokens of this step: high and low in turn, now and then nothing."""
        return (1.0, 0.5, 0.95, 0.0)[self.version % 4], 100 * (self.version % 4 < 3)

    def restart(self, which: int) -> None:
        """Throw the buffer away; another one comes from what it wrote down. Now and then there is a snapshot."""
        before = durable_state(self.buffer)
        journal = list(self.journal)
        self.buffer = self.empty_buffer()
        self.restore(self.origin)
        for number, record in enumerate(journal, start=1):
            self.restore(record, number)
        assert durable_state(self.buffer) == before
        assert self.journal == journal, "a restored change was written down again"
        if which % 2:
            self.take_snapshot()

    def restore(self, record: bytes, number: int = 0) -> None:
        self.buffer.restore(records.decode(record), Position(1, number), lambda position: Payload([]), self.now)

    # What must hold ---------------------------------------------------------------------------------------------------

    def put(self, group: GroupMeta) -> None:
        self.delivered.append(group)
        slot = Reference("arena", 64 * group.lease, group.nbytes, group.lease)
        reference = InArena(slot, b"") if self.by_reference else None
        self.evicted_or_masked += self.buffer.put(group, reference=reference) is PutStatus.STALE

    def group(self, lease: Lease, spans: VersionSpans, flat: bool = False) -> GroupMeta:
        rewards = (1.0, 1.0) if flat else (0.0, 1.0)
        return describe(
            Group(lease.id, lease.prompt, "sums", [trajectory(list(spans), reward=reward) for reward in rewards])
        )

    def held(self) -> set[int]:
        return {lease for lease, record in self.buffer.ledger.records.items() if record.epochs}

    def note_evictions(self, held: set[int]) -> None:
        """Trained groups that are gone since ``held``."""
        self.closed_early |= held - self.held()

    def check_offer(self, offer: Offer) -> None:
        self.evicted_or_masked += offer.stats["lag/evicted_groups"] + offer.stats["lag/masked_tokens"]
        assert offer.oldest_allowed == self.version - self.max_lag
        assert len({group.lease for group in offer.groups}) == PER_STEP
        groups = {group.lease: group for group in offer.groups}
        assert set(leases_in(offer.parts)) <= set(groups)
        for part in (part for rank in offer.parts for batch in rank for part in batch):
            for row in part.rows:
                lags = [self.version - version for version, _ in groups[part.lease].trajectories[row].spans]
                assert min(lags) >= 0
                assert min(lags) <= self.max_lag, "a trajectory without a fresh token has nothing to train on"
                if self.on_stale != "mask" or self.max_lag == 0:
                    assert max(lags) <= self.max_lag

    def check(self) -> None:
        ledger = self.buffer.ledger
        outstanding = ledger.records.values()
        uses_left = sum(self.epochs - record.epochs for record in outstanding)
        assert uses_left <= (ledger.published + self.max_lag + 1 - self.version) * PER_STEP, "pacing"
        assert len(outstanding) <= (self.max_lag + 1) * PER_STEP
        assert balance(ledger) == 0
        assert sum(self.uses.values()) + self.absent == self.version * PER_STEP
        for lease, record in ledger.records.items():
            assert record.epochs == self.uses[lease] < self.epochs
        for lease, uses in self.uses.items():
            finished = lease not in ledger.records and lease not in self.closed_early
            assert uses == self.epochs if finished else uses <= self.epochs
        assert (ledger.lost, ledger.duplicates_trained) == (0, 0)
        room = self.buffer.room
        assert (room.held == 0) is (ledger.ready == 0)
        assert (room.promised == 0) is (ledger.in_flight == 0)
        if self.on_stale == "wait":
            assert self.evicted_or_masked == 0

    def finish_a_step(self) -> None:
        """Every rollouter commits, then finishes what it holds; stale groups are replaced in the second round."""
        goal = self.version + 1
        for _ in range(3):
            for which in range(3):
                self.commit(which)
            for rollouter in self.rollouters:
                leases = self.buffer.lease(rollouter.name, 100, self.now)
                rollouter.open += [(lease, []) for lease in leases]
                for lease, spans in rollouter.open:
                    append_version(spans, rollouter.committed)
                    self.put(self.group(lease, spans))
                rollouter.open.clear()
            self.train(1)
            self.check()
            if self.version == goal:
                return
        raise AssertionError(f"deadlock: {self.buffer.statistics()}")


Operation = Callable[[RingModel, int], None]

TURNING: list[Operation] = [
    RingModel.turn,
    RingModel.turn,
    RingModel.commit,
    RingModel.lease,
    RingModel.sample,
    RingModel.deliver,
    RingModel.train,
]
DISTURBING: list[Operation] = [
    RingModel.fail,
    RingModel.crash,
    RingModel.pass_time,
    RingModel.deliver_late,
    RingModel.deliver_again,
    RingModel.reserve,
    RingModel.train,
    RingModel.restart,
]
schedules = st.lists(
    st.tuples(st.sampled_from(TURNING * 3 + DISTURBING * 2), st.integers(0, 400)), min_size=10, max_size=120
)

FOUR_SLOW_GROUPS: list[tuple[Operation, int]] = [
    *((RingModel.commit, which) for which in range(3)),
    (RingModel.lease, 3),
    *[(RingModel.turn, 1)] * 8,
]
"""More groups of one version than a batch holds stay in flight while the others overtake them."""

HALF_OF_EVERY_BATCH_IS_LOST: list[tuple[Operation, int]] = [
    *((RingModel.commit, which) for which in range(3)),
    *[(RingModel.turn, 1), (RingModel.lease, 1), (RingModel.deliver, 1), (RingModel.train, 10)] * 8,
]
"""Each lost payload gives its prompt back while the step that did without it is over."""

WHOLE_BATCHES_ARE_LOST: list[tuple[Operation, int]] = [
    *((RingModel.commit, which) for which in range(3)),
    *[(RingModel.turn, 1), (RingModel.lease, 4), (RingModel.deliver, 1), (RingModel.train, 5)] * 8,
]


@pytest.mark.parametrize(
    ("on_stale", "max_lag", "epochs"),
    [
        *[("wait", max_lag, 1) for max_lag in (0, 1, 4)],
        *[(policy, *both) for policy in ("mask", "evict") for both in ((0, 1), (1, 1), (1, 2), (4, 1), (4, 3))],
    ],
)
@example(schedule=FOUR_SLOW_GROUPS, drop=False, by_reference=False)
@example(schedule=HALF_OF_EVERY_BATCH_IS_LOST, drop=False, by_reference=True)
@example(schedule=WHOLE_BATCHES_ARE_LOST, drop=False, by_reference=True)
@budget(max_examples=30, deadline=None)
@given(schedule=schedules, drop=st.booleans(), by_reference=st.booleans())
def test_every_schedule_stays_inside_the_bound_and_can_go_on(
    on_stale: str, max_lag: int, epochs: int, schedule: list[tuple[Operation, int]], drop: bool, by_reference: bool
) -> None:
    ring = RingModel(max_lag, on_stale, epochs, drop, by_reference)
    for operation, which in schedule:
        operation(ring, which)
        ring.check()
    for _ in range(max_lag + 2):
        ring.finish_a_step()
    ring.restart(0)
    ring.check()
