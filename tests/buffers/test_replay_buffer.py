"""The replay buffer: what it accepts, when it hands out, what it evicts, and the numbers that it reports."""

from __future__ import annotations

import math

import numpy as np
import pytest
from buffer_support import group, replay_buffer, settings, trajectory

from streamrl import metrics
from streamrl.buffers.replay_buffer import BYTES_PER_TOKEN, PutStatus, ReplayBuffer
from streamrl.errors import ConfigError, StreamRLError, WireError
from streamrl.types import Group, RankBatch


def fill(buffer: ReplayBuffer, count: int, version: int = 0) -> list[int]:
    """Lease and deliver ``count`` groups of ``version``; their lease ids."""
    leases = buffer.lease("a", count, 0.0)
    assert len(leases) == count
    for lease in leases:
        assert buffer.put(group(lease, version)) is PutStatus.ACCEPTED
    return [lease.id for lease in leases]


def trained(parts: list[RankBatch]) -> list[int]:
    """Lease ids of the groups in the micro-batches."""
    return sorted({part.lease for rank in parts for micro_batch in rank.micro_batches for part in micro_batch})


def at_version(buffer: ReplayBuffer, version: int) -> ReplayBuffer:
    """Train on-policy batches until the trainer is at ``version`` and publish it."""
    for step in range(version):
        buffer.ledger.publish(step)
        fill(buffer, buffer.config.group.per_step, step)
        assert buffer.next_batch(step, step, 1) is not None
        buffer.acknowledge(step)
    buffer.ledger.publish(version)
    return buffer


def test_a_batch_needs_groups_per_step_groups() -> None:
    buffer = at_version(replay_buffer(per_step=3), 0)
    fill(buffer, 2)
    assert buffer.next_batch(0, 0, 1) is None
    fill(buffer, 1)
    assert buffer.next_batch(0, 0, 1) is not None


def test_the_oldest_tokens_go_first_then_the_older_lease() -> None:
    buffer = at_version(replay_buffer(per_step=2, max_lag=4), 2)
    first, second, third, fourth = buffer.lease("a", 4, 0.0)
    for lease, version in ((first, 2), (second, 1), (third, 2), (fourth, 1)):
        buffer.put(group(lease, version))
    batch = buffer.next_batch(2, 2, 1)
    assert batch is not None
    assert trained(batch) == [second.id, fourth.id]
    buffer.acknowledge(2)
    batch = buffer.next_batch(3, 3, 1)
    assert batch is not None
    assert trained(batch) == [first.id, third.id]


def test_a_group_is_consumed_when_its_step_is_acknowledged_and_frees_its_bytes() -> None:
    buffer = at_version(replay_buffer(per_step=2), 0)
    fill(buffer, 2)
    held = buffer.bytes
    assert held == 2 * 2 * 5 * BYTES_PER_TOKEN  # 2 groups of 2 trajectories of 3 prompt and 2 sampled tokens
    buffer.next_batch(0, 0, 1)
    assert (buffer.bytes, buffer.ledger.consumed) == (held, 0)
    assert buffer.acknowledge(0) == 2
    assert (buffer.bytes, buffer.ledger.consumed) == (0, 2)
    assert buffer.acknowledge(0) == 0


def test_a_second_batch_needs_the_acknowledgement_of_the_first() -> None:
    buffer = at_version(replay_buffer(per_step=1), 0)
    fill(buffer, 2)
    buffer.next_batch(0, 0, 1)
    with pytest.raises(StreamRLError, match="step 0 is not acknowledged"):
        buffer.next_batch(1, 1, 1)


def test_groups_handed_back_by_a_dead_trainer_come_again() -> None:
    buffer = at_version(replay_buffer(per_step=2), 0)
    ids = fill(buffer, 2)
    buffer.next_batch(0, 0, 1)
    assert buffer.hand_back() == 2
    batch = buffer.next_batch(0, 0, 2)
    assert batch is not None
    assert trained(batch) == ids


def test_mask_keeps_a_group_with_a_fresh_tail_and_says_which_versions_count() -> None:
    buffer = at_version(replay_buffer(per_step=1, max_lag=1), 3)
    lease = buffer.lease("a", 1, 0.0)[0]
    tails = [trajectory([(1, 4), (2, 1)], reward=reward) for reward in (0.0, 1.0)]
    buffer.put(Group(lease.id, lease.prompt, "sums", tails))
    batch = buffer.next_batch(3, 3, 1)
    assert batch is not None
    assert (batch[0].version, batch[0].oldest_allowed) == (3, 2)
    assert trained(batch) == [lease.id]
    assert batch[0].stats["lag/masked_tokens"] == 8
    assert batch[0].stats["lag/max"] == 1


@pytest.mark.parametrize(
    ("on_stale", "versions"),
    [("mask", [(1, 3)]), ("evict", [(1, 3), (2, 5)]), ("mask", [(4, 2)]), ("evict", [(3, 1), (4, 2)])],
    ids=["mask, no fresh token", "evict, one stale token", "mask, of a later version", "evict, of a later version"],
)
def test_a_group_that_may_not_be_used_is_evicted_and_its_prompt_issued_again(
    on_stale: str, versions: list[tuple[int, int]]
) -> None:
    buffer = at_version(replay_buffer(per_step=1, max_lag=1, on_stale=on_stale), 3)
    lease = buffer.lease("a", 1, 0.0)[0]
    buffer.put(Group(lease.id, lease.prompt, "sums", [trajectory(versions, reward=reward) for reward in (0.0, 1.0)]))
    assert buffer.next_batch(3, 3, 1) is None
    assert buffer.bytes == 0
    again = buffer.lease("a", 1, 0.0)[0]
    assert (again.prompt, again.attempt) == (lease.prompt, 1)
    buffer.put(group(again, 3))
    batch = buffer.next_batch(3, 3, 1)
    assert batch is not None
    assert batch[0].stats["lag/evicted_groups"] == 1


def test_wait_holds_the_batch_back_for_a_group_in_flight_that_is_due() -> None:
    buffer = replay_buffer(per_step=1, max_lag=1, on_stale="wait")
    buffer.ledger.publish(0)
    slow, quick = buffer.lease("a", 2, 0.0)
    buffer.put(group(quick, 0))
    assert buffer.next_batch(0, 0, 1) is not None
    buffer.acknowledge(0)
    buffer.ledger.publish(1)
    newer = buffer.lease("a", 1, 0.0)[0]
    buffer.put(group(newer, 1))
    assert buffer.next_batch(1, 1, 1) is None
    buffer.put(group(slow, 0))
    batch = buffer.next_batch(1, 1, 1)
    assert batch is not None
    assert trained(batch) == [slow.id]


def test_wait_looks_ahead_when_two_groups_are_due_at_once() -> None:
    """Three groups granted at 0 are due at 2: the batch at 1 must hold one of them, not a newer one."""
    buffer = replay_buffer(per_step=1, max_lag=2, on_stale="wait")
    buffer.ledger.publish(0)
    slow, slower, quick = buffer.lease("a", 3, 0.0)
    buffer.put(group(quick, 0))
    assert buffer.next_batch(0, 0, 1) is not None
    buffer.acknowledge(0)
    buffer.ledger.publish(1)
    newer = buffer.lease("a", 1, 0.0)[0]
    buffer.put(group(newer, 1))
    assert buffer.next_batch(1, 1, 1) is None
    buffer.put(group(slower, 0))
    batch = buffer.next_batch(1, 1, 1)
    assert batch is not None
    assert trained(batch) == [slower.id]


def test_wait_does_not_wait_for_a_prompt_that_starts_afresh() -> None:
    buffer = replay_buffer(per_step=1, max_lag=1, on_stale="wait")
    buffer.ledger.publish(0)
    dead = buffer.lease("a", 1, 0.0)[0]
    quick = buffer.lease("b", 1, 0.0)[0]
    buffer.put(group(quick, 0))
    buffer.next_batch(0, 0, 1)
    buffer.acknowledge(0)
    buffer.ledger.publish(1)
    buffer.put(group(buffer.lease("b", 1, 0.0)[0], 1))
    assert buffer.next_batch(1, 1, 1) is None
    buffer.ledger.holder_lost("a")
    assert buffer.next_batch(1, 1, 1) is not None
    assert buffer.lease("b", 1, 0.0)[0].prompt == dead.prompt


def test_wait_refuses_a_group_older_than_its_lease_allows() -> None:
    buffer = at_version(replay_buffer(per_step=1, max_lag=2, on_stale="wait"), 1)
    lease = buffer.lease("zombie", 1, 0.0)[0]
    assert buffer.put(group(lease, 0)) is PutStatus.STALE
    again = buffer.lease("a", 1, 0.0)[0]
    assert (again.prompt, again.attempt) == (lease.prompt, 1)


def test_zero_variance_groups_are_dropped_only_if_asked_for() -> None:
    for drop, status in ((True, PutStatus.FILTERED), (False, PutStatus.ACCEPTED)):
        buffer = at_version(replay_buffer(per_step=1, group__drop_zero_variance=drop), 0)
        lease = buffer.lease("a", 1, 0.0)[0]
        assert buffer.put(group(lease, rewards=(1.0, 1.0))) is status
        assert (buffer.next_batch(0, 0, 1) is None) is drop


def test_a_batch_without_any_gradient_is_handed_out_with_empty_micro_batches() -> None:
    buffer = at_version(replay_buffer(per_step=2), 0)
    for lease in buffer.lease("a", 2, 0.0):
        buffer.put(group(lease, rewards=(1.0, 1.0)))
    batch = buffer.next_batch(0, 0, 3)
    assert batch is not None
    assert [rank.micro_batches for rank in batch] == [[[]], [[]], [[]]]
    assert buffer.acknowledge(0) == 2


def test_weights_and_advantages_come_from_the_full_batch() -> None:
    """A group without gradient is not sent to the trainer, but its tokens count in the denominator."""
    buffer = at_version(replay_buffer(per_step=2), 0)
    flat, useful = buffer.lease("a", 2, 0.0)
    buffer.put(group(flat, rewards=(1.0, 1.0)))
    buffer.put(group(useful, rewards=(0.0, 1.0)))
    batch = buffer.next_batch(0, 0, 1)
    assert batch is not None
    assert trained(batch) == [useful.id]
    part = batch[0].micro_batches[0][0]
    np.testing.assert_array_equal(part.advantages, [-0.5, 0.5])
    np.testing.assert_array_equal(part.token_weights, [1 / 8, 1 / 8])  # 2 groups × 2 trajectories × 2 sampled tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: setattr(g, "prompt", 9), "expected prompt 0, got 9"),
        (lambda g: g.trajectories.append(g.trajectories[0]), "expected 1 to 2 trajectories, got 3"),
        (lambda g: g.trajectories.clear(), "expected 1 to 2 trajectories, got 0"),
        (lambda g: g.trajectories.append(trajectory([(0, 99)])) or g.trajectories.pop(0), "model.max_length=64"),
        (lambda g: setattr(g, "trajectories", [trajectory([])] * 2), "expected a sampled token"),
    ],
    ids=["prompt", "too many", "none", "too long", "nothing sampled"],
)
def test_a_group_that_does_not_fit_its_lease_is_refused_and_the_lease_stays(change: object, message: str) -> None:
    buffer = at_version(replay_buffer(), 0)
    lease = buffer.lease("a", 1, 0.0)[0]
    bad = group(lease)
    change(bad)  # type: ignore[operator]
    with pytest.raises(WireError, match=message):
        buffer.put(bad)
    assert buffer.put(group(lease)) is PutStatus.ACCEPTED


def test_a_trajectory_without_a_sampled_token_counts_in_the_group_but_is_not_trained() -> None:
    buffer = at_version(replay_buffer(per_step=1), 0)
    lease = buffer.lease("a", 1, 0.0)[0]
    cut = trajectory([], reward=0.0)
    answered = trajectory([(0, 2)], reward=1.0)
    assert buffer.put(Group(lease.id, lease.prompt, "sums", [cut, answered])) is PutStatus.ACCEPTED
    batch = buffer.next_batch(0, 0, 1)
    assert batch is not None
    part = batch[0].micro_batches[0][0]
    assert part.trajectories == [answered]
    np.testing.assert_array_equal(part.advantages, [0.5])


def test_leases_stop_while_their_worst_case_would_pass_the_byte_limit() -> None:
    worst = 2 * 64 * BYTES_PER_TOKEN
    buffer = at_version(replay_buffer(per_step=2, max_lag=4, buffer__max_bytes=3 * worst), 0)
    assert len(buffer.lease("a", 99, 0.0)) == 3
    assert buffer.lease("a", 99, 0.0) == []


def test_ready_bytes_count_as_they_are_and_free_the_rest_of_the_promise() -> None:
    worst = 2 * 64 * BYTES_PER_TOKEN
    buffer = at_version(replay_buffer(per_step=2, max_lag=4, buffer__max_bytes=3 * worst), 0)
    for lease in buffer.lease("a", 99, 0.0):
        buffer.put(group(lease))
    assert buffer.bytes == 3 * 2 * 5 * BYTES_PER_TOKEN
    assert len(buffer.lease("a", 99, 0.0)) == (3 * worst - buffer.bytes) // worst == 2


def test_a_byte_limit_under_one_batch_is_refused_with_the_way_out() -> None:
    need = 2 * 2 * 64 * BYTES_PER_TOKEN
    with pytest.raises(ConfigError, match=f"buffer.max_bytes={need} or more"):
        replay_buffer(per_step=2, size=2, buffer__max_bytes=need - 1)
    replay_buffer(per_step=2, size=2, buffer__max_bytes=need)


def test_a_token_budget_under_the_longest_trajectory_is_refused() -> None:
    with pytest.raises(ConfigError, match="trainer.token_budget=63"):
        replay_buffer(trainer__token_budget=63)


def test_statistics_cover_every_group_delivered_since_the_previous_batch() -> None:
    buffer = at_version(replay_buffer(per_step=1, max_lag=4, group__drop_zero_variance=True), 0)
    solved, useful, other, early = buffer.lease("a", 4, 0.0)
    buffer.put(group(solved, rewards=(1.0, 1.0)))
    buffer.put(group(useful, rewards=(0.0, 1.0)))
    long = [trajectory([(0, 9)], reward=3.0, turns=2, truncated=True), trajectory([(0, 1)], reward=0.0)]
    buffer.put(Group(other.id, other.prompt, "riddles", long))
    batch = buffer.next_batch(0, 0, 1)
    assert batch is not None
    stats = batch[0].stats
    rewards = [1, 1, 0, 1, 3, 0]
    assert stats["reward/mean"] == pytest.approx(np.mean(rewards))
    assert stats["reward/std"] == pytest.approx(np.std(rewards))
    assert stats["reward/zero_variance_fraction"] == pytest.approx(1 / 3)
    assert stats["reward/sums/mean"] == pytest.approx(0.75)
    assert stats["reward/riddles/mean"] == pytest.approx(1.5)
    assert stats["length/mean"] == pytest.approx((4 * 2 + 9 + 1) / 6)
    assert stats["length/max"] == 9
    assert stats["length/truncated_fraction"] == pytest.approx(1 / 6)
    assert stats["length/turns_mean"] == pytest.approx(7 / 6)
    buffer.acknowledge(0)
    buffer.put(group(early, rewards=(0.0, 0.5)))
    batch = buffer.next_batch(1, 1, 1)
    assert batch is not None
    assert batch[0].stats["reward/mean"] == pytest.approx(0.25)
    assert batch[0].stats["reward/riddles/mean"] == 0


def test_with_nothing_new_the_numbers_are_those_of_the_batch_itself() -> None:
    buffer = at_version(replay_buffer(per_step=1), 0)
    fill(buffer, 2)
    buffer.next_batch(0, 0, 1)
    buffer.acknowledge(0)
    batch = buffer.next_batch(1, 1, 1)
    assert batch is not None
    assert batch[0].stats["reward/mean"] == 0.5


def test_lag_numbers_weigh_tokens() -> None:
    """20 tokens at lag 0, one at lag 2 and one at lag 3, which is masked: 95 % of the 21 trained have lag 0."""
    buffer = at_version(replay_buffer(per_step=1, max_lag=2), 3)
    lease = buffer.lease("a", 1, 0.0)[0]
    both = [trajectory([(0, 1), (1, 1)], reward=1.0), trajectory([(3, 20)], reward=0.0)]
    buffer.put(Group(lease.id, lease.prompt, "sums", both))
    batch = buffer.next_batch(3, 3, 1)
    assert batch is not None
    lag = {key: value for key, value in batch[0].stats.items() if key.startswith("lag/")}
    assert lag == {
        "lag/mean": pytest.approx(2 / 21),
        "lag/p95": 0,
        "lag/max": 2,
        "lag/masked_tokens": 1,
        "lag/evicted_groups": 0,
        "lag/bound": 2,
    }


def test_every_key_of_the_buffers_groups_is_reported_and_documented() -> None:
    buffer = at_version(replay_buffer(per_step=1), 0)
    fill(buffer, 1)
    batch = buffer.next_batch(0, 0, 2)
    assert batch is not None
    assert batch[0].stats == batch[1].stats
    line = metrics.complete_line(batch[0].stats)
    groups = ("reward/", "lag/", "length/", "buffer/", "ledger/")
    expected = {prefix + name for prefix in groups for name in metrics.GROUPS[prefix]}
    assert expected <= set(batch[0].stats)
    assert all(math.isfinite(value) for value in line.values())


def test_the_ledger_numbers_add_up_in_every_line() -> None:
    buffer = at_version(replay_buffer(per_step=2, max_lag=1), 1)
    fill(buffer, 3, version=1)
    buffer.lease("a", 1, 0.0)
    batch = buffer.next_batch(1, 1, 1)
    assert batch is not None
    stats = batch[0].stats
    assert (stats["buffer/ready_groups"], stats["ledger/ready"], stats["ledger/in_flight"]) == (1, 3, 1)
    parts = ("consumed", "in_flight", "ready", "refunded")
    assert stats["ledger/issued"] == sum(stats[f"ledger/{part}"] for part in parts) == 6


def test_an_unknown_policy_for_stale_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="drop"):
        ReplayBuffer(settings(on_stale="drop"), lambda rewards: rewards, lambda counts: counts)
