"""What came of one weight update."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PublishReport:
    """What one weight update took, as in the ``sync/`` metrics."""

    version: int
    seconds: float
    """From the call of ``publish`` (or its turn) until every live member acknowledged."""
    pause_seconds: float
    """Longest time that one engine stood still."""
    bytes: int
    """Bytes of weights in the version."""
    delta_fraction: float
    """Bytes that travelled to each member, as a share of them."""
    rollouters: int
    """Rollouters that serve the version."""
    canary_rms: float = 0.0
    """Largest root mean square of engine minus trainer on the canary, nats."""
    rejected: str = ""
    """Why a canary rejected the version; every member is back at ``current_version``. Empty: it serves."""
