"""Every diagnostic against its formula in numpy; sums over micro-batches; nothing to say without tokens."""

import numpy as np
import pytest
import torch

from streamrl.loss.diagnostics import Diagnostics
from streamrl.loss.policy import policy_loss
from streamrl.schema import LossConfig

torch.set_num_threads(1)
CPU = torch.device("cpu")
RNG = np.random.default_rng(1)
TOKENS = 40
BEHAVIOUR = RNG.normal(-1.5, 0.4, TOKENS)
LOG_RATIO = RNG.normal(0, 0.3, TOKENS)
ADVANTAGES = RNG.normal(size=TOKENS).round(0)
LAG = RNG.integers(0, 4, TOKENS)
TRAJECTORY = np.sort(RNG.integers(0, 6, TOKENS))
ENTROPY = RNG.uniform(0, 2, TOKENS)
CONFIG = LossConfig(name="ppo", clip_low=0.2, clip_high=0.25)


def add(diagnostics, chosen, masked=0):
    behaviour, log_ratio, advantages, entropy = (
        torch.tensor(x[chosen]) for x in (BEHAVIOUR, LOG_RATIO, ADVANTAGES, ENTROPY)
    )
    weights = torch.full_like(behaviour, 1 / TOKENS)
    result = policy_loss(CONFIG, behaviour + log_ratio, behaviour, advantages, weights)
    diagnostics.add(result, entropy, torch.tensor(LAG[chosen]), torch.tensor(TRAJECTORY[chosen]), 7, masked)


def metrics(*parts, bound=3):
    diagnostics = Diagnostics(bound, CPU)
    for part in parts:
        add(diagnostics, part, masked=2)
    result, broken = diagnostics.reduce()
    assert broken == []
    return result


def test_every_metric_is_its_formula():
    found = metrics(np.arange(TOKENS))
    rho, fresh = np.exp(LOG_RATIO), LAG == 0
    sequence = np.exp([LOG_RATIO[i == TRAJECTORY].sum() for i in np.unique(TRAJECTORY)])
    low, high = (rho < 0.8) & (ADVANTAGES < 0), (rho > 1.25) & (ADVANTAGES > 0)
    surrogate = np.minimum(rho * ADVANTAGES, np.clip(rho, 0.8, 1.25) * ADVANTAGES)
    expected = {
        "policy/loss": -surrogate.mean(),
        "policy/clip_fraction": (low | high).mean(),
        "policy/clip_fraction_low": low.mean(),
        "policy/clip_fraction_high": high.mean(),
        "policy/ratio_mean": rho.mean(),
        "policy/entropy": ENTROPY.mean(),
        "policy/kl_k1": -LOG_RATIO.mean(),
        "policy/kl_k3": (rho - 1 - LOG_RATIO).mean(),
        "policy/ess": rho.sum() ** 2 / (TOKENS * np.square(rho).sum()),
        "policy/ess_sequence": sequence.sum() ** 2 / (len(sequence) * np.square(sequence).sum()),
        "lag/mean": LAG.mean(),
        "lag/p95": np.sort(LAG)[int(np.ceil(0.95 * TOKENS)) - 1],
        "lag/max": LAG.max(),
        "lag/masked_tokens": 2,
        "mismatch/rms": np.sqrt(np.square(LOG_RATIO[fresh]).mean()),
        "mismatch/max": np.abs(LOG_RATIO[fresh]).max(),
        "mismatch/k3": (rho - 1 - LOG_RATIO)[fresh].mean(),
        "trained_tokens": TOKENS,
    }
    assert set(found) == set(expected)
    assert found == pytest.approx(expected, rel=1e-9)


def test_the_fixture_has_clips_on_both_sides_and_fresh_and_old_tokens():
    found = metrics(np.arange(TOKENS))
    assert min(found["policy/clip_fraction_low"], found["policy/clip_fraction_high"], found["mismatch/rms"]) > 0
    assert (ADVANTAGES == 0).any()


def test_micro_batches_add_up_to_the_batch():
    # Cut between trajectories: a trajectory is never split over micro-batches.
    halves = np.flatnonzero(TRAJECTORY < 3), np.flatnonzero(TRAJECTORY >= 3)
    whole, parts = metrics(np.arange(TOKENS)), metrics(*halves)
    whole["lag/masked_tokens"] = 4
    assert parts == pytest.approx(whole, rel=1e-12)


def test_the_effective_sample_size_uses_ratios_before_truncation():
    capped = LossConfig(name="tis", tis_cap=1.0)
    behaviour = torch.tensor([-2.0, -2.0], dtype=torch.float64)
    log_ratio = torch.tensor([0.0, 1.0], dtype=torch.float64)
    result = policy_loss(capped, behaviour + log_ratio, behaviour, torch.ones(2), torch.ones(2))
    diagnostics = Diagnostics(0, CPU)
    diagnostics.add(result, torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1]), 2, 0)
    e = np.e
    assert diagnostics.reduce()[0]["policy/ess"] == pytest.approx((1 + e) ** 2 / (2 * (1 + e**2)), rel=1e-12)


def test_small_kl_does_not_cancel():
    # Log-probs near 0, so that the difference itself is exact.
    log_ratio = torch.full((4,), 1e-7, dtype=torch.float64)
    behaviour = torch.zeros(4, dtype=torch.float64)
    result = policy_loss(LossConfig(), behaviour + log_ratio, behaviour, torch.ones(4), torch.ones(4))
    diagnostics = Diagnostics(0, CPU)
    diagnostics.add(result, torch.zeros(4), torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), 1, 0)
    assert diagnostics.reduce()[0]["policy/kl_k3"] == pytest.approx(5e-15, rel=1e-6, abs=0)


def test_without_tokens_every_metric_is_there_and_zero():
    found = metrics(np.arange(0))
    assert set(found) == set(metrics(np.arange(TOKENS)))
    assert found.pop("lag/masked_tokens") == 2
    assert not any(found.values())


def test_without_fresh_tokens_mismatch_is_zero():
    found = metrics(np.flatnonzero(LAG > 0))
    assert found["mismatch/rms"] == found["mismatch/max"] == found["mismatch/k3"] == 0.0
    assert found["policy/kl_k3"] > 0


def test_a_loss_that_is_not_finite_names_this_rank():
    diagnostics = Diagnostics(0, CPU, rank=2, ranks=4)
    behaviour = torch.tensor([float("nan")])
    result = policy_loss(LossConfig(), torch.zeros(1), behaviour, torch.ones(1), torch.ones(1))
    zero = torch.zeros(1, dtype=torch.int64)
    diagnostics.add(result, torch.zeros(1), zero, zero, 1, 0)
    assert diagnostics.reduce()[1] == [2]
