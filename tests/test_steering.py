"""The controller of admission: its rules, and a simulated ring in which it holds a target inside the hard bound."""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl import staleness
from streamrl.steering import Headroom, admissible, steer


def test_headroom_grows_by_a_fixed_amount_while_the_target_is_kept():
    state = Headroom()
    grown = []
    for _ in range(5):
        state = steer(state, 0.95, 0.9, max_lag=1, groups_per_step=8)
        grown.append(state.groups)
    assert grown == [2, 4, 6, 8, 8]


def test_headroom_is_halved_below_the_target_and_then_waits_for_the_answer():
    state = Headroom(groups=16, ess=0.5)
    found = []
    for _ in range(5):
        state = steer(state, 0.5, 0.9, max_lag=4, groups_per_step=8)
        found.append(state.groups)
    assert found == [8, 8, 8, 4, 4]  # granted with 16 ahead: 16/8 + 1 steps until a cut shows


def test_a_step_without_tokens_measures_nothing():
    state = Headroom(groups=3.0, ess=0.9, waiting=2)
    assert steer(state, 0.0, 0.9, max_lag=4, groups_per_step=8, tokens=0) == state


def test_without_headroom_one_batch_is_admissible_and_before_version_zero_nothing():
    assert admissible(0, Headroom(), max_lag=4, groups_per_step=8) == 8
    assert admissible(5, Headroom(groups=9.9), max_lag=4, groups_per_step=8) == 57
    assert admissible(-1, Headroom(groups=9.9), max_lag=4, groups_per_step=8) == 0


@given(
    measured=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 5)), max_size=60),
    target=st.floats(0.01, 0.99),
    max_lag=st.integers(0, 8),
    per_step=st.integers(1, 64),
)
def test_whatever_is_measured_the_hard_bound_and_a_whole_batch_are_kept(measured, target, max_lag, per_step):
    state = Headroom()
    for version, (ess, tokens) in enumerate(measured):
        state = steer(state, ess, target, max_lag, per_step, tokens)
        granted = admissible(version, state, max_lag, per_step)
        hard = staleness.credits(0, version, max_lag, per_step)
        assert (version + 1) * per_step <= granted <= hard


class Ring:
    """Groups are granted as far as allowed, finish in order at a fixed rate, and the oldest G are trained.

    A token sampled at version u and trained at v has ESS e^(−drift·(v − u)²): the policy moves evenly, so that the log
    ratio's spread grows with the lag. The trainer takes ``slow`` times as long as generating one batch.
    """

    def __init__(self, per_step: int, max_lag: int, drift: float, slow: float) -> None:
        self.per_step, self.max_lag, self.drift, self.slow = per_step, max_lag, drift, slow
        self.granted, self.version, self.made = 0, 0, 0.0
        self.in_flight: deque[int] = deque()
        self.ready: deque[int] = deque()

    def step(self, headroom: Headroom) -> tuple[float, int]:
        """(ESS, largest lag) of the next batch."""
        capacity = self.slow * self.per_step  # groups generated while the trainer works
        while True:
            room = admissible(self.version, headroom, self.max_lag, self.per_step) - self.granted
            self.in_flight.extend([self.version] * max(0, room))
            self.granted += max(0, room)
            while self.in_flight and (capacity >= 1 or len(self.ready) < self.per_step):
                self.ready.append(self.in_flight.popleft())
                capacity -= 1
            if len(self.ready) >= self.per_step:
                break
        lags = [self.version - self.ready.popleft() for _ in range(self.per_step)]
        self.version += 1
        weights = [math.exp(-self.drift * lag * lag) for lag in lags]
        return sum(weights) / len(weights), max(lags)


def simulate(ring: Ring, target: float, steps: int) -> list[tuple[float, int, float]]:
    """(ESS, largest lag, headroom) of each step under the controller."""
    state, seen = Headroom(), []
    for _ in range(steps):
        ess, lag = ring.step(state)
        state = steer(state, ess, target, ring.max_lag, ring.per_step)
        seen.append((ess, lag, state.groups))
    return seen


@pytest.mark.parametrize("drift", [0.004, 0.01, 0.03])
@pytest.mark.parametrize("target", [0.8, 0.9])
def test_a_simulated_ring_holds_the_target(drift: float, target: float):
    seen = simulate(Ring(per_step=16, max_lag=16, drift=drift, slow=2.0), target, 400)[100:]
    assert sum(ess for ess, _, _ in seen) / len(seen) == pytest.approx(target, abs=0.06)
    assert max(lag for _, lag, _ in seen) <= 16
    assert max(lag for _, lag, _ in seen) >= 1  # it does run ahead


def test_without_drift_a_simulated_ring_runs_as_far_ahead_as_the_hard_bound_allows():
    seen = simulate(Ring(per_step=16, max_lag=4, drift=0.0, slow=4.0), 0.9, 100)
    assert seen[-1][2] == 4 * 16
    assert max(lag for _, lag, _ in seen) == 4


def test_a_simulated_ring_gives_way_when_the_policy_starts_to_move_faster():
    ring = Ring(per_step=16, max_lag=16, drift=0.002, slow=2.0)
    state, ahead = Headroom(), []
    for step in range(400):
        ring.drift = 0.002 if step < 200 else 0.05
        ess, _ = ring.step(state)
        state = steer(state, ess, 0.9, 16, 16)
        ahead.append((ess, state.groups))
    before, after = ahead[100:200], ahead[300:]
    assert sum(h for _, h in after) < 0.5 * sum(h for _, h in before)
    assert sum(ess for ess, _ in after) / len(after) == pytest.approx(0.9, abs=0.06)
