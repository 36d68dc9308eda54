"""A micro-batch as the tensors of one forward pass, in which tokens that trajectories share are computed once.

The trajectories of a group start with the same prompt, often with the same first sampled tokens. A token's hidden state
depends on the tokens before it only, so that a group is a *tree* of tokens. Example, prompt ``a b``, three answers::

    trajectories   a b x y      tree   a ─ b ┬ x ┬ y        columns   0 1 2 3 4 5
                   a b x z                   │   └ z        tokens    a b x y z w
                   a b w                     └ w            positions 0 1 2 3 3 2
                                                            end       6 6 5 4 5 6

Columns are the tree in depth-first order, so that the subtree of a column is the interval up to its ``end`` and token q
may attend to token k exactly if ``k ≤ q < end[k]``: that is the whole attention mask. Trees (*items*) are laid out in
rows ``[R, L]``; a hidden state is read wherever it predicts a trainable token, several times where answers part.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamrl.errors import StalenessError
from streamrl.types import TrainGroup, Trajectory, expand_versions

ROW_MULTIPLE = 8
"""Row lengths are rounded up to this many tokens, for the kernels."""


@dataclass(frozen=True)
class Packed:
    """Rows ``[R, L]`` and the N trainable tokens of a micro-batch. ``pack`` is the only maker."""

    tokens: Tensor
    """int64 ``[R, L]``; padding is token 0."""
    positions: Tensor
    """int64 ``[R, L]``, position within the trajectory."""
    end: Tensor
    """int64 ``[R, L]``, first column after the token's subtree; for padding the next column."""
    source: Tensor
    """int64 ``[N]``, flat index into ``[R·L]`` of the hidden state that predicts the target."""
    target: Tensor
    """int64 ``[N]``, the sampled token."""
    behaviour: Tensor
    """float32 ``[N]``, the sampler's log-prob."""
    advantages: Tensor
    """float32 ``[N]``."""
    token_weights: Tensor
    """float32 ``[N]``, weight of the token in the batch's loss."""
    lag: Tensor
    """int64 ``[N]``, trainer's version − the token's version."""
    carried: Tensor
    """bool ``[N]``, sampled after an update in the middle of its turn: an engine that keeps its KV cache across updates
    (``engine.kv=keep``) read keys and values there that an older version had computed."""
    trajectory: Tensor
    """int64 ``[N]``, which trajectory of the micro-batch."""
    turns_left: Tensor
    """int64 ``[N]``, turns of the trajectory after the token's own; a turn is a run of sampled tokens."""
    reward_shift: Tensor
    """float32 ``[N]``, moves the rewards of turns from the end of the trajectory to the ends of their turns: what each
    turn was given at its last trained token, less all that its trajectory's turns were given at the last of all."""
    trajectories: int
    masked_tokens: int
    """Sampled tokens over the lag bound, which are not among the N."""
    masked_weight: float
    """Loss weight of those."""

    def attention_mask(self) -> Tensor:
        """bool ``[R, 1, L, L]``, True where the query (third axis) may attend to the key.

        Padding sees itself only: a row without any key would give NaN.
        """
        column = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        query, key = column[:, None], column[None, :]
        return ((key <= query) & (query < self.end[:, None, :]))[:, None]

    def to(self, device: torch.device) -> Packed:
        if self.tokens.device == device:
            return self
        tensors: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **tensors)


def pack(groups: list[TrainGroup], version: int, oldest_allowed: int, row_tokens: int) -> Packed:
    """Lay a micro-batch out for a trainer at policy ``version``.

    Trainable are sampled tokens whose version is at least ``oldest_allowed``; older ones are masked here (C1), whatever
    weight they came with. Values and gradients equal those of one trajectory at a time, because every hidden state sees
    exactly the tokens before it in its own trajectory. A tree stops growing at ``row_tokens`` tokens and the rest of
    its group starts a new one; a single longer trajectory is a tree of its own.

    Raises ``StalenessError`` for a token newer than ``version``, ``ValueError`` for a trajectory whose arrays do not
    fit each other or that starts with a sampled token. An empty micro-batch gives one row of padding.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    targets = _targets(trajectories, version, oldest_allowed)
    forest = _grow([len(group.trajectories) for group in groups], trajectories, targets, row_tokens)
    advantages, token_weights = (
        np.concatenate([np.zeros(0), *arrays])[targets.trajectory].astype(np.float32)
        for arrays in ([group.advantages for group in groups], [group.token_weights for group in groups])
    )
    rows = _lay_out(forest)
    return Packed(
        tokens=torch.from_numpy(rows.tokens),
        positions=torch.from_numpy(rows.positions),
        end=torch.from_numpy(rows.end),
        source=torch.from_numpy(rows.place[forest.node(targets.trajectory, targets.position - 1)]),
        target=torch.from_numpy(targets.token),
        behaviour=torch.from_numpy(targets.behaviour),
        advantages=torch.from_numpy(advantages),
        token_weights=torch.from_numpy(token_weights),
        lag=torch.from_numpy(version - targets.version),
        carried=torch.from_numpy(targets.carried),
        trajectory=torch.from_numpy(targets.trajectory),
        turns_left=torch.from_numpy(targets.turns_left),
        reward_shift=torch.from_numpy(targets.reward_shift),
        trajectories=len(trajectories),
        masked_tokens=targets.masked,
        masked_weight=float(np.concatenate([np.zeros(0), *(g.token_weights for g in groups)]) @ targets.masked_counts),
    )


@dataclass(frozen=True)
class _Targets:
    """Trainable tokens of all trajectories, one trajectory after the other; arrays ``[N]``."""

    trajectory: np.ndarray
    position: np.ndarray
    token: np.ndarray
    behaviour: np.ndarray
    version: np.ndarray
    carried: np.ndarray
    turns_left: np.ndarray
    reward_shift: np.ndarray
    masked: int
    masked_counts: np.ndarray
    """By trajectory."""


def _targets(trajectories: list[Trajectory], version: int, oldest_allowed: int) -> _Targets:
    lengths = np.asarray([len(t.tokens) for t in trajectories], dtype=np.int64)
    if any(len(t.sampled) != len(t.tokens) or len(t.behaviour) != len(t.tokens) for t in trajectories):
        raise ValueError("tokens, sampled and behaviour of a trajectory must have the same length")
    sampled = np.flatnonzero(np.concatenate([np.zeros(0, dtype=bool), *(t.sampled for t in trajectories)]))
    trajectory = np.repeat(np.arange(len(trajectories)), lengths)[sampled]
    position = sampled - (np.cumsum(lengths) - lengths)[trajectory]
    versions = expand_versions(list(chain.from_iterable(t.versions for t in trajectories)))
    counted = np.asarray([sum(count for _, count in t.versions) for t in trajectories], dtype=np.int64)
    if (np.bincount(trajectory, minlength=len(trajectories)) != counted).any():
        raise ValueError("the versions of a trajectory must count its sampled tokens")
    if (position == 0).any():
        raise ValueError("a trajectory starts with a sampled token: it needs at least one prompt token before it")
    if (versions > version).any():
        raise StalenessError(f"a token of version {versions.max()} reached a trainer at version {version}")
    fresh = versions >= oldest_allowed
    tokens = np.concatenate([np.zeros(0, dtype=np.int32), *(t.tokens for t in trajectories)])
    behaviour = np.concatenate([np.zeros(0, dtype=np.float32), *(t.behaviour for t in trajectories)])
    kept = sampled[fresh]
    opens = np.diff(trajectory, prepend=-1) != 0
    begins = opens | (np.diff(position, prepend=0) != 1)
    turn = np.cumsum(begins)
    last = np.zeros(len(trajectories), dtype=np.int64)
    np.maximum.at(last, trajectory, turn)
    return _Targets(
        trajectory=trajectory[fresh],
        position=position[fresh],
        token=tokens[kept].astype(np.int64),
        behaviour=behaviour[kept].astype(np.float32),
        version=versions[fresh],
        carried=(versions != versions[begins][turn - 1])[fresh],
        turns_left=(last[trajectory] - turn)[fresh],
        reward_shift=_reward_shift(trajectories, trajectory[fresh], turn[fresh], last),
        masked=int(len(versions) - len(kept)),
        masked_counts=np.bincount(trajectory[~fresh], minlength=len(trajectories)),
    )


def _reward_shift(
    trajectories: list[Trajectory], trajectory: np.ndarray, turn: np.ndarray, last: np.ndarray
) -> np.ndarray:
    """float32 ``[N]`` of the N fresh targets. ``turn`` counts the turns of all trajectories from 1; ``last`` ``[M]`` is
    the last one of each trajectory. A turn without a fresh token has only older ones before it, so nothing is lost.
    """
    shift = np.zeros(len(trajectory), dtype=np.float64)
    if any(each.turn_rewards for each in trajectories):
        given = np.zeros(int(last.max(initial=0)) + 1, dtype=np.float64)
        for each, end in zip(trajectories, last.tolist(), strict=True):
            given[end + 1 - len(each.turn_rewards) : end + 1] = each.turn_rewards
        total = np.asarray([sum(each.turn_rewards) for each in trajectories])
        shift += np.where(np.diff(turn, append=-1) != 0, given[turn], 0.0)
        shift -= np.where(np.diff(trajectory, append=-1) != 0, total[trajectory], 0.0)
    return shift.astype(np.float32)


@dataclass(frozen=True)
class _Forest:
    """All trees as F nodes (distinct input tokens) in depth-first order, made of M trajectories of up to W tokens."""

    tokens: np.ndarray
    positions: np.ndarray
    end: np.ndarray
    """First node after the subtree, global."""
    item: np.ndarray
    """Which item (tree) a node belongs to."""
    item_start: np.ndarray
    """First node of each item, ``[items]``."""
    item_size: np.ndarray
    rank: np.ndarray
    """``[M]``, place of a trajectory in the order that the trees were grown in."""
    owner: np.ndarray
    """``[M, W]`` by rank and position: rank of the trajectory that brought the node in."""
    first: np.ndarray
    """``[M]`` by rank: node of a trajectory's position 0, were it all its own (its first own node − shared tokens)."""

    def node(self, trajectory: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Node of a trajectory's token."""
        return self.first[self.owner[self.rank[trajectory], position]] + position


def _grow(sizes: list[int], trajectories: list[Trajectory], targets: _Targets, row_tokens: int) -> _Forest:
    """Grow one tree per group (several where it passes ``row_tokens``) from the tokens that predict a target.

    Sorted by content, trajectories with a common beginning are neighbours, and each brings in the tokens after the
    longest common prefix with the one before it.
    """
    count = len(trajectories)
    needed = np.zeros(count, dtype=np.int64)
    np.maximum.at(needed, targets.trajectory, targets.position)
    inputs = [t.tokens[:n].astype(np.int32, copy=False) for t, n in zip(trajectories, needed.tolist(), strict=True)]
    order, opens = _sorted_by_content(sizes, inputs)
    length, column = needed[order], np.arange(needed.max(initial=0) + 1)
    filled = column < length[:, None]
    grid = np.full(filled.shape, -1, dtype=np.int64)
    grid[filled] = np.concatenate([np.zeros(0, dtype=np.int32), *(inputs[i] for i in order)])
    item, shared = _split(_shared_with_previous(grid, opens), length, opens, row_tokens)

    own = column >= shared[:, None]
    ranks = np.arange(count)[:, None]
    following = np.full_like(grid, count)
    following[:-1] = np.minimum.accumulate(np.where(own, ranks, count)[:0:-1], axis=0)[::-1]
    start = np.concatenate([[0], np.cumsum(length - shared)])
    kept = own & filled
    by_rank, positions = np.nonzero(kept)
    item_start = start[np.flatnonzero(np.diff(item, prepend=-1))]
    rank = np.empty(count, dtype=np.int64)
    rank[order] = np.arange(count)
    return _Forest(
        tokens=grid[kept],
        positions=positions,
        end=start[following[kept]],
        item=item[by_rank],
        item_start=item_start,
        item_size=np.diff(item_start, append=start[-1]),
        rank=rank,
        owner=np.maximum.accumulate(np.where(own, ranks, 0), axis=0),
        first=start[:-1] - shared,
    )


def _sorted_by_content(sizes: list[int], inputs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """An order in which common beginnings are neighbours within a group, and bool ``[M]``: a group opens here."""
    # Bytes order token by token; which token is the smaller one does not matter.
    keys = [tokens.tobytes() for tokens in inputs]
    order: list[int] = []
    opens = np.zeros(len(inputs), dtype=bool)
    for size in sizes:
        start = len(order)
        opens[start : start + min(size, 1)] = True
        order += sorted(range(start, start + size), key=keys.__getitem__)
    return np.asarray(order, dtype=np.int64), opens


def _shared_with_previous(grid: np.ndarray, opens: np.ndarray) -> np.ndarray:
    """Tokens ``[M]`` that each row of ``grid`` ``[M, W]`` has in common with the row before; 0 where a group opens."""
    shared = np.zeros(len(grid), dtype=np.int64)
    # The last column is padding (−1) everywhere, so that every pair of neighbours parts somewhere.
    shared[1:] = np.argmax((grid[1:] != grid[:-1]) | (grid[1:] < 0), axis=1)
    shared[opens] = 0
    return shared


def _split(shared: np.ndarray, length: np.ndarray, opens: np.ndarray, row_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Item of each trajectory ``[M]``, and ``shared`` with 0 where a group goes on in a new item."""
    item, size = -1, 0
    items, common_in_item = [], []
    for common, total, opening in zip(shared.tolist(), length.tolist(), opens.tolist(), strict=True):
        own = total - common
        if opening or (own and size + own > row_tokens):
            item, size, common, own = item + 1, 0, 0, total
        size += own
        items.append(item)
        common_in_item.append(common)
    return np.asarray(items, dtype=np.int64), np.asarray(common_in_item, dtype=np.int64)


@dataclass(frozen=True)
class _Rows:
    tokens: np.ndarray
    positions: np.ndarray
    end: np.ndarray
    place: np.ndarray
    """``[F]``, flat index into ``[R·L]`` of each node."""


def _lay_out(forest: _Forest) -> _Rows:
    width = max(ROW_MULTIPLE, -(-int(forest.item_size.max(initial=0)) // ROW_MULTIPLE) * ROW_MULTIPLE)
    item_row, item_column, rows = _fit(forest.item_size, width)
    shift = item_column - forest.item_start
    columns = np.arange(len(forest.tokens)) + shift[forest.item]
    place = item_row[forest.item] * width + columns
    tokens, positions = np.zeros(rows * width, dtype=np.int64), np.zeros(rows * width, dtype=np.int64)
    end = np.tile(np.arange(1, width + 1), rows)
    tokens[place], positions[place], end[place] = forest.tokens, forest.positions, forest.end + shift[forest.item]
    shape = (rows, width)
    return _Rows(tokens.reshape(shape), positions.reshape(shape), end.reshape(shape), place)


def _fit(sizes: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Best fit, largest first: row and first column of each item, and the number of rows (at least one)."""
    row, column = np.zeros(len(sizes), dtype=np.int64), np.zeros(len(sizes), dtype=np.int64)
    free = [(width, 0)]
    """(columns left, row), sorted."""
    rows = 1
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        at = bisect_left(free, (size, -1))
        if at == len(free):
            left, row[item] = width, rows
            rows += 1
        else:
            left, row[item] = free.pop(at)
        column[item] = width - left
        insort(free, (left - size, int(row[item])))
    return row, column, rows
