"""The replay buffer: what it accepts, when it hands out, what it evicts, and the numbers that it reports."""

from __future__ import annotations

import math

import numpy as np
import pytest
from buffer_support import (
    balance,
    centred,
    describe,
    group,
    leases_in,
    put,
    replay_buffer,
    settings,
    token_mean,
    trajectory,
)

from streamrl import metrics
from streamrl.buffers.held import BYTES_PER_TRAJECTORY, PutStatus
from streamrl.buffers.offer import Offer
from streamrl.buffers.replay_buffer import ReplayBuffer
from streamrl.buffers.wire.messages import GroupMeta, InArena
from streamrl.buffers.wire.reference import Reference
from streamrl.errors import ConfigError, StreamRLError, WireError
from streamrl.types import Group, Lease


def fill(buffer: ReplayBuffer, count: int, version: int = 0) -> list[int]:
    """Lease and deliver ``count`` groups of ``version``; their lease ids."""
    leases = buffer.lease("a", count, 0.0)
    assert len(leases) == count
    for lease in leases:
        assert put(buffer, group(lease, version)) is PutStatus.ACCEPTED
    return [lease.id for lease in leases]


def offered(buffer: ReplayBuffer, step: int, version: int, ranks: int = 1) -> Offer:
    """The batch of a step that does not have to wait."""
    offer = buffer.next_batch(step, version, ranks)
    assert offer is not None
    return offer


def chosen(offer: Offer) -> list[int]:
    """Leases of the batch, also of groups without gradient."""
    return sorted(group.lease for group in offer.groups)


def step_through(buffer: ReplayBuffer, step: int, version: int) -> list[int]:
    """Hand out and acknowledge one batch; its leases."""
    offer = offered(buffer, step, version)
    buffer.acknowledge(step, offer.attempt, step)
    return chosen(offer)


def at_version(buffer: ReplayBuffer, version: int) -> ReplayBuffer:
    """Train on-policy batches until the trainer is at ``version`` and publish it."""
    for step in range(version):
        buffer.publish(step)
        fill(buffer, buffer.config.group.per_step, step)
        step_through(buffer, step, step)
    buffer.publish(version)
    return buffer


def in_arena(lease: Lease) -> InArena:
    return InArena(Reference("rollouter-0", 64 * lease.id, 1, lease.id), b"")


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
        put(buffer, group(lease, version))
    assert step_through(buffer, 2, 2) == [second.id, fourth.id]
    assert step_through(buffer, 3, 3) == [first.id, third.id]


def test_a_priority_comes_before_age() -> None:
    def by_best_reward(described: GroupMeta) -> float:
        return max(trajectory.reward for trajectory in described.trajectories)

    buffer = ReplayBuffer(settings(per_step=2, max_lag=4), centred, token_mean, by_best_reward)
    at_version(buffer, 2)
    old, best, good, older = buffer.lease("a", 4, 0.0)
    for lease, version, reward in ((old, 1, 1.0), (best, 2, 9.0), (good, 2, 3.0), (older, 0, 1.0)):
        put(buffer, group(lease, version, rewards=(0.0, reward)))
    assert step_through(buffer, 2, 2) == [best.id, good.id]
    assert step_through(buffer, 3, 3) == [old.id, older.id]


def test_a_group_is_consumed_when_its_step_is_acknowledged_and_frees_its_bytes() -> None:
    buffer = at_version(replay_buffer(per_step=2), 0)
    fill(buffer, 2)
    held = buffer.room.held
    assert held == 2 * (describe(group(Lease(0, 0, 2, 0, 1.0))).nbytes + 2 * BYTES_PER_TRAJECTORY)
    offer = offered(buffer, 0, 0)
    assert (buffer.room.held, buffer.ledger.consumed) == (held, 0)
    assert buffer.acknowledge(0, offer.attempt, 0) == 2
    assert (buffer.room.held, buffer.ledger.consumed) == (0, 2)
    assert buffer.acknowledge(0, offer.attempt, 0) == 0


def test_a_second_batch_needs_the_acknowledgement_of_the_first() -> None:
    buffer = at_version(replay_buffer(per_step=1), 0)
    fill(buffer, 2)
    buffer.next_batch(0, 0, 1)
    with pytest.raises(StreamRLError, match="step 0 is not acknowledged"):
        buffer.next_batch(1, 1, 1)


def test_groups_handed_back_by_a_dead_trainer_come_again_as_another_offer() -> None:
    buffer = at_version(replay_buffer(per_step=2), 0)
    ids = fill(buffer, 2)
    first = offered(buffer, 0, 0)
    assert buffer.hand_back() == 2
    assert buffer.hand_back() == 0
    with pytest.raises(StreamRLError, match="step 0 was acknowledged but is not handed out"):
        buffer.acknowledge(0, first.attempt, 0)
    second = offered(buffer, 0, 0, ranks=2)
    assert leases_in(second.parts) == ids
    assert second.attempt != first.attempt
    with pytest.raises(StreamRLError, match=f"for offer {first.attempt}, .* offered again as {second.attempt}"):
        buffer.acknowledge(0, first.attempt, 0)
    assert buffer.ledger.consumed == 0
    assert buffer.acknowledge(0, second.attempt, 0) == 2


# Several epochs -------------------------------------------------------------------------------------------------------


def test_a_group_is_in_as_many_batches_as_it_has_epochs() -> None:
    """G = 1, L = 1, E = 2: every group is in two batches, the older one always first."""
    buffer = replay_buffer(per_step=1, max_lag=1, buffer__epochs_per_group=2)
    batches = []
    for step in range(6):
        buffer.publish(step)
        for lease in buffer.lease("a", 9, 0.0):
            put(buffer, group(lease, step))
        batches += step_through(buffer, step, step)
    assert batches == [0, 0, 1, 1, 2, 2]
    assert buffer.summary()["duplicates_trained"] == 0


def test_a_group_with_epochs_left_keeps_its_bytes_until_it_grows_too_old() -> None:
    buffer = replay_buffer(per_step=1, max_lag=1, on_stale="evict", buffer__epochs_per_group=2)
    buffer.publish(0)
    fill(buffer, 1)
    held = buffer.room.held
    step_through(buffer, 0, 0)
    assert buffer.room.held == held
    assert buffer.next_batch(2, 2, 1) is None  # at lag 2
    assert (buffer.room.held, buffer.ledger.consumed, buffer.ledger.refunded) == (0, 1, 0)


# Payloads that nobody can read ----------------------------------------------------------------------------------------


def test_a_dropped_group_leaves_the_weights_of_the_others_as_they_were() -> None:
    """Ranks that have read their part train with the denominators of the full batch; so must all others."""
    buffer = at_version(replay_buffer(per_step=2), 0)
    gone, kept = buffer.lease("a", 2, 0.0)
    for lease in (gone, kept):
        put(buffer, group(lease))
    offer = offered(buffer, 0, 0)
    before = [part for part in offer.parts[0][0] if part.lease == kept.id]
    assert buffer.drop(0, offer.attempt, [gone.id]) == [gone]
    assert buffer.held(gone.id) is None
    assert [part for part in offer.parts[0][0] if part.lease == kept.id] == before
    assert before[0].token_weights == [1 / 8, 1 / 8]  # 2 groups × 2 trajectories × 2 sampled tokens
    assert buffer.drop(0, offer.attempt, [gone.id]) == []
    assert buffer.acknowledge(0, offer.attempt, 0) == 1
    assert (buffer.room.held, balance(buffer.ledger)) == (0, 0)


def test_a_batch_of_which_every_group_was_dropped_is_acknowledged_like_any_other() -> None:
    buffer = at_version(replay_buffer(per_step=2, max_lag=0), 0)
    ids = fill(buffer, 2)
    offer = offered(buffer, 0, 0)
    assert len(buffer.drop(0, offer.attempt, ids)) == 2
    assert buffer.acknowledge(0, offer.attempt, 0) == 0
    assert buffer.acknowledge(0, offer.attempt, 0) == 0
    buffer.publish(1)
    fill(buffer, 2, version=1)
    assert len(step_through(buffer, 1, 1)) == 2


def test_only_the_groups_of_the_present_offer_can_be_dropped() -> None:
    buffer = at_version(replay_buffer(per_step=1), 0)
    in_batch, ready = fill(buffer, 2)
    with pytest.raises(StreamRLError, match=r"step 0 \(offer 1\) is not handed out"):
        buffer.drop(0, 1, [in_batch])
    offer = offered(buffer, 0, 0)
    assert buffer.drop(0, offer.attempt, [ready]) == []
    with pytest.raises(StreamRLError, match="cannot be dropped"):
        buffer.drop(0, offer.attempt - 1, [in_batch])
    assert buffer.ledger.refunded == 0


def test_a_lost_holder_takes_its_leases_and_what_lies_in_its_memory_but_nothing_that_is_handed_out() -> None:
    buffer = at_version(replay_buffer(per_step=1, max_lag=4), 0)
    handed_out, by_reference, by_value, flying = buffer.lease("a", 4, 0.0)
    of_another = buffer.lease("b", 1, 0.0)[0]
    for lease in (handed_out, by_reference):
        buffer.put(describe(group(lease)), reference=in_arena(lease))
    assert chosen(offered(buffer, 0, 0)) == [handed_out.id]
    put(buffer, group(by_value))
    assert buffer.holder_lost("a") == [flying, by_reference]
    assert buffer.holder_lost("a") == []
    assert buffer.held(by_value.id) is not None
    assert buffer.held(handed_out.id) is not None
    assert buffer.ledger.is_in_flight(of_another.id)


def test_a_payload_elsewhere_takes_no_bytes_here() -> None:
    buffer = at_version(replay_buffer(per_step=1, queue__backend="nixl"), 0)
    lease = buffer.lease("a", 1, 0.0)[0]
    assert lease.nbytes == 0
    buffer.put(describe(group(lease)), reference=in_arena(lease))
    assert buffer.room.held == 2 * BYTES_PER_TRAJECTORY


def test_a_failure_of_a_lease_that_is_not_in_flight_is_ignored() -> None:
    buffer = at_version(replay_buffer(per_step=1), 0)
    ready = fill(buffer, 1)[0]
    assert [buffer.fail(lease_id) for lease_id in (ready, 99)] == [False, False]
    assert buffer.fail(buffer.lease("a", 1, 0.0)[0].id)
    assert buffer.ledger.refunded == 1


# The bound ------------------------------------------------------------------------------------------------------------


def test_mask_keeps_a_group_with_a_fresh_tail_and_says_which_versions_count() -> None:
    buffer = at_version(replay_buffer(per_step=1, max_lag=1), 3)
    lease = buffer.lease("a", 1, 0.0)[0]
    tails = [trajectory([(1, 4), (2, 1)], reward=reward) for reward in (0.0, 1.0)]
    put(buffer, Group(lease.id, lease.prompt, "sums", tails))
    offer = offered(buffer, 3, 3)
    assert (offer.version, offer.oldest_allowed) == (3, 2)
    assert leases_in(offer.parts) == [lease.id]
    assert offer.stats["lag/masked_tokens"] == 8
    assert offer.stats["lag/max"] == 1


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
    put(buffer, Group(lease.id, lease.prompt, "sums", [trajectory(versions, reward=reward) for reward in (0.0, 1.0)]))
    assert buffer.next_batch(3, 3, 1) is None
    assert buffer.room.held == 0
    again = buffer.lease("a", 1, 0.0)[0]
    assert (again.prompt, again.attempt) == (lease.prompt, 1)
    put(buffer, group(again, 3))
    assert offered(buffer, 3, 3).stats["lag/evicted_groups"] == 1


def test_wait_holds_the_batch_back_for_a_group_in_flight_that_is_due() -> None:
    buffer = replay_buffer(per_step=1, max_lag=1, on_stale="wait")
    buffer.publish(0)
    slow, quick = buffer.lease("a", 2, 0.0)
    put(buffer, group(quick, 0))
    step_through(buffer, 0, 0)
    buffer.publish(1)
    newer = buffer.lease("a", 1, 0.0)[0]
    put(buffer, group(newer, 1))
    assert buffer.next_batch(1, 1, 1) is None
    put(buffer, group(slow, 0))
    assert step_through(buffer, 1, 1) == [slow.id]


def test_wait_looks_ahead_when_two_groups_are_due_at_once() -> None:
    """Three groups granted at 0 are due at 2: the batch at 1 must hold one of them, not a newer one."""
    buffer = replay_buffer(per_step=1, max_lag=2, on_stale="wait")
    buffer.publish(0)
    _, slower, quick = buffer.lease("a", 3, 0.0)
    put(buffer, group(quick, 0))
    step_through(buffer, 0, 0)
    buffer.publish(1)
    newer = buffer.lease("a", 1, 0.0)[0]
    put(buffer, group(newer, 1))
    assert buffer.next_batch(1, 1, 1) is None
    put(buffer, group(slower, 0))
    assert step_through(buffer, 1, 1) == [slower.id]


def test_wait_does_not_wait_for_a_prompt_that_starts_afresh() -> None:
    buffer = replay_buffer(per_step=1, max_lag=1, on_stale="wait")
    buffer.publish(0)
    dead = buffer.lease("a", 1, 0.0)[0]
    quick = buffer.lease("b", 1, 0.0)[0]
    put(buffer, group(quick, 0))
    step_through(buffer, 0, 0)
    buffer.publish(1)
    put(buffer, group(buffer.lease("b", 1, 0.0)[0], 1))
    assert buffer.next_batch(1, 1, 1) is None
    assert buffer.holder_lost("a") == [dead]
    assert buffer.next_batch(1, 1, 1) is not None
    assert buffer.lease("b", 1, 0.0)[0].prompt == dead.prompt


def test_wait_refuses_a_group_older_than_its_lease_allows() -> None:
    buffer = at_version(replay_buffer(per_step=1, max_lag=2, on_stale="wait"), 1)
    lease = buffer.lease("zombie", 1, 0.0)[0]
    assert put(buffer, group(lease, 0)) is PutStatus.STALE
    again = buffer.lease("a", 1, 0.0)[0]
    assert (again.prompt, again.attempt) == (lease.prompt, 1)


# Gradients ------------------------------------------------------------------------------------------------------------


def test_zero_variance_groups_are_dropped_only_if_asked_for() -> None:
    for drop, status in ((True, PutStatus.FILTERED), (False, PutStatus.ACCEPTED)):
        buffer = at_version(replay_buffer(per_step=1, group__drop_zero_variance=drop), 0)
        lease = buffer.lease("a", 1, 0.0)[0]
        assert put(buffer, group(lease, rewards=(1.0, 1.0))) is status
        assert (buffer.next_batch(0, 0, 1) is None) is drop


def test_a_batch_without_any_gradient_is_handed_out_with_empty_micro_batches() -> None:
    buffer = at_version(replay_buffer(per_step=2), 0)
    for lease in buffer.lease("a", 2, 0.0):
        put(buffer, group(lease, rewards=(1.0, 1.0)))
    offer = offered(buffer, 0, 0, ranks=3)
    assert offer.parts == [[[]], [[]], [[]]]
    assert buffer.acknowledge(0, offer.attempt, 0) == 2


def test_weights_and_advantages_come_from_the_full_batch() -> None:
    """A group without gradient is not sent to the trainer, but its tokens count in the denominator."""
    buffer = at_version(replay_buffer(per_step=2), 0)
    flat, useful = buffer.lease("a", 2, 0.0)
    put(buffer, group(flat, rewards=(1.0, 1.0)))
    put(buffer, group(useful, rewards=(0.0, 1.0)))
    offer = offered(buffer, 0, 0)
    assert leases_in(offer.parts) == [useful.id]
    part = offer.parts[0][0][0]
    assert (part.rows, part.advantages) == ([0, 1], [-0.5, 0.5])
    assert part.token_weights == [1 / 8, 1 / 8]  # 2 groups × 2 trajectories × 2 sampled tokens


def test_a_trajectory_without_a_sampled_token_counts_in_the_group_but_is_not_trained() -> None:
    buffer = at_version(replay_buffer(per_step=1), 0)
    lease = buffer.lease("a", 1, 0.0)[0]
    cut = trajectory([], reward=0.0)
    answered = trajectory([(0, 2)], reward=1.0)
    assert put(buffer, Group(lease.id, lease.prompt, "sums", [cut, answered])) is PutStatus.ACCEPTED
    part = offered(buffer, 0, 0).parts[0][0][0]
    assert (part.rows, part.advantages) == ([1], [0.5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: setattr(g, "prompt", 9), "expected prompt 0, got 9"),
        (lambda g: g.trajectories.append(trajectory([(0, 2)])), "expected episodes 0 to 1, got 2"),
        (lambda g: g.trajectories.clear(), "expected trajectories of 1 to 2 episodes, got none"),
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
        put(buffer, bad)
    assert put(buffer, group(lease)) is PutStatus.ACCEPTED


# Numbers --------------------------------------------------------------------------------------------------------------


def test_a_token_budget_under_the_longest_trajectory_is_refused() -> None:
    with pytest.raises(ConfigError, match="trainer.token_budget=63"):
        replay_buffer(trainer__token_budget=63)


def test_statistics_cover_every_group_delivered_since_the_previous_batch() -> None:
    buffer = at_version(replay_buffer(per_step=1, max_lag=4, group__drop_zero_variance=True), 0)
    solved, useful, other, early = buffer.lease("a", 4, 0.0)
    put(buffer, group(solved, rewards=(1.0, 1.0)))
    put(buffer, group(useful, rewards=(0.0, 1.0)))
    long = [trajectory([(0, 9)], reward=3.0, turns=2, truncated=True), trajectory([(0, 1)], reward=0.0)]
    put(buffer, Group(other.id, other.prompt, "riddles", long))
    offer = offered(buffer, 0, 0)
    stats = offer.stats
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
    buffer.acknowledge(0, offer.attempt, 0)
    put(buffer, group(early, rewards=(0.0, 0.5)))
    stats = offered(buffer, 1, 1).stats
    assert stats["reward/mean"] == pytest.approx(0.25)
    assert stats["reward/riddles/mean"] == 0


def test_rewards_are_counted_by_episode_and_lengths_by_trajectory() -> None:
    """Episode 0 is worth 1 in both of its trajectories; the branches of episode 1 are worth 2 and 4, 3 on average."""
    buffer = at_version(replay_buffer(per_step=1), 0)
    lease = buffer.lease("a", 1, 0.0)[0]
    parts = [(0, 1.0), (0, 1.0), (1, 2.0), (1, 2.0), (1, 4.0)]
    made = [trajectory([(0, 2 + episode)], reward=reward, episode=episode) for episode, reward in parts]
    assert put(buffer, Group(lease.id, lease.prompt, "sums", made)) is PutStatus.ACCEPTED
    stats = offered(buffer, 0, 0).stats
    assert stats["reward/mean"] == stats["reward/sums/mean"] == (1.0 + 3.0) / 2
    assert stats["reward/std"] == np.std([1.0, 3.0])
    assert stats["length/mean"] == (2 + 2 + 3 + 3 + 3) / 5


def test_branches_that_are_worth_the_same_have_no_variance() -> None:
    buffer = at_version(replay_buffer(per_step=1, group__drop_zero_variance=True), 0)
    lease = buffer.lease("a", 1, 0.0)[0]
    made = [trajectory([(0, 2)], reward=1.0, episode=episode) for episode in (0, 0, 1)]
    assert put(buffer, Group(lease.id, lease.prompt, "sums", made)) is PutStatus.FILTERED


def test_with_nothing_new_the_numbers_are_those_of_the_batch_itself() -> None:
    buffer = at_version(replay_buffer(per_step=1), 0)
    fill(buffer, 2)
    step_through(buffer, 0, 0)
    assert offered(buffer, 1, 1).stats["reward/mean"] == 0.5


def test_lag_numbers_weigh_tokens() -> None:
    """20 tokens at lag 0, one at lag 2 and one at lag 3, which is masked: 95 % of the 21 trained have lag 0."""
    buffer = at_version(replay_buffer(per_step=1, max_lag=2), 3)
    lease = buffer.lease("a", 1, 0.0)[0]
    both = [trajectory([(0, 1), (1, 1)], reward=1.0), trajectory([(3, 20)], reward=0.0)]
    put(buffer, Group(lease.id, lease.prompt, "sums", both))
    lag = {key: value for key, value in offered(buffer, 3, 3).stats.items() if key.startswith("lag/")}
    assert lag == {
        "lag/mean": pytest.approx(2 / 21),
        "lag/p95": 0,
        "lag/max": 2,
        "lag/masked_tokens": 1,
        "lag/evicted_groups": 0,
        "lag/headroom": 0,
        "lag/bound": 2,
    }


def test_every_key_of_the_buffers_groups_is_reported_and_documented() -> None:
    buffer = at_version(replay_buffer(per_step=1), 0)
    fill(buffer, 1)
    stats = offered(buffer, 0, 0, ranks=2).stats
    line = metrics.complete_line(stats)
    groups = ("reward/", "lag/", "length/", "buffer/", "ledger/")
    expected = {prefix + name for prefix in groups for name in metrics.GROUPS[prefix]}
    assert expected <= set(stats)
    assert all(math.isfinite(value) for value in line.values())


def test_the_ledger_numbers_add_up_in_every_line() -> None:
    buffer = at_version(replay_buffer(per_step=2, max_lag=1), 1)
    fill(buffer, 3, version=1)
    buffer.lease("a", 1, 0.0)
    stats = offered(buffer, 1, 1).stats
    assert (stats["buffer/ready_groups"], stats["ledger/ready"], stats["ledger/in_flight"]) == (1, 3, 1)
    parts = ("consumed", "in_flight", "ready", "refunded")
    assert stats["ledger/issued"] == sum(stats[f"ledger/{part}"] for part in parts) == 6


def test_an_unknown_policy_for_stale_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="drop"):
        ReplayBuffer(settings(on_stale="drop"), centred, token_mean)
