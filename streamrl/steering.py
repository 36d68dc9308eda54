"""Staleness that steers itself: how far ahead rollouters may run, so that the effective sample size keeps a target.

Pure, like ``staleness.py``, whose words it uses: G groups per step, L the hard bound ``max_lag``, P the published
version. A run may have granted ``(P + 1)·G`` groups net, a batch for the next step, plus *headroom* h in [0, L·G]. The
larger h is, the more of generation overlaps training, and the older the tokens are that a step trains on.

After every optimizer step the headroom answers to the step's ESS (``policy/ess``, raw weights of all ranks) as TCP's
window answers to loss: at or above the target it grows by a fixed amount, below it shrinks by a factor (additive
increase, multiplicative decrease, Chiu and Jain 1989). What a change does shows only once the groups that were granted
before it are trained, about h/G + 1 steps later; until then no second cut is made for the same cause.

    Claim: steering never loosens pacing. Proof: ``admissible`` is at most (P + L + 1)·G, what pacing allows. ∎
    Claim: steering starves nobody. Proof: h >= 0 leaves (P + 1)·G: once P reaches the trainer's version v, those are G
    groups more than the v·G consumed, a whole batch. ∎
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GROWTH = 0.25
"""Added per step that keeps the target, in batches of G groups."""
CUT = 0.5
"""Factor of the headroom after a step below the target."""
SMOOTHING = 0.5
"""Weight of the newest ESS in the average that is compared with the target: one odd batch is no trend."""


@dataclass(frozen=True)
class Headroom:
    """State of the controller after a step. ``Headroom()`` starts without any: nearly on-policy data come first."""

    groups: float = 0.0
    """h, in groups; a fraction is kept, ``admissible`` rounds down."""
    ess: float = -1.0
    """Smoothed; negative before the first measurement."""
    waiting: int = 0
    """Steps until the next cut is allowed."""


def steer(
    headroom: Headroom, ess: float, target: float, max_lag: int, groups_per_step: int, tokens: float = 1.0
) -> Headroom:
    """The headroom after a step that measured ``ess`` in [0, 1] over ``tokens`` trained tokens.

    A step without trained tokens measured nothing and changes nothing.
    """
    if not tokens:
        return headroom
    smoothed = ess if headroom.ess < 0 else SMOOTHING * ess + (1 - SMOOTHING) * headroom.ess
    waiting = max(0, headroom.waiting - 1)
    if smoothed >= target:
        grown = min(headroom.groups + GROWTH * groups_per_step, float(max_lag * groups_per_step))
        return Headroom(grown, smoothed, waiting)
    if waiting:
        return Headroom(headroom.groups, smoothed, waiting)
    delay = math.ceil(headroom.groups / groups_per_step) + 1
    return Headroom(headroom.groups * CUT, smoothed, delay)


def admissible(published: int, headroom: Headroom, max_lag: int, groups_per_step: int) -> int:
    """Groups that may have been granted net of refunds; 0 before version 0 is published (``published = −1``)."""
    if published < 0:
        return 0
    ahead = min(int(headroom.groups), max_lag * groups_per_step)
    return (published + 1) * groups_per_step + ahead
