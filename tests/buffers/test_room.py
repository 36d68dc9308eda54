"""The bytes that a buffer holds and promises: what leases may carry, what larger groups reserve, and the limit (C4)."""

from __future__ import annotations

from typing import Any

import pytest
from buffer_support import centred, describe, group, put, replay_buffer, settings, token_mean, with_column
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from streamrl.buffers.held import BYTES_PER_TRAJECTORY, PutStatus
from streamrl.buffers.replay_buffer import ReplayBuffer
from streamrl.buffers.room import BYTES_PER_TOKEN, FILL_BYTES
from streamrl.errors import ConfigError, WireError
from streamrl.types import Lease

WORST = 2 * 64 * BYTES_PER_TOKEN + FILL_BYTES + 2 * BYTES_PER_TRAJECTORY
"""What a group of 2 trajectories of 64 tokens takes at most."""


def published(**keys: Any) -> ReplayBuffer:
    buffer = replay_buffer(**keys)
    buffer.publish(0)
    return buffer


def test_leases_stop_while_their_worst_case_would_pass_the_byte_limit() -> None:
    buffer = published(per_step=2, max_lag=4, buffer__max_bytes=3 * WORST)
    assert len(buffer.lease("a", 99, 0.0)) == 3
    assert buffer.lease("a", 99, 0.0) == []


def test_ready_bytes_count_as_they_are_and_free_the_rest_of_the_promise() -> None:
    buffer = published(per_step=2, max_lag=4, buffer__max_bytes=3 * WORST)
    leases = buffer.lease("a", 99, 0.0)
    for lease in leases:
        put(buffer, group(lease))
    small = describe(group(leases[0])).nbytes + 2 * BYTES_PER_TRAJECTORY
    assert (buffer.room.held, buffer.room.promised) == (3 * small, 0)
    assert len(buffer.lease("a", 99, 0.0)) == (3 * WORST - 3 * small) // WORST == 1


def test_a_byte_limit_under_one_batch_is_refused_with_the_way_out() -> None:
    need = 2 * WORST
    with pytest.raises(ConfigError, match=f"buffer.max_bytes={need} or more"):
        replay_buffer(per_step=2, size=2, buffer__max_bytes=need - 1)
    replay_buffer(per_step=2, size=2, buffer__max_bytes=need)


def test_a_group_larger_than_its_promise_reserves_the_rest_or_waits() -> None:
    buffer = published(per_step=1, max_lag=4, buffer__max_bytes=4 * WORST)
    first, second = buffer.lease("a", 2, 0.0)
    assert buffer.reserve(first.id, first.nbytes + WORST)
    assert buffer.room.promised == 3 * WORST
    assert not buffer.reserve(second.id, second.nbytes + WORST + 1)
    assert buffer.room.promised == 3 * WORST
    assert buffer.reserve(second.id, second.nbytes + WORST)
    assert (buffer.room.promised, buffer.room.free) == (4 * WORST, 0)


def test_a_reservation_made_twice_counts_once() -> None:
    buffer = published(per_step=1, max_lag=4, buffer__max_bytes=9 * WORST)
    lease = buffer.lease("a", 1, 0.0)[0]
    for _ in range(2):
        assert buffer.reserve(lease.id, lease.nbytes + 1000)
    assert buffer.room.promised == WORST + 1000


def test_leases_after_a_large_group_promise_as_much() -> None:
    buffer = published(per_step=1, max_lag=9, buffer__max_bytes=9 * WORST)
    small = buffer.lease("a", 1, 0.0)[0]
    buffer.reserve(small.id, small.nbytes + 3 * WORST)
    (large,) = buffer.lease("a", 99, 0.0)  # room for 5 more small ones
    assert large.nbytes == small.nbytes + 3 * WORST


def test_a_reservation_for_a_lease_that_is_not_in_flight_is_for_its_put_to_refuse() -> None:
    buffer = published(per_step=1)
    assert buffer.reserve(99, 1 << 40)
    assert buffer.room.promised == 0


def test_a_reservation_over_any_batch_is_refused_with_the_way_out() -> None:
    buffer = published(per_step=2, buffer__max_bytes=4 * WORST)
    lease = buffer.lease("a", 1, 0.0)[0]
    need = 2 * (lease.nbytes + WORST + 1 + 2 * BYTES_PER_TRAJECTORY)
    with pytest.raises(ConfigError, match=f"lease {lease.id} .* set buffer.max_bytes={need} or more"):
        buffer.reserve(lease.id, lease.nbytes + WORST + 1)
    assert buffer.room.promised == WORST


def test_a_group_over_its_promise_is_refused_until_the_room_is_reserved() -> None:
    buffer = published(per_step=1)
    lease = buffer.lease("a", 1, 0.0)[0]
    large = with_column(lease, lease.nbytes)
    nbytes = describe(large).nbytes
    with pytest.raises(WireError, match=f"lease 0: expected a payload of at most {lease.nbytes} bytes, .* {nbytes}; "):
        put(buffer, large)
    assert buffer.reserve(lease.id, nbytes)
    assert put(buffer, large) is PutStatus.ACCEPTED
    assert buffer.room.held == nbytes + 2 * BYTES_PER_TRAJECTORY


class Bytes:
    """Any order of leases, reservations, deliveries, losses and steps, with groups of any size."""

    def __init__(self) -> None:
        config = settings(per_step=2, max_lag=3, buffer__max_bytes=7 * WORST, buffer__max_attempts=10_000)
        self.buffer = ReplayBuffer(config, centred, token_mean)
        self.buffer.publish(0)
        self.open: list[Lease] = []
        self.version = 0

    def lease(self, size: int) -> None:
        self.open += self.buffer.lease("a", 1 + size % 4, 0.0)

    def reserve(self, size: int) -> None:
        if self.open:
            lease = self.open[size % len(self.open)]
            self.buffer.reserve(lease.id, describe(with_column(lease, size)).nbytes)

    def deliver(self, size: int) -> None:
        if self.open:
            lease = self.open[size % len(self.open)]
            made = with_column(lease, size)
            if self.buffer.reserve(lease.id, describe(made).nbytes):
                self.open.remove(lease)
                assert put(self.buffer, made) is PutStatus.ACCEPTED

    def fail(self, size: int) -> None:
        if self.open:
            self.buffer.fail(self.open.pop(size % len(self.open)).id)

    def train(self, size: int) -> None:
        offer = self.buffer.next_batch(self.version, self.version, 1)
        if offer is not None:
            if size % 3 == 0:
                self.buffer.drop(self.version, offer.attempt, [offer.groups[0].lease])
            self.buffer.acknowledge(self.version, offer.attempt, self.version)
            self.version += 1
            self.buffer.publish(self.version)


@budget(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([Bytes.lease, Bytes.lease, Bytes.reserve, Bytes.deliver, Bytes.fail, Bytes.train]),
            st.integers(0, 2 * WORST),
        ),
        max_size=60,
    )
)
def test_held_and_promised_bytes_never_exceed_the_limit(operations: list[tuple[Any, int]]) -> None:
    model = Bytes()
    room = model.buffer.room
    for operation, size in operations:
        operation(model, size)
        assert room.held + room.promised <= room.limit
        outstanding = model.buffer.ledger.records
        in_flight = {lease for lease in outstanding if model.buffer.ledger.is_in_flight(lease)}
        assert set(room.by_lease) == in_flight
        assert room.promised == sum(room.by_lease.values())
        held = [model.buffer.held(lease) for lease in set(outstanding) - in_flight]
        assert room.held == sum(each.nbytes for each in held if each)
