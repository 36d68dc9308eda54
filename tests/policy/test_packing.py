"""Packing: every source sees exactly the tokens before its target, and nothing is computed twice."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import group, reference_logprobs, tiny_model, trajectory, varied_groups

from streamrl.errors import StalenessError
from streamrl.policy.learner import PackedPolicy
from streamrl.policy.packing import pack
from streamrl.types import Trajectory

WIDE = 1 << 20


def trainable(groups, oldest_allowed=3):
    """(trajectory, position) of every token that must get a loss, in order."""
    flat = [one for each in groups for one in each.trajectories]
    return [
        (index, int(position))
        for index, one in enumerate(flat)
        for position, version in zip(
            np.flatnonzero(one.sampled), np.repeat(*np.array(one.versions).reshape(-1, 2).T), strict=True
        )
        if version >= oldest_allowed
    ]


def seen_by(packed, source):
    """Tokens that the hidden state at a flat index attends to, by position; positions must be 0, 1, 2, …"""
    row, column = divmod(int(source), packed.tokens.shape[1])
    visible = torch.nonzero(packed.attention_mask()[row, 0, column]).flatten()
    order = visible[torch.argsort(packed.positions[row, visible])]
    assert packed.positions[row, order].tolist() == list(range(len(order)))
    assert int(order[-1]) == column
    return packed.tokens[row, order].tolist()


def check_every_source(groups, row_tokens):
    packed = pack(groups, version=5, oldest_allowed=3, row_tokens=row_tokens)
    flat = [one for each in groups for one in each.trajectories]
    expected = trainable(groups)
    assert packed.trajectory.tolist() == [index for index, _ in expected]
    for source, target, (index, position) in zip(packed.source, packed.target, expected, strict=True):
        assert int(target) == flat[index].tokens[position]
        assert seen_by(packed, source) == flat[index].tokens[:position].tolist()
    return packed


def test_a_group_is_laid_out_as_the_tree_of_the_module_text():
    # a b x y · a b x z · a b w; the last token of each answer is a target only.
    answers = [trajectory("ab", "cde"), trajectory("ab", "cdf"), trajectory("ab", "ce")]
    packed = pack([group(*answers)], 5, 3, WIDE)
    assert packed.tokens.tolist() == [[0, 1, 2, 3, 0, 0, 0, 0]]
    assert packed.end.tolist() == [[4, 4, 4, 4, 5, 6, 7, 8]]
    assert packed.source.tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    assert packed.target.tolist() == [2, 3, 4, 2, 3, 5, 2, 4]
    assert packed.trajectory.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


def test_tokens_after_an_update_in_the_middle_of_their_turn_are_marked_and_a_new_turn_starts_afresh():
    sampled = np.array([0, 0, 1, 1, 1, 0, 1, 1], dtype=bool)
    turns = Trajectory(np.arange(8, dtype=np.int32), sampled, np.zeros(8, np.float32), [(3, 1), (4, 3), (5, 1)])
    # First turn: versions 3 4 4; second turn: 4 5.
    packed = pack([group(turns, trajectory("ab", "cd"))], 5, 4, WIDE)
    assert packed.lag[:4].tolist() == [1, 1, 1, 0]
    assert packed.carried.tolist() == [True, True, False, True, False, False]


def test_answers_that_part_are_branches_of_one_prompt():
    packed = pack([group(trajectory("ab", "cdee"), trajectory("ab", "cfee"), trajectory("ab", "ge"))], 5, 3, WIDE)
    # a b c d e f e g in depth-first order: 'b' ends at 8, 'c' (with d e and f e) at 7.
    assert packed.tokens.tolist() == [[0, 1, 2, 3, 4, 5, 4, 6]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 4, 3, 4, 2]]
    assert packed.end.tolist() == [[8, 8, 7, 5, 5, 7, 7, 8]]


@pytest.mark.parametrize("row_tokens", [1, 6, 10, WIDE])
def test_every_source_sees_exactly_the_tokens_before_its_target(row_tokens):
    check_every_source(varied_groups(), row_tokens)


@st.composite
def random_groups(draw):
    groups = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
        members = []
        for _ in range(draw(st.integers(1, 4))):
            rest = draw(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=6))
            tokens = np.array(prompt + [token for token, _ in rest], dtype=np.int32)
            sampled = np.array([False] * len(prompt) + [chosen for _, chosen in rest])
            spans = [(draw(st.integers(1, 5)), 1) for _ in range(int(sampled.sum()))]
            members.append(Trajectory(tokens, sampled, np.zeros(len(tokens), np.float32), spans or [(5, 0)]))
        groups.append(group(*members))
    return groups


@settings(max_examples=60, deadline=None)
@given(random_groups(), st.integers(1, 40))
def test_any_groups_at_any_row_length_keep_every_prefix(groups, row_tokens):
    packed = check_every_source(groups, row_tokens)
    sampled = sum(one.sampled_count for each in groups for one in each.trajectories)
    assert packed.masked_tokens == sampled - len(packed.target)
    assert packed.attention_mask().any(-1).all()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("row_tokens", [8, WIDE])
def test_packed_equals_one_trajectory_at_a_time_in_values_and_gradients(tied, row_tokens):
    groups = varied_groups()
    flat = [one for each in groups for one in each.trajectories]
    wanted = trainable(groups)
    # A different factor for each token, so that no two could be exchanged unnoticed.
    factors = torch.linspace(-1, 1, len(wanted), dtype=torch.float64)

    alone = tiny_model(tied)
    per_trajectory = [reference_logprobs(alone, one, temperature=0.7) for one in flat]
    expected = torch.stack([per_trajectory[index][position - 1] for index, position in wanted])
    (factors * expected).sum().backward()

    together = tiny_model(tied)
    logprobs, *_ = PackedPolicy(together)(pack(groups, 5, 3, row_tokens), temperature=0.7)
    (factors * logprobs).sum().backward()

    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)
    gradients = dict(alone.named_parameters())
    for name, parameter in together.named_parameters():
        scale = gradients[name].grad.abs().max().item()
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-5, atol=1e-5 * scale, msg=name)


def test_the_prompt_of_a_group_is_computed_once():
    eight = [trajectory("abcdefgh", letter * 2) for letter in "ijklmnop"]
    packed = pack([group(*eight)], 5, 3, WIDE)
    # Eight prompt tokens and the first of the two tokens of each answer.
    assert packed.tokens.shape == (1, 16)
    assert Counter(packed.source.tolist())[7] == 8


def test_groups_that_fit_share_a_row_without_seeing_each_other():
    long = group(trajectory("abcdefgh", "ijklmnop"))
    short = group(trajectory("bc", "de"), lease=1), group(trajectory("bc", "de"), lease=2)
    packed = check_every_source([long, *short], WIDE)
    assert packed.tokens.shape == (2, 16)


def test_twins_longer_than_a_row_still_share_their_tree():
    twins = trajectory("abcdefgh", "ijklmnop"), trajectory("abcdefgh", "ijklmnop")
    assert check_every_source([group(*twins)], row_tokens=4).tokens.shape == (1, 16)


def test_tokens_over_the_lag_bound_are_masked_and_counted():
    old_head = trajectory("ab", "cdef", versions=[(2, 2), (3, 2)])
    packed = pack([group(old_head)], version=5, oldest_allowed=3, row_tokens=WIDE)
    assert packed.target.tolist() == [4, 5]
    assert packed.lag.tolist() == [2, 2]
    assert packed.masked_tokens == 2


def test_a_stale_tail_is_not_even_computed():
    old_tail = trajectory("ab", "cdefghijk", versions=[(3, 1), (2, 8)])
    packed = pack([group(old_tail)], version=5, oldest_allowed=3, row_tokens=WIDE)
    assert packed.tokens.shape == (1, 8)
    assert packed.target.tolist() == [2]


def test_weights_and_advantages_follow_their_trajectory():
    one = group(trajectory("ab", "cc"), trajectory("ab", "d"), advantages=[2.0, -3.0])
    one.token_weights = np.array([0.25, 0.5])
    packed = pack([one], 5, 3, WIDE)
    assert packed.advantages.tolist() == [2.0, 2.0, -3.0]
    assert packed.token_weights.tolist() == [0.25, 0.25, 0.5]


def test_a_token_from_the_future_is_refused():
    with pytest.raises(StalenessError, match="version 6 .* version 5"):
        pack([group(trajectory("ab", "cd", versions=[(5, 1), (6, 1)]))], 5, 3, WIDE)


def test_a_trajectory_that_starts_with_a_sampled_token_is_refused():
    with pytest.raises(ValueError, match="prompt token"):
        pack([group(trajectory("", "cd"))], 5, 3, WIDE)


def test_versions_that_do_not_cover_the_sampled_tokens_are_refused():
    # Together the counts fit: only a check of each trajectory sees it.
    crossed = trajectory("ab", "cd", versions=[(5, 1)]), trajectory("ab", "cd", versions=[(5, 3)])
    with pytest.raises(ValueError, match="count its sampled tokens"):
        pack([group(*crossed)], 5, 3, WIDE)


def test_arrays_of_different_length_are_refused():
    broken = trajectory("ab", "cd")
    broken.behaviour = broken.behaviour[:-1]
    with pytest.raises(ValueError, match="same length"):
        pack([group(broken)], 5, 3, WIDE)


def test_an_empty_micro_batch_is_a_row_of_padding_with_a_zero_gradient():
    model = tiny_model()
    packed = pack([], 5, 3, WIDE)
    logprobs, *_ = PackedPolicy(model)(packed, 1.0)
    logprobs.sum().backward()
    assert packed.tokens.shape == (1, 8)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_rewards_of_turns_move_from_the_end_of_the_trajectory_to_the_ends_of_their_turns():
    """``cd`` got 0.75 and ``fg`` −0.5: the end of the trajectory gives 0.25 back, and keeps the −0.5."""
    rewarded = trajectory("ab", "cd", observation="e", second="fg")
    rewarded.turn_rewards = [0.75, -0.5]
    packed = pack([group(trajectory("ab", "c"), rewarded, trajectory("ab", "dd"))], 5, 3, WIDE)
    assert packed.reward_shift.tolist() == [0.0, 0.0, 0.75, 0.0, -0.5 - 0.25, 0.0, 0.0]


def test_the_reward_of_a_turn_comes_at_its_last_token_that_is_not_stale():
    """Versions 2 are too old: of ``cde`` only ``e`` is left, of a turn that is stale as a whole nothing."""
    part = trajectory("ab", "cde", observation="e", second="fg", versions=[(2, 2), (5, 3)])
    whole = trajectory("ab", "cde", observation="e", second="fg", versions=[(2, 3), (5, 2)])
    part.turn_rewards = whole.turn_rewards = [1.0, 2.0]
    packed = pack([group(part, whole)], 5, 3, WIDE)
    assert packed.reward_shift.tolist() == [1.0, 0.0, 2.0 - 3.0, 0.0, 2.0 - 3.0]
