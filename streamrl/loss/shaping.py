"""What an answer's length does to its reward, before any baseline is taken."""

from __future__ import annotations

import numpy as np


def overlong_penalty(lengths: np.ndarray, longest: int, cache: int) -> np.ndarray:
    """DAPO's soft penalty (arXiv 2503.14476), float64 in [−1, 0], reward units: falls linearly over the last ``cache``.

    0 up to ``longest − cache`` sampled tokens, −1 from ``longest``. Raises ``ValueError`` unless 0 < cache ≤ longest.
    """
    if not 0 < cache <= longest:
        raise ValueError(f"the cache must be positive and at most longest={longest}, got {cache}")
    return np.clip((longest - cache - np.asarray(lengths, dtype=np.float64)) / cache, -1.0, 0.0)


def length_reward(lengths: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """Length reward within a group (Kimi k1.5, arXiv 2501.12599), float64 ``[G]`` in [−½, ½].

    ½ for the shortest, −½ for the longest, linear between; a wrong answer never gains by being short. 0 where all
    lengths are equal.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    spread = np.ptp(lengths) if lengths.size else 0.0
    if not spread:
        return np.zeros_like(lengths)
    gain = 0.5 - (lengths - lengths.min()) / spread
    return np.where(correct, gain, np.minimum(gain, 0.0))
