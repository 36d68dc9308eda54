"""Names, parameters, and a user's own loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from loss_cases import random_case

from streamrl.errors import ConfigError
from streamrl.loss import OBJECTIVES, loss_params, policy_loss, register_loss
from streamrl.objective_params import check_parameters


@dataclass(frozen=True)
class Power:
    power: float = 1.0


def weighted_by_length(batch, params):
    """A loss as a user writes one: nothing but the formula."""
    length = batch.sequence_sum(torch.ones_like(batch.current))[batch.segments]
    return -batch.advantages * batch.current / length**params.power


weighted_by_length.params = Power()


def expected(case, power):
    lengths = np.array([len(row) for row in case.rows()])[case.segments]
    trained = np.flatnonzero(case.mask)
    return -(case.weights * case.advantages * case.current / np.maximum(lengths, 1) ** power)[trained].sum()


def test_a_loss_is_added_by_a_function_and_a_name():
    register_loss("by_length", weighted_by_length, Power(2.0))
    case = random_case(0, extreme=False)
    assert policy_loss("by_length", case.batch())[0].item() == pytest.approx(expected(case, 2.0))
    halved = loss_params("by_length", power=0.5)
    assert policy_loss("by_length", case.batch(), halved)[0].item() == pytest.approx(expected(case, 0.5))
    with pytest.raises(ValueError, match="'by_length' already"):
        register_loss("by_length", weighted_by_length)


def test_a_loss_is_found_by_module_and_function():
    case = random_case(0, extreme=False)
    loss, _ = policy_loss("test_register:weighted_by_length", case.batch())
    assert loss.item() == pytest.approx(expected(case, 1.0))


@pytest.mark.parametrize("name", ["no_such_package.mine:loss", "test_register:no_such_function"])
def test_a_function_that_is_not_there_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"loss.name={name}: .*expected package.module:function"):
        policy_loss(name, random_case(0).batch())


def test_an_unknown_loss_names_the_known_ones():
    with pytest.raises(ValueError, match="gspo_token.*got 'gpso'"):
        policy_loss("gpso", random_case(0).batch())


def test_parameters_of_another_loss_are_refused():
    with pytest.raises(ValueError, match=r"gspo takes SequenceClip parameters, got Clip; .*loss_params\('gspo'"):
        policy_loss("gspo", random_case(0).batch(), loss_params("ppo"))
    with pytest.raises(ValueError, match="gspo has no parameter 'tau_pos'; it takes clip_high, clip_low"):
        loss_params("gspo", tau_pos=1.0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_default_parameters_are_sound_and_frozen(name):
    params = loss_params(name)
    check_parameters(params)
    assert hash(params) == hash(loss_params(name))


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("ppo", {"clip_low": -0.1}, "clip_low=-0.1: must not be negative"),
        ("ppo", {"dual_clip": 0.9}, "dual_clip=0.9: must be above 1"),
        ("tis", {"cap": 0.0}, "cap=0.0: must be positive"),
        ("tis", {"cap": float("nan")}, "expected a number"),
        ("decoupled_ppo", {"weight_rule": "drop"}, "expected one of mask, truncate"),
        ("kl_cov", {"cov_share": 1.5}, "at most 1"),
    ],
)
def test_parameters_out_of_range_say_what_is_possible(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        check_parameters(loss_params(name, **wrong))
