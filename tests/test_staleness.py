"""Pacing, the bound, and the rule of ``on_stale: wait``, against schedules worked out by hand."""

from __future__ import annotations

import itertools

import pytest

from streamrl.staleness import credits, may_hand_out, oldest_allowed


@pytest.mark.parametrize("max_lag", [0, 1, 4])
def test_nothing_is_granted_before_version_0_is_published(max_lag: int) -> None:
    assert credits(0, published=-1, max_lag=max_lag, groups_per_step=8) == 0


@pytest.mark.parametrize(
    ("granted_net", "published", "max_lag", "expected"),
    [
        (0, 0, 0, 4),  # on-policy: one batch
        (4, 0, 0, 0),  # the step is done, but its version is not published yet
        (4, 1, 0, 4),
        (0, 0, 1, 8),  # one batch ahead
        (7, 0, 1, 1),
        (12, 1, 1, 0),
        (9, 0, 4, 11),
    ],
)
def test_credits_follow_the_published_version(granted_net: int, published: int, max_lag: int, expected: int) -> None:
    assert credits(granted_net, published, max_lag, groups_per_step=4) == expected


def test_the_oldest_trainable_version_lies_max_lag_behind() -> None:
    assert [oldest_allowed(7, max_lag) for max_lag in (0, 1, 4)] == [7, 6, 3]


def test_a_group_that_is_due_now_must_be_in_the_batch() -> None:
    assert not may_hand_out(3, max_lag=1, groups_per_step=2, remaining=[2])
    assert may_hand_out(3, max_lag=1, groups_per_step=2, remaining=[3])


def test_later_batches_need_room_for_what_is_due_later() -> None:
    """Two groups due at version 2 do not fit into the one batch of one group that is left at version 2."""
    assert may_hand_out(0, max_lag=2, groups_per_step=1, remaining=[0, 0])
    assert not may_hand_out(1, max_lag=2, groups_per_step=1, remaining=[0, 0])


def _can_meet_all(version: int, max_lag: int, per_step: int, remaining: list[int]) -> bool:
    """By brute force: is there an assignment of the groups to the steps after ``version`` with none too late?"""
    due = [oldest + max_lag for oldest in remaining]
    steps = range(version + 1, version + 2 + len(remaining))
    return any(
        all(step <= limit for step, limit in zip(order, due, strict=True))
        and all(order.count(step) <= per_step for step in steps)
        for order in itertools.product(steps, repeat=len(remaining))
    )


@pytest.mark.parametrize("per_step", [1, 2])
@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_waiting_is_exactly_the_question_whether_a_schedule_exists(max_lag: int, per_step: int) -> None:
    version = 5
    for count in range(4):
        for remaining in itertools.combinations_with_replacement(range(3, 7), count):
            expected = _can_meet_all(version, max_lag, per_step, list(remaining))
            assert may_hand_out(version, max_lag, per_step, remaining) == expected, remaining
