"""Advantages of single tokens: discounted returns, GAE with a value head, and discounts between turns.

Arrays are flat and packed, ``[T]``, tokens of a sequence in order of time; ``mask`` is True where the policy sampled.
Tokens of prompt and environment are holes: no step of time passes there, and what follows reaches back through them.
"""

from __future__ import annotations

import numpy as np


def discounted_returns(
    rewards: np.ndarray, mask: np.ndarray, segments: np.ndarray, gamma: float, turns: np.ndarray | None = None
) -> np.ndarray:
    """``G_t = r_t + γ·G_next``, float64 ``[T]``, over the sampled tokens of each sequence; 0 in holes.

    With ``turns`` (int ``[T]``, not falling in a sequence) the discount is γ per *turn*, so that being long costs an
    answer nothing: G_t = Σ γ^(turn of s − turn of t)·r_s over the tokens s ≥ t.
    """
    result = np.zeros(len(rewards), dtype=np.float64)
    for steps in _sequences(mask, segments):
        following, turn = 0.0, None
        for t in steps[::-1]:
            passed = 1 if turns is None else (0 if turn is None else turn - turns[t])
            following = rewards[t] + gamma**passed * following
            result[t], turn = following, None if turns is None else turns[t]
    return result


def turn_discounts(turns: np.ndarray, mask: np.ndarray, segments: np.ndarray, gamma: float) -> np.ndarray:
    """``γ^(turns left)`` of each sampled token, float64 ``[T]``, 0 in holes: an outcome's share of each turn.

    Multiplied with a trajectory's advantage it gives the last turn all of it and earlier ones less.
    """
    result = np.zeros(len(turns), dtype=np.float64)
    for steps in _sequences(mask, segments):
        result[steps] = gamma ** (turns[steps].max() - turns[steps]).astype(np.float64)
    return result


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    segments: np.ndarray,
    gamma: float = 1.0,
    lam: float = 0.95,
    turns: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation (arXiv 1506.02438): advantages and returns ``A + V``, float64 ``[T]``.

    ``δ_t = r_t + γ·V_next − V_t``, ``A_t = δ_t + γλ·A_next`` over sampled tokens; after the last one both are 0. Holes
    carry V and A through and get 0 themselves. Not whitened: see ``advantages.whiten``.

    With ``turns`` (int ``[T]``) a step is a turn: its reward is the sum over the turn, its value that of its first
    sampled token, and all of its tokens share its advantage and return.
    """
    advantages, returns = np.zeros(len(rewards), dtype=np.float64), np.zeros(len(rewards), dtype=np.float64)
    for tokens in _sequences(mask, segments):
        steps = [tokens[i : i + 1] for i in range(len(tokens))] if turns is None else _by_turn(tokens, turns)
        advantage = value = 0.0
        for step in steps[::-1]:
            own = float(values[step[0]])
            delta = float(np.sum(rewards[step], dtype=np.float64)) + gamma * value - own
            advantage, value = delta + gamma * lam * advantage, own
            advantages[step], returns[step] = advantage, advantage + own
    return advantages, returns


def _sequences(mask: np.ndarray, segments: np.ndarray) -> list[np.ndarray]:
    """Indices of the sampled tokens of each sequence that has any, in order."""
    sampled = np.flatnonzero(mask)
    order = sampled[np.argsort(segments[sampled], kind="stable")]
    return [part for part in np.split(order, np.flatnonzero(np.diff(segments[order])) + 1) if len(part)]


def _by_turn(tokens: np.ndarray, turns: np.ndarray) -> list[np.ndarray]:
    return np.split(tokens, np.flatnonzero(np.diff(turns[tokens])) + 1)
