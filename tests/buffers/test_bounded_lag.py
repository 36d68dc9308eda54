"""Random schedules of slow groups, crashes, expiries, filtered groups and version bumps against C1 and C2.

A model of the whole ring drives the real buffer: rollouters commit versions at their own pace and sample tokens, the
trainer takes batches, publication waits for every rollouter. Whatever the schedule does: no trained token is over the
bound, each lease is trained once, nothing is lost, and the ring can always go on.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from buffer_support import centred, settings, token_mean, trajectory
from hypothesis import example, given
from hypothesis import settings as budget
from hypothesis import strategies as st

from streamrl.buffers.replay_buffer import PutStatus, ReplayBuffer
from streamrl.types import Group, Lease, RankBatch, VersionSpans, append_version

PER_STEP = 2
TIMEOUT_S = 10.0


class Rollouter:
    def __init__(self, name: str, committed: int) -> None:
        self.name = name
        self.committed = committed
        self.open: list[tuple[Lease, VersionSpans]] = []


class RingModel:
    """Every operation is always possible; one that makes no sense now does nothing."""

    def __init__(self, max_lag: int, on_stale: str, drop: bool) -> None:
        config = settings(
            per_step=PER_STEP,
            max_lag=max_lag,
            on_stale=on_stale,
            group__drop_zero_variance=drop,
            buffer__lease_timeout_s=TIMEOUT_S,
            buffer__max_attempts=10_000,
        )
        self.max_lag = max_lag
        self.on_stale = on_stale
        self.buffer = ReplayBuffer(config, centred, token_mean)
        self.now = 0.0
        self.version = 0
        """Of the trainer; staged for every rollouter to commit."""
        self.rollouters = [Rollouter(f"rollouter-{index}", -1) for index in range(3)]
        self.undelivered: list[Group] = []
        """Groups whose holder crashed after it sampled them: they may still arrive."""
        self.delivered: list[Group] = []
        self.trained: list[int] = []
        self.evicted_or_masked = 0.0

    # Operations: ``which`` picks among what there is ------------------------------------------------------------------

    def commit(self, which: int) -> None:
        self.rollouters[which % 3].committed = self.version
        self.buffer.ledger.publish(min(rollouter.committed for rollouter in self.rollouters))

    def lease(self, which: int) -> None:
        rollouter = self.rollouters[which % 3]
        for lease in self.buffer.lease(rollouter.name, 1 + which % 4, self.now):
            rollouter.open.append((lease, [(rollouter.committed, 1)]))

    def sample(self, which: int) -> None:
        rollouter = self.rollouters[which % 3]
        if rollouter.open:
            _, spans = rollouter.open[which % len(rollouter.open)]
            append_version(spans, rollouter.committed, 1 + which % 2)

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
            self.buffer.ledger.fail(lease.id)

    def crash(self, which: int) -> None:
        rollouter = self.rollouters[which % 3]
        self.undelivered += [self.group(lease, spans) for lease, spans in rollouter.open]
        self.buffer.ledger.holder_lost(rollouter.name)
        self.rollouters[which % 3] = Rollouter(rollouter.name, self.version)
        self.buffer.ledger.publish(min(rollouter.committed for rollouter in self.rollouters))

    def pass_time(self, which: int) -> None:
        self.now += TIMEOUT_S * (which % 4) / 4
        self.buffer.ledger.expire(self.now)

    def train(self, which: int) -> None:
        parts = self.buffer.next_batch(self.version, self.version, ranks=1 + which % 2)
        if parts is None:
            return
        if which % 7 == 0:  # the trainer dies before the step; its successor asks again
            assert self.buffer.hand_back() == PER_STEP
            parts = self.buffer.next_batch(self.version, self.version, ranks=1)
            assert parts is not None
        self.check_batch(parts)
        assert self.buffer.acknowledge(self.version) == PER_STEP
        self.version += 1

    # What must hold ---------------------------------------------------------------------------------------------------

    def put(self, group: Group) -> None:
        self.delivered.append(group)
        self.evicted_or_masked += self.buffer.put(group) is PutStatus.STALE

    def group(self, lease: Lease, spans: VersionSpans, flat: bool = False) -> Group:
        rewards = (1.0, 1.0) if flat else (0.0, 1.0)
        return Group(lease.id, lease.prompt, "sums", [trajectory(list(spans), reward=reward) for reward in rewards])

    def check_batch(self, parts: list[RankBatch]) -> None:
        stats = parts[0].stats
        self.evicted_or_masked += stats["lag/evicted_groups"] + stats["lag/masked_tokens"]
        assert {part.oldest_allowed for part in parts} == {self.version - self.max_lag}
        leases = set()
        for train_group in (group for part in parts for micro_batch in part.micro_batches for group in micro_batch):
            leases.add(train_group.lease)
            for each in train_group.trajectories:
                lags = [self.version - version for version, _ in each.versions]
                assert min(lags) >= 0
                assert min(lags) <= self.max_lag, "a trajectory without a fresh token has nothing to train on"
                if self.on_stale != "mask" or self.max_lag == 0:
                    assert max(lags) <= self.max_lag
        self.trained += leases

    def check(self) -> None:
        ledger = self.buffer.ledger
        assert ledger.in_flight + ledger.ready <= (self.max_lag + 1) * PER_STEP
        assert ledger.issued == ledger.consumed + ledger.in_flight + ledger.ready + ledger.refunded
        assert ledger.consumed == self.version * PER_STEP
        assert len(self.trained) == len(set(self.trained)), "a lease was trained twice"
        assert (ledger.lost, ledger.duplicates_trained) == (0, 0)
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
]
schedules = st.lists(
    st.tuples(st.sampled_from(TURNING * 3 + DISTURBING), st.integers(0, 100)), min_size=10, max_size=120
)


FOUR_SLOW_GROUPS: list[tuple[Operation, int]] = [
    *((RingModel.commit, which) for which in range(3)),
    (RingModel.lease, 3),
    *[(RingModel.turn, 1)] * 8,
]
"""More groups of one version than a batch holds stay in flight while the others overtake them."""


@pytest.mark.parametrize("on_stale", ["mask", "evict", "wait"])
@pytest.mark.parametrize("max_lag", [0, 1, 4])
@example(schedule=FOUR_SLOW_GROUPS, drop=False)
@budget(max_examples=40, deadline=None)
@given(schedule=schedules, drop=st.booleans())
def test_every_schedule_stays_inside_the_bound_and_can_go_on(
    max_lag: int, on_stale: str, schedule: list[tuple[Operation, int]], drop: bool
) -> None:
    ring = RingModel(max_lag, on_stale, drop)
    for operation, which in schedule:
        operation(ring, which)
        ring.check()
    for _ in range(max_lag + 2):
        ring.finish_a_step()
