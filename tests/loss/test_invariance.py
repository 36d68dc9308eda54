"""Loss and gradient do not depend on packing order, padding, micro-batches or ranks, in float32 to 1e-6."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import Case, random_case

from streamrl.loss import OBJECTIVES, Corrections, Level, LossBatch, batch_statistics, loss_params, merge, policy_loss

CORRECTIONS = Corrections(
    weight=Level.TOKEN, weight_cap=1.3, reject=Level.GEOMETRIC, reject_low=0.7, reject_high=1.4, veto_low=1e-4, opsm=0.4
)
EASY = {"clip_cov": {"cov_low": 0.01, "cov_share": 0.1}, "kl_cov": {"cov_share": 0.1}, "gspo": {"clip_low": 0.1}}


def params(name):
    return loss_params(name, **EASY.get(name, {}))


def whole(name, case: Case):
    """(loss, gradient by token, measures) in one piece."""
    batch = case.batch(torch.float32)
    loss, measures = policy_loss(name, batch, params(name), CORRECTIONS)
    loss.backward()
    return loss.item(), batch.current.grad.numpy(), {key: each.result() for key, each in measures.items()}


def in_parts(name, case: Case, parts: list[np.ndarray]):
    """The same in micro-batches, each with its own tensors; a part holds whole sequences in any order."""
    statistics = batch_statistics(name, case.batch(torch.float32), params(name))
    loss, gradient, measured = 0.0, np.zeros(len(case.current), dtype=np.float32), []
    for chosen in parts:
        batch = case.take(chosen).batch(torch.float32, statistics=statistics)
        part, measures = policy_loss(name, batch, params(name), CORRECTIONS)
        part.backward()
        loss += part.item()
        gradient[chosen] = batch.current.grad.numpy()
        measured.append(measures)
    return loss, gradient, {key: each.result() for key, each in merge(measured).items()}


def assert_same(found, expected):
    scale = np.abs(expected[1]).max() + 1e-12
    assert found[0] == pytest.approx(expected[0], rel=1e-6, abs=1e-6 * max(1.0, abs(expected[0])))
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6, atol=1e-6 * scale)
    assert found[2] == pytest.approx(expected[2], rel=1e-6, abs=1e-6 * max(1.0, abs(expected[0])))


def dealt(case: Case, seed: int, parts: int) -> list[np.ndarray]:
    """Whole sequences dealt to ``parts``, shuffled, tokens of several sequences interleaved."""
    rng = np.random.default_rng(seed)
    owner = rng.integers(parts, size=case.sequences)
    shuffled = rng.permutation(len(case.current))
    return [shuffled[owner[case.segments[shuffled]] == part] for part in range(parts)]


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**16), parts=st.integers(1, 5))
def test_order_and_micro_batches_change_nothing(name, seed, parts):
    case = random_case(seed, extreme=False)
    assert_same(in_parts(name, case, dealt(case, seed, parts)), whole(name, case))


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**16), padding=st.integers(1, 50))
def test_padding_changes_nothing(name, seed, padding):
    case = random_case(seed, extreme=False)
    rng = np.random.default_rng(seed)
    garbage = {
        "current": np.full(padding, np.nan),
        "mask": np.zeros(padding, dtype=bool),
        "segments": rng.integers(case.sequences, size=padding),
    }
    padded = {
        key: np.concatenate([value, garbage.get(key, rng.normal(0, 100, padding))])
        for key, value in vars(case).items()
        if isinstance(value, np.ndarray)
    }
    loss, gradient, measures = whole(name, Case(**padded, sequences=case.sequences))
    assert not gradient[len(case.current) :].any()
    assert_same((loss, gradient[: len(case.current)], measures), whole(name, case))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_numbers_of_sequences_do_not_matter(name):
    """Sequence ids may leave gaps: empty sequences take part in nothing but the denominators."""
    case = random_case(7, extreme=False)
    spread = dataclasses.replace(case, segments=case.segments * 3 + 1, sequences=case.sequences * 3 + 5)
    assert_same(whole(name, spread), whole(name, case))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_batch_without_weights_has_those_of_its_paper(name):
    case = random_case(4, extreme=False)
    counts = np.array([len(row) for row in case.rows()])
    rule = {
        "token_mean": np.full(case.sequences, 1 / counts.sum()),
        "sequence_mean_token_mean": 1 / (case.sequences * np.maximum(counts, 1)),
        "sequence_mean_token_sum": np.full(case.sequences, 1 / case.sequences),
    }[OBJECTIVES[name].aggregation]
    implied, _ = policy_loss(name, case.batch(weights=None), params(name))
    case.weights = rule[case.segments]
    explicit, _ = policy_loss(name, case.batch(), params(name))
    assert implied.item() == pytest.approx(explicit.item(), rel=1e-12)


def test_tensors_that_do_not_fit_each_other_are_refused():
    case = random_case(0)
    with pytest.raises(ValueError, match=r"behaviour has shape \[3\]"):
        policy_loss("tis", case.batch(behaviour=torch.zeros(3)))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_mask_of_numbers_and_short_integers_are_as_good(name):
    case = random_case(2)
    changes = {"mask": torch.tensor(case.mask).double(), "segments": torch.tensor(case.segments).to(torch.int32)}
    found, _ = policy_loss(name, case.batch(**changes), params(name), CORRECTIONS)
    assert found.item() == policy_loss(name, case.batch(), params(name), CORRECTIONS)[0].item()


def test_a_batch_is_never_changed():
    case = random_case(0)
    batch = case.batch()
    before = {key: value.clone() for key, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    for name in OBJECTIVES:
        policy_loss(name, batch, params(name), CORRECTIONS)
    for key, value in before.items():
        torch.testing.assert_close(getattr(batch, key), value, rtol=0, atol=0, equal_nan=True)
    assert isinstance(batch, LossBatch)
