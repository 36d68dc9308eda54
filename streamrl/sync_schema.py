"""The settings ``sync.*``; a part of the tree in ``streamrl/schema.py``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SyncConfig:
    bucket_bytes: int = 64 << 20
    timeout_s: float = 60.0
    """Seconds a rollouter may take to stage or commit a version before it is declared dead."""
    transport: str = "auto"
    """How weights travel: ``auto``, ``shm``, ``zmq``, ``collective``, ``disk`` or ``nixl`` (docs/weights.md)."""
    encoding: str = "full"
    """``full``, or ``delta``: what changed since the version that serves; for transports over a network."""
    anchor_every: int = 20
    """With ``encoding: delta``: versions from one full update to the next."""
    stage: str = "host"
    """Where a version waits for its commit: ``host`` (fetched and verified in host memory while the engine generates),
    ``device`` (and brought to where the engine computes; takes one more model there) or ``none`` (all of that happens
    while the engine stands still: for comparison)."""
    commit: str = "together"
    """When engines take it up: ``together`` (once all have staged it) or ``rolling`` (each as soon as it has)."""
    canary_every: int = 1
    """Versions from one canary to the next: trainer and engines score a short row and must agree. An engine that joins
    later is asked at once. 0: never."""
    on_mismatch: str = "stop"
    """When they do not: ``stop`` the run, or ``rollback`` (every engine goes back to the version before and the next
    version is tried, as long as ``max_lag`` leaves something to train on)."""
