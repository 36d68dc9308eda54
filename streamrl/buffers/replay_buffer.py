"""The replay buffer: ready groups, and the batch that the trainer gets from them (C1 guarantee, C2, C4).

Pure like the ledger that it drives: time is an argument, nothing is sent. ``buffers/transfer_queue.py`` puts it on a
socket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from streamrl import staleness
from streamrl.buffers.batcher import plan
from streamrl.buffers.ledger import Delivery, Ledger, Refund
from streamrl.buffers.step_statistics import StepStatistics, has_zero_variance, lag_statistics
from streamrl.errors import ConfigError, StreamRLError, WireError
from streamrl.schema import Config
from streamrl.staleness import OnStale
from streamrl.types import Group, Lease, RankBatch

BYTES_PER_TOKEN = 9
"""int32 token, bool sampled, float32 behaviour log-prob."""

AdvantageFn = Callable[[list[np.ndarray]], list[np.ndarray]]
"""Rewards ``[G]`` of each group → advantages ``[G]`` of each group."""

WeightFn = Callable[[list[np.ndarray]], list[np.ndarray]]
"""Sampled-token counts ``[G]`` of each group → weight of one token of each trajectory, ``[G]`` per group."""


class PutStatus(StrEnum):
    """What became of a delivered group. In every case the buffer has taken responsibility: no retry is needed."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """This lease was delivered before."""
    LATE = "late"
    """The lease had expired, failed or been taken away; its prompt is issued again."""
    UNKNOWN = "unknown"
    """No such lease was ever granted."""
    FILTERED = "filtered"
    """All rewards are equal and ``group.drop_zero_variance`` is on."""
    STALE = "stale"
    """Under ``on_stale: wait``: it holds tokens older than its lease allows, so its sampler missed a weight update."""


@dataclass(frozen=True, slots=True)
class _Held:
    group: Group
    oldest: int
    newest: int
    nbytes: int


class ReplayBuffer:
    """Ready and handed-out groups, at most ``buffer.max_bytes`` of trajectory arrays together with what leases promise.

    Raises ``ConfigError`` for settings under which a batch could never be filled.
    """

    def __init__(self, config: Config, advantage_fn: AdvantageFn, weight_fn: WeightFn) -> None:
        self.config = config
        self.on_stale = OnStale(config.on_stale)
        self.ledger = Ledger(
            groups_per_step=config.group.per_step,
            max_lag=config.max_lag,
            group_size=config.group.size,
            lease_timeout_s=config.buffer.lease_timeout_s,
            max_attempts=config.buffer.max_attempts,
        )
        self.bytes = 0
        """Of trajectory arrays held, handed-out ones included."""
        self._advantages = advantage_fn
        self._weights = weight_fn
        self._worst_bytes = config.group.size * config.model.max_length * BYTES_PER_TOKEN
        self._ready: dict[int, _Held] = {}
        self._handed_out: dict[int, dict[int, _Held]] = {}
        self._statistics = StepStatistics()
        self._evicted = 0
        self._check_settings()

    # Leases -----------------------------------------------------------------------------------------------------------

    @property
    def grantable(self) -> int:
        """Leases that both pacing and the byte limit allow now."""
        promised = self.bytes + self.ledger.in_flight * self._worst_bytes
        return min(self.ledger.credits, max(0, self.config.buffer.max_bytes - promised) // self._worst_bytes)

    def lease(self, holder: str, count: int, now: float) -> list[Lease]:
        """Up to ``count`` leases for ``holder``."""
        return self.ledger.grant(holder, min(count, self.grantable), now)

    # Groups -----------------------------------------------------------------------------------------------------------

    def put(self, group: Group) -> PutStatus:
        """Take a delivered group. Raises ``WireError`` if it does not fit its lease, which then stays in flight."""
        record = self.ledger.find(group.lease)
        if record is not None:
            self._check_group(group, record.lease)
        outcome = self.ledger.deliver(group.lease)
        if outcome is not Delivery.ACCEPTED or record is None:
            return PutStatus(outcome.value)
        self._statistics.add(group)
        if self.config.group.drop_zero_variance and has_zero_variance(group):
            self.ledger.refund(group.lease, Refund.FILTERED)
            return PutStatus.FILTERED
        versions = [version for trajectory in group.trajectories for version, _ in trajectory.versions]
        held = _Held(group, min(versions), max(versions), group.nbytes)
        if self.on_stale is OnStale.WAIT and held.oldest < record.granted_version:
            self._count_eviction(group.lease)
            return PutStatus.STALE
        self._ready[group.lease] = held
        self.bytes += held.nbytes
        return PutStatus.ACCEPTED

    def next_batch(self, step: int, version: int, ranks: int) -> list[RankBatch] | None:
        """The parts of the batch of ``step`` for a trainer at ``version``, or ``None`` while it has to wait for groups.

        Oldest groups first. Re-checks every group against the bound (the guarantee of C1) whatever pacing did before.
        Raises ``StreamRLError`` while another step is handed out and not acknowledged.
        """
        if self._handed_out:
            raise StreamRLError(
                f"batch {step} was asked for while step {min(self._handed_out)} is not acknowledged; "
                "acknowledge it or hand it back"
            )
        self._evict_stale(version)
        per_step = self.config.group.per_step
        if len(self._ready) < per_step:
            return None
        order = sorted(self._ready, key=lambda lease: (self._ready[lease].oldest, lease))
        chosen, left = order[:per_step], order[per_step:]
        if self.on_stale is OnStale.WAIT:
            remaining = self.ledger.granted_versions() + [self._ready[lease].oldest for lease in left]
            if not staleness.may_hand_out(version, self.config.max_lag, per_step, remaining):
                return None
        self.ledger.hand_out(step, chosen)
        self._handed_out[step] = {lease: self._ready.pop(lease) for lease in chosen}
        return self._plan(step, version, ranks, [held.group for held in self._handed_out[step].values()])

    def acknowledge(self, step: int) -> int:
        """The optimizer step is done: its groups are consumed. Number of groups; 0 when it was acknowledged before.

        Raises ``StreamRLError`` for a step that was never handed out.
        """
        try:
            consumed = self.ledger.acknowledge(step)
        except KeyError as error:
            raise StreamRLError(error.args[0]) from None
        for held in self._handed_out.pop(step, {}).values():
            self.bytes -= held.nbytes
        return len(consumed)

    def hand_back(self) -> int:
        """The trainer died: what it had not acknowledged is ready again. Number of groups."""
        returned = 0
        for step, groups in self._handed_out.items():
            self.ledger.hand_back(step)
            self._ready.update(groups)
            returned += len(groups)
        self._handed_out.clear()
        return returned

    # Numbers ----------------------------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, float]:
        """The ``buffer/`` and ``ledger/`` keys, now; handed-out groups count in ``ledger/ready`` only."""
        ledger = self.ledger
        return {
            "buffer/ready_groups": float(len(self._ready)),
            "buffer/bytes": float(self.bytes),
            "ledger/issued": float(ledger.issued),
            "ledger/consumed": float(ledger.consumed),
            "ledger/in_flight": float(ledger.in_flight),
            "ledger/ready": float(ledger.ready),
            "ledger/refunded": float(ledger.refunded),
            "ledger/reissued": float(ledger.reissued),
        }

    def summary(self) -> dict[str, int]:
        """``groups`` of ``summary.json``; ``duplicates_trained`` and ``lost`` are 0 or the run is wrong."""
        ledger = self.ledger
        return {
            "issued": ledger.issued,
            "consumed": ledger.consumed,
            "refunded": ledger.refunded,
            "reissued": ledger.reissued,
            "duplicates_trained": ledger.duplicates_trained,
            "lost": ledger.lost,
        }

    # Inside -----------------------------------------------------------------------------------------------------------

    def _check_settings(self) -> None:
        config = self.config
        batch_bytes = self._worst_bytes * config.group.per_step
        if batch_bytes > config.buffer.max_bytes:
            raise ConfigError(
                f"buffer.max_bytes={config.buffer.max_bytes} may not hold one batch: "
                f"group.per_step={config.group.per_step} groups of group.size={config.group.size} × "
                f"model.max_length={config.model.max_length} tokens take up to {batch_bytes} bytes; "
                f"set buffer.max_bytes={batch_bytes} or more"
            )
        if config.model.max_length > config.trainer.token_budget:
            raise ConfigError(
                f"trainer.token_budget={config.trainer.token_budget} cannot hold one trajectory of "
                f"model.max_length={config.model.max_length} tokens; raise it to at least that"
            )

    def _check_group(self, group: Group, lease: Lease) -> None:
        where = f"group of lease {group.lease}"
        if group.prompt != lease.prompt:
            raise WireError(f"{where}: expected prompt {lease.prompt}, got {group.prompt}")
        if not 1 <= len(group.trajectories) <= lease.group_size:
            raise WireError(f"{where}: expected 1 to {lease.group_size} trajectories, got {len(group.trajectories)}")
        longest = max(trajectory.length for trajectory in group.trajectories)
        if longest > self.config.model.max_length:
            raise WireError(
                f"{where}: expected at most model.max_length={self.config.model.max_length} tokens, got {longest}; "
                "raise model.max_length or end the episode earlier"
            )
        if not any(trajectory.versions for trajectory in group.trajectories):
            raise WireError(f"{where}: expected a sampled token in some trajectory, got none")

    def _evict_stale(self, version: int) -> None:
        """The guarantee: drop groups that ``on_stale`` does not let a trainer at ``version`` use."""
        oldest_allowed = staleness.oldest_allowed(version, self.config.max_lag)
        masking = self.on_stale is OnStale.MASK
        for lease, held in list(self._ready.items()):
            too_old = (held.newest if masking else held.oldest) < oldest_allowed
            if too_old or held.newest > version:  # newer than the trainer: of a version that was rolled back
                del self._ready[lease]
                self.bytes -= held.nbytes
                self._count_eviction(lease)

    def _count_eviction(self, lease: int) -> None:
        self.ledger.refund(lease, Refund.EVICTED)
        self._evicted += 1

    def _plan(self, step: int, version: int, ranks: int, groups: list[Group]) -> list[RankBatch]:
        config = self.config
        oldest_allowed = staleness.oldest_allowed(version, config.max_lag)
        counts = [
            np.asarray([sum(n for _, n in trajectory.versions) for trajectory in group.trajectories], dtype=np.int64)
            for group in groups
        ]
        micro_batches = plan(
            groups,
            self._advantages([group.rewards for group in groups]),
            self._weights(counts),
            ranks=ranks,
            token_budget=config.trainer.token_budget,
            oldest_allowed=oldest_allowed,
        )
        stats = self._statistics.take(groups) | lag_statistics(groups, version, config.max_lag) | self.statistics()
        stats["lag/evicted_groups"] = float(self._evicted)
        self._evicted = 0
        return [RankBatch(step, version, oldest_allowed, part, dict(stats)) for part in micro_batches]
