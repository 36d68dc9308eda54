"""The ledger: each line of its lifecycle table, its counters, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffers import ledger as ledger_module
from streamrl.buffers.ledger import Delivery, LeaseState, Ledger, Refund


def make(
    *, per_step: int = 4, max_lag: int = 1, timeout: float = 10.0, attempts: int = 3, published: int = 0
) -> Ledger:
    ledger = Ledger(
        groups_per_step=per_step, max_lag=max_lag, group_size=2, lease_timeout_s=timeout, max_attempts=attempts
    )
    if published >= 0:
        ledger.publish(published)
    return ledger


def states(ledger: Ledger) -> dict[str, int]:
    return {
        "issued": ledger.issued,
        "in_flight": ledger.in_flight,
        "ready": ledger.ready,
        "consumed": ledger.consumed,
        "refunded": ledger.refunded,
    }


def test_grants_stop_at_the_credits_and_go_on_after_publication() -> None:
    ledger = make(per_step=2, max_lag=1)
    assert [lease.prompt for lease in ledger.grant("a", 10, 0.0)] == [0, 1, 2, 3]
    assert ledger.grant("a", 10, 0.0) == []
    ledger.publish(1)
    assert [lease.prompt for lease in ledger.grant("a", 10, 0.0)] == [4, 5]


def test_no_lease_before_the_first_publication() -> None:
    assert make(published=-1).grant("a", 1, 0.0) == []


def test_an_older_publication_takes_no_credit_back() -> None:
    ledger = make(per_step=1, max_lag=0, published=3)
    ledger.publish(1)
    assert ledger.published == 3


def test_a_group_goes_from_lease_to_consumption() -> None:
    ledger = make()
    lease = ledger.grant("a", 1, 0.0)[0]
    assert ledger.find(lease.id).state is LeaseState.IN_FLIGHT
    assert ledger.deliver(lease.id) is Delivery.ACCEPTED
    assert ledger.find(lease.id).state is LeaseState.READY
    ledger.hand_out(0, [lease.id])
    assert ledger.find(lease.id).state is LeaseState.HANDED_OUT
    assert states(ledger) == {"issued": 1, "in_flight": 0, "ready": 1, "consumed": 0, "refunded": 0}
    assert ledger.acknowledge(0) == [lease.id]
    assert ledger.find(lease.id) is None
    assert states(ledger) == {"issued": 1, "in_flight": 0, "ready": 0, "consumed": 1, "refunded": 0}


@pytest.mark.parametrize("reason", [Refund.FAILED, Refund.EXPIRED, Refund.LOST, Refund.EVICTED])
def test_a_prompt_that_gave_nothing_is_issued_again_before_new_ones(reason: Refund) -> None:
    ledger = make()
    first, second = ledger.grant("a", 2, 0.0)
    match reason:
        case Refund.FAILED:
            ledger.fail(first.id)
        case Refund.EXPIRED:
            ledger.deliver(second.id)
            ledger.expire(10.0)
        case Refund.LOST:
            ledger.deliver(second.id)
            ledger.holder_lost("a")
        case Refund.EVICTED:
            ledger.deliver(first.id)
            ledger.refund(first.id, Refund.EVICTED)
    again, new = ledger.grant("b", 2, 20.0)
    assert (again.prompt, again.attempt) == (first.prompt, 1)
    assert (new.prompt, new.attempt) == (2, 0)
    assert (ledger.reissued, ledger.refunds[reason], ledger.lost) == (1, 1, 0)


def test_a_filtered_prompt_is_done_and_gives_its_credit_back() -> None:
    ledger = make(per_step=1, max_lag=0)
    lease = ledger.grant("a", 5, 0.0)[0]
    ledger.deliver(lease.id)
    assert ledger.credits == 0
    ledger.refund(lease.id, Refund.FILTERED)
    assert [(x.prompt, x.attempt) for x in ledger.grant("a", 5, 0.0)] == [(1, 0)]
    assert (ledger.reissued, ledger.lost) == (0, 0)


def test_only_leases_whose_deadline_has_passed_expire() -> None:
    ledger = make(timeout=10.0)
    early = ledger.grant("a", 1, 0.0)[0]
    late = ledger.grant("a", 1, 5.0)[0]
    assert ledger.next_deadline == 10.0
    assert ledger.expire(9.9) == []
    assert ledger.expire(10.0) == [early]
    assert ledger.next_deadline == 15.0
    assert ledger.deliver(late.id) is Delivery.ACCEPTED
    assert ledger.next_deadline is None


def test_a_lost_holder_loses_only_its_own_leases_in_flight() -> None:
    ledger = make()
    delivered, flying = ledger.grant("a", 2, 0.0)
    others = ledger.grant("b", 1, 0.0)[0]
    ledger.deliver(delivered.id)
    assert ledger.holder_lost("a") == [flying]
    assert ledger.find(delivered.id).state is LeaseState.READY
    assert ledger.find(others.id).state is LeaseState.IN_FLIGHT


def test_a_second_delivery_is_a_duplicate_in_every_later_state() -> None:
    ledger = make(per_step=1)
    lease = ledger.grant("a", 1, 0.0)[0]
    ledger.deliver(lease.id)
    outcomes = [ledger.deliver(lease.id)]
    ledger.hand_out(0, [lease.id])
    outcomes.append(ledger.deliver(lease.id))
    ledger.acknowledge(0)
    outcomes.append(ledger.deliver(lease.id))
    assert outcomes == [Delivery.DUPLICATE] * 3
    assert ledger.refused == {Delivery.DUPLICATE: 3}
    assert states(ledger) == {"issued": 1, "in_flight": 0, "ready": 0, "consumed": 1, "refunded": 0}


def test_a_delivery_after_expiry_is_late_and_changes_nothing() -> None:
    ledger = make()
    lease = ledger.grant("a", 1, 0.0)[0]
    ledger.expire(10.0)
    before = states(ledger)
    assert ledger.deliver(lease.id) is Delivery.LATE
    assert states(ledger) == before
    assert ledger.refused == {Delivery.LATE: 1}


@pytest.mark.parametrize("lease_id", [-1, 1, 99])
def test_a_lease_that_was_never_granted_is_unknown(lease_id: int) -> None:
    ledger = make()
    ledger.grant("a", 1, 0.0)
    assert ledger.deliver(lease_id) is Delivery.UNKNOWN


def test_a_lease_whose_record_was_forgotten_is_still_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "CLOSED_REMEMBERED", 2)
    ledger = make(per_step=1, max_lag=0)
    for step in range(6):
        ledger.publish(step)
        lease = ledger.grant("a", 1, 0.0)[0]
        ledger.deliver(lease.id)
        ledger.hand_out(step, [lease.id])
        ledger.acknowledge(step)
    assert [ledger.deliver(lease_id) for lease_id in range(6)] == [Delivery.LATE] * 4 + [Delivery.DUPLICATE] * 2
    assert ledger.consumed == 6


def test_a_failure_of_a_lease_that_is_not_in_flight_is_ignored() -> None:
    ledger = make()
    lease = ledger.grant("a", 1, 0.0)[0]
    ledger.deliver(lease.id)
    assert ledger.fail(lease.id) is None
    assert ledger.fail(99) is None
    assert ledger.refunded == 0


def test_a_prompt_that_keeps_failing_is_fatal_and_named() -> None:
    ledger = make(attempts=3)
    for attempt in range(3):
        assert ledger.fatal == ""
        lease = ledger.grant("rollouter-7", 1, 0.0)[0]
        assert (lease.prompt, lease.attempt) == (0, attempt)
        ledger.fail(lease.id)
    assert "prompt 0" in ledger.fatal
    assert "3 times" in ledger.fatal
    assert "rollouter-7" in ledger.fatal
    assert "buffer.max_attempts=3" in ledger.fatal


def test_evictions_are_not_held_against_a_prompt() -> None:
    ledger = make(attempts=1)
    for attempt in range(3):
        lease = ledger.grant("a", 1, 0.0)[0]
        assert lease.attempt == attempt
        ledger.deliver(lease.id)
        ledger.refund(lease.id, Refund.EVICTED)
    assert ledger.fatal == ""


def test_groups_handed_back_are_ready_again_and_trained_once() -> None:
    ledger = make(per_step=2)
    ids = [lease.id for lease in ledger.grant("a", 2, 0.0)]
    for lease_id in ids:
        ledger.deliver(lease_id)
    ledger.hand_out(0, ids)
    assert ledger.hand_back(0) == ids
    assert all(ledger.find(lease_id).state is LeaseState.READY for lease_id in ids)
    ledger.hand_out(0, ids)
    assert ledger.acknowledge(0) == ids
    assert (ledger.consumed, ledger.duplicates_trained) == (2, 0)


def test_a_second_acknowledgement_consumes_nothing() -> None:
    ledger = make(per_step=1)
    lease = ledger.grant("a", 1, 0.0)[0]
    ledger.deliver(lease.id)
    ledger.hand_out(0, [lease.id])
    ledger.acknowledge(0)
    assert ledger.acknowledge(0) == []
    assert ledger.consumed == 1


def test_a_step_that_was_never_handed_out_cannot_be_acknowledged() -> None:
    with pytest.raises(KeyError, match="step 4 was acknowledged but never handed out"):
        make().acknowledge(4)


def test_a_group_cannot_skip_a_state() -> None:
    ledger = make()
    lease = ledger.grant("a", 1, 0.0)[0]
    with pytest.raises(AssertionError, match="in_flight → handed_out"):
        ledger.hand_out(0, [lease.id])


def test_the_independent_counts_notice_a_prompt_that_is_lost_or_trained_twice() -> None:
    """Break the ledger from outside: the two numbers that must be 0 are able to be something else."""
    ledger = make(per_step=1)
    lease = ledger.grant("a", 1, 0.0)[0]
    ledger.fail(lease.id)
    ledger._reissue.clear()
    assert ledger.lost == 1
    twice = make(per_step=1)
    for step in range(2):
        twice._cursor = 0
        lease = twice.grant("a", 1, 0.0)[0]
        twice.deliver(lease.id)
        twice.hand_out(step, [lease.id])
        twice.acknowledge(step)
    assert twice.duplicates_trained == 1


@given(st.permutations(range(12)))
def test_the_tally_of_done_prompts_takes_each_number_once_in_any_order(order: list[int]) -> None:
    tally = ledger_module._Tally()
    assert all(tally.add(number) for number in order)
    assert not any(tally.add(number) for number in order)
    assert tally.watermark == 12
    assert not tally._above
