"""Plan which rank trains on what: pure, deterministic, balanced by tokens. Needs the descriptions of groups only.

A *part* is a group, or as much of it as fits the token budget. Its prompt is computed once, so it costs ``shared
prompt + sum of the rest of each trajectory``; the second part of a split group repeats the prompt. Parts go largest
first to the rank with the fewest tokens, then first-fit into micro-batches of at most ``token_budget`` tokens. Every
rank gets the same number of micro-batches, at least one, because ranks that shard a model must run in step; a rank
that needs fewer gets empty ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from streamrl.buffers.wire.messages import GroupMeta, MicroBatches, Part
from streamrl.errors import ConfigError


class _Sized(NamedTuple):
    cost: int
    """Tokens that the trainer computes."""
    part: Part


def plan(
    groups: Sequence[GroupMeta],
    advantages: Sequence[np.ndarray],
    token_weights: Sequence[np.ndarray],
    *,
    ranks: int,
    token_budget: int,
    oldest_allowed: int,
) -> list[MicroBatches]:
    """Micro-batches per rank. ``advantages`` and ``token_weights`` are ``[G]`` per group, over the full batch.

    Left out, because they have no gradient: trajectories with advantage exactly 0, and those whose tokens are all older
    than ``oldest_allowed``. The weights count them already, so leaving them out changes nothing else.

    Raises ``ConfigError`` for a trajectory longer than ``token_budget``.
    """
    parts = [
        sized
        for group, advantage, weight in zip(groups, advantages, token_weights, strict=True)
        for sized in _parts(group, advantage, weight, oldest_allowed, token_budget)
    ]
    parts.sort(key=lambda sized: -sized.cost)  # stable: equal costs stay in batch order
    by_rank: list[list[_Sized]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for sized in parts:
        rank = loads.index(min(loads))
        by_rank[rank].append(sized)
        loads[rank] += sized.cost
    packed = [_pack(rank_parts, token_budget) for rank_parts in by_rank]
    count = max(1, *(len(micro_batches) for micro_batches in packed))
    return [micro_batches + [[] for _ in range(count - len(micro_batches))] for micro_batches in packed]


def _parts(
    group: GroupMeta, advantages: np.ndarray, weights: np.ndarray, oldest_allowed: int, token_budget: int
) -> list[_Sized]:
    rows = [
        row
        for row, trajectory in enumerate(group.trajectories)
        if advantages[row] != 0 and any(version >= oldest_allowed for version, _ in trajectory.spans)
    ]
    own = [group.trajectories[row].length - group.shared for row in rows]
    spans: list[tuple[int, int, int]] = []  # (start, end, cost): rows[start:end] are one part
    start, cost = 0, group.shared
    for index, length in enumerate(own):
        if group.shared + length > token_budget:
            raise ConfigError(
                f"a trajectory of {group.shared + length} tokens (lease {group.lease}) exceeds "
                f"trainer.token_budget={token_budget}; raise it to at least model.max_length"
            )
        if cost + length > token_budget:
            spans.append((start, index, cost))
            start, cost = index, group.shared
        cost += length
    if rows:
        spans.append((start, len(rows), cost))
    return [
        _Sized(cost, Part(group.lease, rows[a:b], advantages[rows[a:b]].tolist(), weights[rows[a:b]].tolist()))
        for a, b, cost in spans
    ]


def _pack(parts: Sequence[_Sized], token_budget: int) -> MicroBatches:
    """First-fit; ``parts`` come largest first, which makes it first-fit-decreasing."""
    bins: MicroBatches = []
    room: list[int] = []
    for cost, part in parts:
        index = next((index for index, left in enumerate(room) if cost <= left), len(bins))
        if index == len(bins):
            bins.append([])
            room.append(token_budget)
        bins[index].append(part)
        room[index] -= cost
    return bins
