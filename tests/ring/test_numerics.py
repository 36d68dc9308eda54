"""Sampling and precision that trainer and engine have to agree on, in a real ring."""

from __future__ import annotations

from typing import Any

import pytest

ALL_THREE = ("sampling.top_k=8", "sampling.top_p=0.7", "sampling.min_p=0.5")


@pytest.mark.parametrize("how", [("sampling.top_p=0.9",), ALL_THREE])
def test_truncated_sampling_is_replayed_on_policy(launch: Any, how: tuple[str, ...]):
    ring = launch("--steps", "4", "max_lag=0", "trainer.lr=1e-3", "loss=ppo", *how)
    assert ring.wait() == 0, ring.output + ring.logs()
    for line in ring.metrics():
        assert line["lag/max"] == line["mismatch/outside_kept"] == line["policy/clip_fraction"] == 0
        assert line["mismatch/max"] <= 1e-5
        assert line["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)


def test_a_bfloat16_run_on_two_ranks_sends_half_the_bytes_and_agrees_with_its_engine(launch: Any):
    ring = launch("--steps", "3", "--trainers", "2", "max_lag=0", "trainer.lr=1e-3", "model.dtype=bfloat16")
    assert ring.wait() == 0, ring.output + ring.logs()
    (parameters,) = {
        event["parameters"] for event in ring.events() if event["event"] == "actor_ready" and "parameters" in event
    }
    for line in ring.metrics():
        assert line["sync/bytes"] == 2 * parameters
        # A body of width 32 in bfloat16 is 1e-4 off; float32 on one side only would be more.
        assert 0 < line["mismatch/rms"] <= 1e-3
