"""Every diagnostic against its formula in numpy; sums over micro-batches; nothing to say without tokens."""

import math

import numpy as np
import pytest
import torch

from streamrl.loss import Corrections, Level, LossBatch, loss_params
from streamrl.loss.diagnostics import Diagnostics
from streamrl.loss.policy import evaluate
from streamrl.metrics import BUCKET, ENVIRONMENT, KEYS, LAG_BINS, LENGTH_BUCKETS

torch.set_num_threads(1)
CPU = torch.device("cpu")
RNG = np.random.default_rng(1)
TRAJECTORY = np.repeat(np.arange(7), [3, 80, 10, 0, 300, 1, 40])
TOKENS = len(TRAJECTORY)
BEHAVIOUR = RNG.normal(-1.5, 0.4, TOKENS)
LAG = RNG.integers(0, 4, TOKENS)
GAP = RNG.normal(0, 0.1, TOKENS)
"""log π_old − log μ"""
UPDATE = RNG.normal(0, 0.3, TOKENS)
"""log π − log π_old"""
ADVANTAGES = RNG.normal(size=TOKENS).round(0)
ENTROPY, KL = RNG.uniform(0, 2, (2, TOKENS))
OUTSIDE = RNG.uniform(size=TOKENS) < 0.2
ENVS = np.array([0, 1, -1, 0, 1, 0, 1])
PPO = loss_params("ppo", clip_low=0.2, clip_high=0.25, dual_clip=1.4)
DROP = Corrections(Level.TOKEN, 1.1, reject=Level.TOKEN, reject_low=0.85, reject_high=1.2)
WHOLE = GAP + UPDATE
RHO, R, W = np.exp(WHOLE), np.exp(UPDATE), np.exp(GAP)


def add(diagnostics, chosen, masked=0):
    behaviour, gap, update, advantages, entropy, kl = (
        torch.tensor(x[chosen]) for x in (BEHAVIOUR, GAP, UPDATE, ADVANTAGES, ENTROPY, KL)
    )
    ones = torch.ones(len(chosen), dtype=torch.bool)
    batch = LossBatch(
        behaviour + gap + update,
        behaviour,
        advantages,
        ones,
        torch.tensor(TRAJECTORY[chosen]),
        proximal=behaviour + gap,
        weights=torch.full_like(behaviour, 1 / TOKENS),
        sequences=7,
    )
    result = evaluate("ppo", batch, PPO, DROP)
    extra = {
        "kl_reference": kl,
        "fresh_outside": torch.tensor((OUTSIDE & (LAG == 0))[chosen]),
        "aged_outside": torch.tensor((OUTSIDE & (LAG > 0))[chosen]),
    }
    lag = torch.tensor(LAG[chosen])
    diagnostics.add(result, entropy, lag, lag > 0, behaviour + gap, masked, torch.tensor(ENVS), extra)


def metrics(*parts, bound=3):
    diagnostics = Diagnostics(bound, CPU, envs=("sums", "words"))
    for part in parts:
        add(diagnostics, part, masked=2)
    result, broken = diagnostics.reduce()
    assert broken == []
    return result


def ess(weights):
    return weights.sum() ** 2 / (len(weights) * np.square(weights).sum()) if len(weights) else 0.0


def rows(chosen):
    return [np.flatnonzero((i == TRAJECTORY) & chosen) for i in range(7) if ((i == TRAJECTORY) & chosen).any()]


def flags():
    positive, negative = ADVANTAGES > 0, ADVANTAGES < 0
    low, high, dual = (R < 0.8) & negative, (R > 1.25) & positive, (R > 1.4) & negative
    dropped = (W < 0.85) | (W > 1.2)
    return low, high, dual, dropped


def expected_of(chosen):
    """The metrics of the tokens in bool ``chosen``."""
    low, high, dual, dropped = flags()
    positive, negative = (ADVANTAGES > 0) & chosen, (ADVANTAGES < 0) & chosen
    slope = np.where(low | high | dual | dropped, 0.0, R * np.minimum(W, 1.1))
    weights = np.exp([WHOLE[row].sum() for row in rows(chosen)])
    fresh, aged = chosen & (LAG == 0), chosen & (LAG > 0)

    def k3(x):
        return (np.exp(x) - 1 - x).mean() if len(x) else 0.0

    return {
        "policy/clip_fraction": (low | high | dual)[chosen].mean(),
        "policy/clip_fraction_low": low[chosen].mean(),
        "policy/clip_fraction_high": high[chosen].mean(),
        "policy/clip_fraction_low_positive": 0.0,
        "policy/clip_fraction_low_negative": low[chosen].mean(),
        "policy/clip_fraction_high_positive": high[chosen].mean(),
        "policy/clip_fraction_high_negative": 0.0,
        "policy/dual_clip_fraction": dual[chosen].mean(),
        "policy/dropped_fraction": dropped[chosen].mean(),
        "policy/capped_fraction": (W > 1.1)[chosen].mean(),
        "policy/dropped_sequences": np.mean([dropped[row].all() for row in rows(chosen)]),
        "policy/slope_positive": slope[positive].sum() / max(positive.sum(), 1),
        "policy/slope_negative": slope[negative].sum() / max(negative.sum(), 1),
        "policy/ratio_mean": RHO[chosen].mean(),
        "policy/ratio_absolute_log": np.abs(WHOLE[chosen]).mean(),
        "policy/chi2": np.square(RHO[chosen]).mean() - 1,
        "policy/perplexity_ratio": np.mean([np.exp(-WHOLE[row].mean()) for row in rows(chosen)]),
        "policy/entropy": ENTROPY[chosen].mean(),
        "policy/kl_k1": -WHOLE[chosen].mean(),
        "policy/kl_k3": k3(WHOLE[chosen]),
        "policy/kl_reference": KL[chosen].mean(),
        "policy/ess": ess(RHO[chosen]),
        "policy/ess_sequence": ess(weights),
        "mismatch/rms": np.sqrt(np.square(GAP[fresh]).mean()),
        "mismatch/k3": k3(GAP[fresh]),
        "mismatch/ess": ess(W[fresh]),
        "mismatch/outside_kept": OUTSIDE[fresh].mean(),
        "value/loss": 0.0,
        "value/explained_variance": 0.0,
        "update/k3": k3(UPDATE[chosen]),
        "update/ess": ess(R[chosen]),
        "lag/mean": LAG[chosen].mean(),
        "lag/k3": k3(GAP[aged]),
        "lag/ess": ess(W[aged]),
        "lag/outside_kept": OUTSIDE[aged].mean(),
        "trained_tokens": chosen.sum(),
    }


def test_every_metric_is_its_formula():
    found = metrics(np.arange(TOKENS))
    low, high, dual, dropped = flags()
    every = np.ones(TOKENS, dtype=bool)
    clipped_ratio = np.where(low, 0.8, np.where(high, 1.25, np.where(dual, 1.4, R)))
    expected = expected_of(every) | {
        "policy/loss": -(np.where(dropped, 0.0, clipped_ratio * np.minimum(W, 1.1)) * ADVANTAGES).mean(),
        "lag/p50": np.sort(LAG)[math.ceil(0.5 * TOKENS) - 1],
        "lag/p95": np.sort(LAG)[math.ceil(0.95 * TOKENS) - 1],
        "lag/max": LAG.max(),
        "lag/masked_tokens": 2,
        "mismatch/max": np.abs(GAP[LAG == 0]).max(),
    }
    expected |= {f"lag/fraction_{lag}": (lag == LAG).mean() for lag in range(3)} | {
        "lag/fraction_3_4": (LAG == 3).mean()
    }
    expected |= dict.fromkeys(("lag/fraction_5_8", "lag/fraction_9_16", "lag/fraction_17_up"), 0.0)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    parts = {f"by_length/{bucket}_{name}" for bucket in LENGTH_BUCKETS for name in BUCKET}
    parts |= {f"policy/{env}/{name}" for env in ("sums", "words") for name in ENVIRONMENT}
    assert set(found) == set(expected) | parts | {"policy/ratio_p999"}


def test_each_environment_has_the_numbers_of_its_own_tokens():
    found = metrics(np.arange(TOKENS))
    for index, env in enumerate(("sums", "words")):
        wanted = expected_of(ENVS[TRAJECTORY] == index)
        own = {name: wanted[key] for name, key in ENVIRONMENT.items()}
        assert {name: found[f"policy/{env}/{name}"] for name in ENVIRONMENT} == pytest.approx(own, rel=1e-9)


def test_each_bucket_of_lengths_has_the_numbers_of_its_own_tokens():
    found = metrics(np.arange(TOKENS))
    length = np.bincount(TRAJECTORY)[TRAJECTORY]
    for bucket, chosen in (
        ("up_to_64", length <= 64),
        ("up_to_256", (length > 64) & (length <= 256)),
        ("up_to_1024", length > 256),
    ):
        wanted = expected_of(chosen)
        own = {name: wanted[key] for name, key in BUCKET.items()}
        assert {name: found[f"by_length/{bucket}_{name}"] for name in BUCKET} == pytest.approx(own, rel=1e-9)
    assert found["by_length/longer_tokens"] == found["by_length/longer_ess"] == 0.0


def test_the_high_quantile_of_the_ratio_is_right_to_half_a_percent():
    found = metrics(np.arange(TOKENS))["policy/ratio_p999"]
    exact = np.sort(RHO)[math.ceil(0.999 * TOKENS) - 1]
    assert exact <= found <= exact * 1.0051


def test_every_metric_has_a_place_in_the_line():
    named = {key for key in metrics(np.arange(TOKENS)) if "/sums/" not in key and "/words/" not in key}
    assert named - set(KEYS) == {"trained_tokens"}
    assert {f"lag/{name}" for name in LAG_BINS} <= named


def test_micro_batches_add_up_to_the_batch():
    # Cut between trajectories: a trajectory is never split over micro-batches.
    halves = np.flatnonzero(TRAJECTORY < 3), np.flatnonzero(TRAJECTORY >= 3)
    whole, parts = metrics(np.arange(TOKENS)), metrics(*halves)
    whole["lag/masked_tokens"] = 4
    assert parts == pytest.approx(whole, rel=1e-12)


def test_a_gap_on_an_older_kv_cache_counts_as_lag_and_not_as_mismatch():
    behaviour, gap = torch.full((4,), -1.0).double(), torch.tensor([1e-6, 1e-6, 0.3, 0.2]).double()
    ones = torch.ones(4)
    batch = LossBatch(behaviour + gap, behaviour, ones, ones.bool(), torch.zeros(4, dtype=torch.int64), sequences=1)
    diagnostics = Diagnostics(1, CPU)
    result = evaluate("tis", batch, loss_params("tis", cap=1.0))
    lag, aged = torch.tensor([0, 0, 0, 1]), torch.tensor([False, False, True, True])
    diagnostics.add(result, torch.zeros(4), lag, aged, batch.current)
    found, _ = diagnostics.reduce()
    assert found["mismatch/rms"] == pytest.approx(1e-6, rel=1e-6)
    assert found["mismatch/max"] == pytest.approx(1e-6, rel=1e-6)
    assert found["lag/k3"] == pytest.approx(np.mean([math.exp(x) - 1 - x for x in (0.3, 0.2)]))
    assert found["lag/mean"] == 0.25


def diagnose(log_ratio, behaviour, advantages=None):
    behaviour, log_ratio = (torch.tensor(x, dtype=torch.float64) for x in (behaviour, log_ratio))
    size = len(behaviour)
    segments = torch.arange(size)
    batch = LossBatch(
        behaviour + log_ratio, behaviour, torch.ones(size), torch.ones(size, dtype=torch.bool), segments, sequences=size
    )
    diagnostics = Diagnostics(0, CPU, rank=2, ranks=4)
    result = evaluate("tis", batch, loss_params("tis", cap=1.0))
    none = torch.zeros(size, dtype=torch.int64)
    diagnostics.add(result, torch.zeros(size), none, none > 0, batch.current)
    return diagnostics.reduce()


def test_the_effective_sample_size_uses_ratios_before_truncation():
    e = math.e
    assert diagnose([0.0, 1.0], [-2.0, -2.0])[0]["policy/ess"] == pytest.approx((1 + e) ** 2 / (2 * (1 + e**2)))


def test_small_kl_does_not_cancel():
    # Log-probs near 0, so that the difference itself is exact.
    found = diagnose([1e-7] * 4, [0.0] * 4)[0]
    assert found["policy/kl_k3"] == pytest.approx(5e-15, rel=1e-6, abs=0)


def test_infinite_log_ratios_leave_every_metric_finite():
    found, broken = diagnose([-math.inf, 0.0, 1.0], [-1.0, -1.0, -2.0])
    assert broken == []
    assert all(math.isfinite(value) for value in found.values())


def test_without_tokens_every_metric_is_there_and_zero():
    found = metrics(np.arange(0))
    assert set(found) == set(metrics(np.arange(TOKENS)))
    assert found.pop("lag/masked_tokens") == 2
    assert not any(found.values())


def test_without_fresh_tokens_mismatch_is_zero():
    found = metrics(np.flatnonzero(LAG > 0))
    assert found["mismatch/rms"] == found["mismatch/max"] == found["mismatch/k3"] == found["mismatch/ess"] == 0.0
    assert found["lag/k3"] > 0


def test_a_loss_that_is_not_finite_names_this_rank():
    assert diagnose([0.0], [math.nan])[1] == [2]
