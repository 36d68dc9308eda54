"""A rollouter gives back leases whose player is gone: issued again at once, blamed where they were played."""

from __future__ import annotations

import pytest
from buffer_support import Ring, group, over_sockets, start

from streamrl.buffers.lease import Refund


@pytest.mark.parametrize(
    ("lost", "event", "refund"), [(True, "lease_lost", Refund.LOST), (False, "lease_returned", Refund.UNDELIVERED)]
)
def test_a_returned_lease_is_issued_again_to_whoever_waits(lost: bool, event: str, refund: Refund) -> None:
    async def conversation(ring: Ring) -> None:
        holder, other = ring.producer("rollouter-0"), ring.producer("rollouter-1")
        (lease,) = await holder.lease(1)
        waiting = start(other.lease(1))
        assert await holder.give_back(lease.id, lost=lost) == "returned"
        (again,) = await waiting
        assert (again.prompt, again.attempt) == (lease.prompt, 1)
        assert [told["lease"] for told in ring.named(event)] == [lease.id]
        assert ring.buffer.ledger.refunds == {refund: 1}
        assert ring.buffer.ledger.lost == 0

    over_sockets(conversation, per_step=1, max_lag=0)


def test_only_leases_that_were_played_count_towards_the_attempts_of_their_prompt() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        for _ in range(5):
            (lease,) = await producer.lease(1)
            await producer.give_back(lease.id, lost=False)
        assert not ring.buffer.ledger.fatal
        for _ in range(2):
            (lease,) = await producer.lease(1)
            await producer.give_back(lease.id, lost=True)
        assert "buffer.max_attempts=2" in ring.buffer.ledger.fatal

    over_sockets(conversation, per_step=1, max_lag=0, buffer__max_attempts=2)


def test_a_lease_that_was_delivered_already_is_not_taken_back() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        (lease,) = await producer.lease(1)
        assert await producer.put(group(lease)) == "accepted"
        assert await producer.give_back(lease.id, lost=True) == "late"
        assert ring.buffer.ledger.ready == 1

    over_sockets(conversation, per_step=1, max_lag=0)
