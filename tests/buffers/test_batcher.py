"""Batch planning: nothing is lost, nothing is over the budget, ranks are balanced and run in step."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from buffer_support import describe, trajectory
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffers.batcher import plan
from streamrl.buffers.wire.messages import GroupMeta, MicroBatches, Part
from streamrl.errors import ConfigError
from streamrl.types import Group

PROMPT = 3


def simple_plan(groups: list[GroupMeta], ranks: int, token_budget: int, oldest_allowed: int = 0) -> list[MicroBatches]:
    """Every trajectory's advantage is its reward, its weight 0.01 × (its place in the group + 1)."""
    advantages = [np.array([one.reward for one in group.trajectories]) for group in groups]
    weights = [0.01 * np.arange(1, len(group.trajectories) + 1) for group in groups]
    return plan(groups, advantages, weights, ranks=ranks, token_budget=token_budget, oldest_allowed=oldest_allowed)


def of_lengths(lease: int, lengths: list[int], prompt: tuple[int, ...] = (1,) * PROMPT) -> GroupMeta:
    """A group whose trajectories sample so many tokens each."""
    each = [trajectory([(0, length)], prompt=prompt, reward=1.0) for length in lengths]
    return describe(Group(lease, lease, "sums", each))


def planned_rows(micro_batches: MicroBatches) -> Counter[tuple[int, int]]:
    """Lease and place of every trajectory."""
    return Counter((part.lease, row) for batch in micro_batches for part in batch for row in part.rows)


def tokens(parts: list[Part], groups: list[GroupMeta]) -> int:
    """What the trainer computes for these parts: each prompt once, then the rest of each trajectory."""
    described = {group.lease: group for group in groups}
    return sum(
        described[part.lease].shared
        + sum(described[part.lease].trajectories[row].length - described[part.lease].shared for row in part.rows)
        for part in parts
    )


groups_of_lengths = st.lists(st.lists(st.integers(1, 17), min_size=1, max_size=5), min_size=1, max_size=9)


@given(groups_of_lengths, st.integers(1, 4), st.integers(20, 60))
def test_every_trajectory_is_planned_once_within_the_budget_in_equal_counts(
    lengths: list[list[int]], ranks: int, token_budget: int
) -> None:
    groups = [of_lengths(lease, each) for lease, each in enumerate(lengths)]
    planned = simple_plan(groups, ranks, token_budget)
    assert len(planned) == ranks
    assert len({len(micro_batches) for micro_batches in planned}) == 1
    assert len(planned[0]) >= 1
    assert all(tokens(batch, groups) <= token_budget for micro_batches in planned for batch in micro_batches)
    everything = Counter((lease, place) for lease, each in enumerate(lengths) for place in range(len(each)))
    assert sum((planned_rows(micro_batches) for micro_batches in planned), Counter()) == everything


@given(groups_of_lengths, st.integers(1, 4))
def test_ranks_differ_by_at_most_the_largest_part(lengths: list[list[int]], ranks: int) -> None:
    groups = [of_lengths(lease, each) for lease, each in enumerate(lengths)]
    planned = simple_plan(groups, ranks, token_budget=1000)
    loads = [sum(tokens(batch, groups) for batch in micro_batches) for micro_batches in planned]
    assert max(loads) - min(loads) <= max(PROMPT + sum(each) for each in lengths)


def test_the_same_groups_give_the_same_plan() -> None:
    groups = [of_lengths(lease, [4, 9, 4]) for lease in range(7)]
    assert simple_plan(groups, ranks=3, token_budget=40) == simple_plan(groups, ranks=3, token_budget=40)


def test_the_largest_groups_are_placed_first() -> None:
    groups = [of_lengths(0, [2]), of_lengths(1, [10]), of_lengths(2, [7]), of_lengths(3, [5])]
    planned = simple_plan(groups, ranks=2, token_budget=1000)
    assert [[part.lease for part in rank[0]] for rank in planned] == [[1, 0], [2, 3]]


def test_a_shared_prompt_is_counted_once() -> None:
    groups = [of_lengths(0, [4, 2, 1], prompt=(1, 2, 3, 4, 5))]
    assert len(simple_plan(groups, 1, token_budget=5 + 4 + 2 + 1)[0]) == 1
    assert len(simple_plan(groups, 1, token_budget=5 + 4 + 2)[0]) == 2


def test_only_the_common_part_of_different_prompts_is_shared() -> None:
    pair = [trajectory([(0, 2)], prompt=(1, 2, 3), reward=1.0), trajectory([(0, 4)], prompt=(1, 2, 9, 9), reward=1.0)]
    groups = [describe(Group(0, 0, "sums", pair))]
    cost = 2 + (3 + 2 - 2) + (4 + 4 - 2)
    assert len(simple_plan(groups, 1, token_budget=cost)[0]) == 1
    assert len(simple_plan(groups, 1, token_budget=cost - 1)[0]) == 2


def test_a_group_over_the_budget_is_split_and_each_part_repeats_the_prompt() -> None:
    groups = [of_lengths(0, [6, 6, 6], prompt=tuple(range(1, 9)))]
    planned = simple_plan(groups, ranks=1, token_budget=20)
    assert [[part.rows for part in batch] for batch in planned[0]] == [[[0, 1]], [[2]]]
    assert [tokens(batch, groups) for batch in planned[0]] == [20, 14]


def test_advantages_and_weights_stay_with_their_trajectories() -> None:
    group = of_lengths(0, [6, 1, 6, 6])
    group.trajectories[1].reward = 0.0
    for place in (0, 2, 3):
        group.trajectories[place].reward = 10.0 + place
    (micro_batches,) = simple_plan([group], ranks=1, token_budget=16)
    seen = {
        row: (advantage, weight)
        for batch in micro_batches
        for part in batch
        for row, advantage, weight in zip(part.rows, part.advantages, part.token_weights, strict=True)
    }
    assert seen == {0: (10.0, 0.01), 2: (12.0, 0.03), 3: (13.0, 0.04)}


def test_a_trajectory_without_a_fresh_token_is_left_out() -> None:
    each = [trajectory(spans, reward=1.0) for spans in ([(2, 3)], [(2, 1), (3, 1)], [(4, 2)])]
    planned = simple_plan([describe(Group(0, 0, "sums", each))], 1, 1000, oldest_allowed=3)
    assert planned[0][0][0].rows == [1, 2]


def test_a_trajectory_over_the_budget_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="23 tokens .* trainer.token_budget=22; raise it"):
        simple_plan([of_lengths(0, [20, 1])], ranks=1, token_budget=22)
