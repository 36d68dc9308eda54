"""Measures add up before they divide."""

import pytest
import torch
from loss_cases import random_case

from streamrl.loss import Reduction, merge, policy_loss
from streamrl.loss.measures import mean_over, total


def test_parts_of_different_size_merge_to_the_mean_of_the_whole():
    parts = [{"x": mean_over(torch.arange(n).double(), torch.ones(n, dtype=torch.bool))} for n in (3, 10, 0)]
    assert merge(parts)["x"].result() == pytest.approx((3 + 45) / 13)


def test_sums_add_and_a_name_that_a_part_lacks_counts_nothing():
    merged = merge(
        [{"a": total(torch.tensor(2.0))}, {}, {"a": total(torch.tensor(0.5)), "b": total(torch.tensor(1.0))}]
    )
    assert {name: measure.result() for name, measure in merged.items()} == {"a": 2.5, "b": 1.0}


def test_the_largest_ratio_is_that_of_the_largest_part():
    cases = [random_case(seed, extreme=False) for seed in range(3)]
    parts = [policy_loss("tis", case.batch())[1] for case in cases]
    assert parts[0]["ratio_max"].reduction is Reduction.MAX
    largest = max(
        float((case.batch().current - case.batch().behaviour)[case.batch().mask].exp().max().detach()) for case in cases
    )
    assert merge(parts)["ratio_max"].result() == pytest.approx(largest)


def test_a_mean_over_nothing_is_zero_and_measures_have_no_gradient():
    values = torch.ones(3, requires_grad=True)
    measure = mean_over(values, torch.zeros(3, dtype=torch.bool))
    assert measure.result() == 0.0
    assert not measure.value.requires_grad
