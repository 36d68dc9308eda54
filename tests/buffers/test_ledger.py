"""The ledger: each line of its lifecycle table, its counters, and what it refuses."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffers.lease import Delivery, LeaseState, LedgerState, Refund, Tally
from streamrl.buffers.ledger import Ledger


def make(
    *,
    per_step: int = 4,
    max_lag: int = 1,
    timeout: float = 10.0,
    attempts: int = 3,
    published: int = 0,
    epochs: int = 1,
) -> Ledger:
    ledger = Ledger(
        groups_per_step=per_step,
        max_lag=max_lag,
        group_size=2,
        lease_timeout_s=timeout,
        max_attempts=attempts,
        epochs_per_group=epochs,
    )
    if published >= 0:
        ledger.publish(published)
    return ledger


def delivered(ledger: Ledger, count: int) -> list[int]:
    """Ids of so many new leases whose groups arrived."""
    ids = [lease.id for lease in ledger.grant("a", count, 0.0)]
    assert [ledger.deliver(lease_id) for lease_id in ids] == [Delivery.ACCEPTED] * count
    return ids


def train(ledger: Ledger, step: int, ids: list[int]) -> list[int]:
    """Hand out and acknowledge; the consumed ones."""
    ledger.hand_out(step, ids)
    return ledger.acknowledge(step)


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
    first, _ = ledger.grant("a", 2, 0.0)
    if reason is Refund.EVICTED:
        ledger.deliver(first.id)
    assert ledger.refund(first.id, reason) == first
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


def test_only_leases_whose_deadline_has_passed_are_overdue() -> None:
    ledger = make(timeout=10.0)
    early = ledger.grant("a", 1, 0.0)[0]
    late = ledger.grant("a", 1, 5.0)[0]
    assert ledger.next_deadline == 10.0
    assert ledger.overdue(9.9) == []
    assert ledger.overdue(10.0) == [early.id]
    ledger.refund(early.id, Refund.EXPIRED)
    assert ledger.next_deadline == 15.0
    assert ledger.overdue(10.0) == []
    assert ledger.deliver(late.id) is Delivery.ACCEPTED
    assert ledger.next_deadline is None


def test_leases_are_known_by_the_request_that_they_answered_while_they_are_in_flight() -> None:
    ledger = make()
    first, second = ledger.grant("a", 2, 0.0, asked="a#1/7")
    ledger.grant("a", 1, 0.0, asked="a#1/8")
    assert ledger.granted_to("a#1/7") == [first, second]
    ledger.deliver(first.id)
    assert ledger.granted_to("a#1/7") == [second]
    ledger.refund(second.id, Refund.EXPIRED)
    assert ledger.granted_to("a#1/7") == []


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
    ledger.refund(lease.id, Refund.EXPIRED)
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
    monkeypatch.setattr("streamrl.buffers.ledger.CLOSED_REMEMBERED", 2)
    ledger = make(per_step=1, max_lag=0)
    for step in range(6):
        ledger.publish(step)
        lease = ledger.grant("a", 1, 0.0)[0]
        ledger.deliver(lease.id)
        ledger.hand_out(step, [lease.id])
        ledger.acknowledge(step)
    assert [ledger.deliver(lease_id) for lease_id in range(6)] == [Delivery.LATE] * 4 + [Delivery.DUPLICATE] * 2
    assert ledger.consumed == 6


def test_a_prompt_that_keeps_failing_is_fatal_and_named() -> None:
    ledger = make(attempts=3)
    for attempt in range(3):
        assert ledger.fatal == ""
        lease = ledger.grant("rollouter-7", 1, 0.0)[0]
        assert (lease.prompt, lease.attempt) == (0, attempt)
        ledger.refund(lease.id, Refund.FAILED)
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


def test_a_step_is_acknowledged_once() -> None:
    ledger = make(per_step=1)
    ids = delivered(ledger, 1)
    assert train(ledger, 0, ids) == ids
    for step in (0, 4):
        with pytest.raises(KeyError):
            ledger.acknowledge(step)
    assert (ledger.consumed, ledger.last_step) == (1, 0)


def test_a_group_cannot_skip_a_state() -> None:
    ledger = make()
    lease = ledger.grant("a", 1, 0.0)[0]
    with pytest.raises(AssertionError, match="in_flight → handed_out"):
        ledger.hand_out(0, [lease.id])


def test_the_independent_counts_notice_a_prompt_that_is_lost_or_trained_twice() -> None:
    """Break the ledger from outside: the two numbers that must be 0 are able to be something else."""
    ledger = make(per_step=1)
    lease = ledger.grant("a", 1, 0.0)[0]
    ledger.refund(lease.id, Refund.FAILED)
    ledger.reissue.clear()
    assert ledger.lost == 1
    twice = make(per_step=1)
    for step in range(2):
        twice.cursor = 0
        lease = twice.grant("a", 1, 0.0)[0]
        twice.deliver(lease.id)
        twice.hand_out(step, [lease.id])
        twice.acknowledge(step)
    assert twice.duplicates_trained == 1


# Epochs ---------------------------------------------------------------------------------------------------------------


def test_a_group_is_consumed_by_its_last_epoch_and_ready_again_before() -> None:
    ledger = make(per_step=1, max_lag=2, epochs=3)
    ids = delivered(ledger, 1)
    for step in range(2):
        assert train(ledger, step, ids) == []
        assert ledger.find(ids[0]).state is LeaseState.READY
        assert (ledger.find(ids[0]).epochs, ledger.consumed) == (step + 1, 0)
    assert train(ledger, 2, ids) == ids
    assert ledger.find(ids[0]) is None
    assert (ledger.consumed, ledger.duplicates_trained, ledger.forfeited) == (1, 0, 0)


def test_an_epoch_that_nobody_acknowledged_does_not_count() -> None:
    ledger = make(per_step=1, max_lag=1, epochs=2)
    ids = delivered(ledger, 1)
    ledger.hand_out(0, ids)
    ledger.hand_back(0)
    assert [train(ledger, step, ids) for step in range(2)] == [[], ids]


def test_credits_count_uses_where_groups_are_used_more_than_once() -> None:
    """G = 2, L = 3, E = 2: (P + 4)·2 uses are allowed, so P + 4 groups."""
    ledger = make(per_step=2, max_lag=3, epochs=2)
    assert len(ledger.grant("a", 99, 0.0)) == 4
    ledger.publish(1)
    assert len(ledger.grant("a", 99, 0.0)) == 1


def test_a_trained_group_that_grew_too_old_is_consumed_and_its_other_epochs_become_credit() -> None:
    """G = 2, L = 1, E = 2: 4 uses are allowed at version 0. Two groups that forfeit one each leave room for another."""
    ledger = make(per_step=2, max_lag=1, epochs=2)
    ids = delivered(ledger, 2)
    train(ledger, 0, ids)
    assert ledger.credits == 0
    assert [ledger.refund(lease_id, Refund.EVICTED) for lease_id in ids] == [None, None]
    assert (ledger.consumed, ledger.refunded, ledger.forfeited, ledger.credits) == (2, 0, 2, 1)
    assert [ledger.deliver(lease_id) for lease_id in ids] == [Delivery.DUPLICATE] * 2
    assert [lease.prompt for lease in ledger.grant("a", 9, 0.0)] == [2]
    assert (ledger.lost, ledger.duplicates_trained) == (0, 0)


# Payloads that nobody can read ----------------------------------------------------------------------------------------


def test_a_group_dropped_from_its_step_is_issued_again_but_its_place_in_the_batch_stays_taken() -> None:
    """Or every lost payload would let one more group than the bound allows be outstanding, for ever."""
    ledger = make(per_step=2, max_lag=0)
    ids = delivered(ledger, 2)
    ledger.hand_out(0, ids)
    (lost,) = ledger.drop_from_step(0, ids[:1])
    assert (lost.id, ledger.refunds, ledger.steps) == (ids[0], {Refund.LOST: 1}, {0: ids[1:]})
    assert ledger.credits == 0
    assert ledger.acknowledge(0) == ids[1:]
    assert ledger.credits == 0
    ledger.publish(1)
    assert [(lease.prompt, lease.attempt) for lease in ledger.grant("a", 9, 0.0)] == [(lost.prompt, 1), (2, 0)]


def test_a_step_that_is_handed_back_after_a_drop_gets_its_full_batch() -> None:
    ledger = make(per_step=2, max_lag=0)
    ids = delivered(ledger, 2)
    ledger.hand_out(0, ids)
    ledger.drop_from_step(0, ids[:1])
    assert ledger.hand_back(0) == ids[1:]
    assert [lease.prompt for lease in ledger.grant("a", 9, 0.0)] == [0]


def test_a_step_of_which_every_group_is_dropped_can_be_acknowledged() -> None:
    ledger = make(per_step=2, max_lag=0)
    ids = delivered(ledger, 2)
    ledger.hand_out(0, ids)
    ledger.drop_from_step(0, ids)
    assert ledger.acknowledge(0) == []
    ledger.publish(1)
    assert ledger.credits == 2


def test_a_trained_group_that_is_dropped_is_consumed_and_its_place_costs_one_of_its_epochs() -> None:
    """E = 3: one epoch trained, one was to be this step, so one becomes credit once there are three of them."""
    ledger = make(per_step=1, max_lag=2, epochs=3)
    ids = delivered(ledger, 1)
    train(ledger, 0, ids)
    ledger.hand_out(1, ids)
    assert ledger.drop_from_step(1, ids) == []
    ledger.acknowledge(1)
    assert (ledger.consumed, ledger.refunded) == (1, 0)
    assert ledger.forfeited - ledger.absent == 1
    ledger.publish(2)
    assert ledger.credits == ((2 + 2 + 1) * 1 + 1) // 3 - 1


# Over the death of the process ----------------------------------------------------------------------------------------


def revived(ledger: Ledger, now: float = 0.0) -> Ledger:
    """A new ledger from the bytes of the old one's snapshot."""
    encoded = msgspec.msgpack.encode(ledger.snapshot())
    other = make(
        per_step=ledger.groups_per_step,
        max_lag=ledger.max_lag,
        timeout=ledger.lease_timeout_s,
        attempts=ledger.max_attempts,
        epochs=ledger.epochs_per_group,
        published=-1,
    )
    other.restore(msgspec.msgpack.decode(encoded, type=LedgerState), now)
    return other


def test_a_ledger_comes_back_from_its_snapshot_in_every_respect() -> None:
    ledger = make(per_step=2, max_lag=3, epochs=2, timeout=10.0)
    ids = delivered(ledger, 4)
    train(ledger, 0, ids[:2])
    train(ledger, 1, [ids[0], ids[2]])  # 0 is consumed, 1 and 2 have an epoch left
    ledger.refund(ids[1], Refund.EVICTED)
    ledger.publish(3)
    ledger.deliver(ids[0])
    ledger.refund(ledger.grant("b", 1, 0.0)[0].id, Refund.FAILED)
    ledger.grant("b", 2, 0.0, nbytes=77, asked="b#1/3")
    ledger.hand_out(2, ids[2:])
    ledger.drop_from_step(2, ids[3:])
    again = revived(ledger)
    assert again.snapshot() == ledger.snapshot()
    assert states(again) == states(ledger)
    assert (again.credits, again.lost, again.forfeited) == (ledger.credits, 0, 1)
    assert again.granted_to("b#1/3") == ledger.granted_to("b#1/3") != []
    assert again.judge(ids[0]) is Delivery.DUPLICATE
    assert again.acknowledge(2) == ledger.acknowledge(2) == ids[2:3]
    assert again.snapshot() == ledger.snapshot()


def test_leases_in_flight_get_their_whole_time_again() -> None:
    ledger = make(timeout=10.0)
    ledger.grant("a", 1, 0.0)
    ledger.grant("a", 1, 6.0)
    assert revived(ledger, now=100.0).next_deadline == 110.0


def test_a_ledger_that_could_not_go_on_still_cannot() -> None:
    ledger = make(attempts=1)
    ledger.refund(ledger.grant("a", 1, 0.0)[0].id, Refund.EXPIRED)
    assert revived(ledger).fatal == ledger.fatal != ""


@given(st.permutations(range(12)))
def test_the_tally_of_done_prompts_takes_each_number_once_in_any_order(order: list[int]) -> None:
    tally = Tally()
    assert all(tally.add(number) for number in order)
    assert not any(tally.add(number) for number in order)
    assert tally.watermark == 12
    assert not tally.above


def test_with_a_target_ess_leases_beyond_the_next_batch_are_earned_step_by_step_and_lost_below_it() -> None:
    """The budget is (P + 1)·G + h: h grows by G/4 a step at the target, and halves below it (steering.py)."""
    ledger = Ledger(
        groups_per_step=4, max_lag=2, group_size=2, lease_timeout_s=10.0, max_attempts=3, target_ess=0.9
    )  # fmt: skip
    ledger.publish(0)
    assert ledger.credits == 4
    for earned in (1, 2, 3):
        ledger.steer(1.0, tokens=100)
        assert ledger.credits == 4 + earned
    ledger.steer(0.0, tokens=0)  # nothing was measured
    assert ledger.credits == 7
    ledger.steer(0.5, tokens=100)  # smoothed to 0.75
    assert ledger.credits == 4 + 1
    for _ in range(100):
        ledger.steer(1.0, tokens=100)
    assert ledger.credits == (0 + 2 + 1) * 4  # never beyond what pacing allows


def test_without_a_target_ess_pacing_alone_decides() -> None:
    ledger = make(per_step=4, max_lag=2)
    ledger.steer(0.01, tokens=100)
    assert ledger.credits == 12
