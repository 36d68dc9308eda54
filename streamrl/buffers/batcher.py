"""Plan which rank trains on what: pure, deterministic, balanced by tokens.

A *part* is a group, or as much of it as fits the token budget. Its prompt is computed once, so it costs ``shared
prompt + sum of the rest of each trajectory``; the second part of a split group repeats the prompt. Parts go largest
first to the rank with the fewest tokens, then first-fit into micro-batches of at most ``token_budget`` tokens. Every
rank gets the same number of micro-batches, at least one, because ranks that shard a model must run in step; a rank
that needs fewer gets empty ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streamrl.errors import ConfigError
from streamrl.types import Group, TrainGroup, Trajectory

MicroBatches = list[list[TrainGroup]]


@dataclass(frozen=True)
class _Part:
    group: TrainGroup
    cost: int


def plan(
    groups: Sequence[Group],
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
        part
        for group, advantage, weight in zip(groups, advantages, token_weights, strict=True)
        for part in _parts(_trainable(group, advantage, weight, oldest_allowed), token_budget)
    ]
    parts.sort(key=lambda part: -part.cost)  # stable: equal costs stay in batch order
    by_rank: list[list[_Part]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for part in parts:
        rank = loads.index(min(loads))
        by_rank[rank].append(part)
        loads[rank] += part.cost
    packed = [_pack(rank_parts, token_budget) for rank_parts in by_rank]
    count = max(1, *(len(micro_batches) for micro_batches in packed))
    return [micro_batches + [[] for _ in range(count - len(micro_batches))] for micro_batches in packed]


def shared_prompt_length(trajectories: Sequence[Trajectory]) -> int:
    """Leading tokens that all trajectories share and none of them sampled: what a packed group computes once."""
    first = trajectories[0]
    shared = first.prompt_length
    for trajectory in trajectories[1:]:
        shared = min(shared, trajectory.prompt_length)
        differs = first.tokens[:shared] != trajectory.tokens[:shared]
        if differs.any():
            shared = int(np.argmax(differs))
    return shared


def packed_length(trajectories: Sequence[Trajectory]) -> int:
    """Tokens that the trainer computes for these trajectories of one group, the shared prompt once."""
    shared = shared_prompt_length(trajectories)
    return shared + sum(trajectory.length - shared for trajectory in trajectories)


def _trainable(group: Group, advantages: np.ndarray, weights: np.ndarray, oldest_allowed: int) -> TrainGroup | None:
    kept = [
        index
        for index, trajectory in enumerate(group.trajectories)
        if advantages[index] != 0 and any(version >= oldest_allowed for version, _ in trajectory.versions)
    ]
    if not kept:
        return None
    trajectories = [group.trajectories[index] for index in kept]
    return TrainGroup(group.lease, group.env, trajectories, np.asarray(advantages)[kept], np.asarray(weights)[kept])


def _parts(group: TrainGroup | None, token_budget: int) -> list[_Part]:
    if group is None:
        return []
    cost = packed_length(group.trajectories)
    if cost <= token_budget:
        return [_Part(group, cost)]
    shared = shared_prompt_length(group.trajectories)
    spans: list[tuple[int, int]] = []  # [start, end) of each part's trajectories
    start, cost = 0, shared
    for index, trajectory in enumerate(group.trajectories):
        if trajectory.length > token_budget:
            raise ConfigError(
                f"a trajectory of {trajectory.length} tokens (lease {group.lease}) exceeds "
                f"trainer.token_budget={token_budget}; raise it to at least model.max_length"
            )
        if cost + trajectory.length - shared > token_budget:
            spans.append((start, index))
            start, cost = index, shared
        cost += trajectory.length - shared
    spans.append((start, len(group.trajectories)))
    return [_part(group, start, end) for start, end in spans]


def _part(group: TrainGroup, start: int, end: int) -> _Part:
    trajectories = group.trajectories[start:end]
    part = TrainGroup(group.lease, group.env, trajectories, group.advantages[start:end], group.token_weights[start:end])
    return _Part(part, packed_length(trajectories))


def _pack(parts: Sequence[_Part], token_budget: int) -> MicroBatches:
    """First-fit; ``parts`` come largest first, which makes it first-fit-decreasing."""
    bins: MicroBatches = []
    room: list[int] = []
    for part in parts:
        index = next((index for index, left in enumerate(room) if part.cost <= left), len(bins))
        if index == len(bins):
            bins.append([])
            room.append(token_budget)
        bins[index].append(part.group)
        room[index] -= part.cost
    return bins
