"""Equal digests are equal weights, wherever and whenever they were written."""

from __future__ import annotations

import torch
from sync_support import fill

from streamrl.sync.arena import Arena, describe
from streamrl.sync.digest import weights_digest
from streamrl.sync.manifest import plan_manifest

WEIGHTS = {"a": torch.arange(100, dtype=torch.float32), "b": torch.full((3, 5), -0.5), "c": torch.zeros(0)}


def digests(*versions: dict[str, torch.Tensor]) -> list[str]:
    """Of versions 0, 1, … in one arena of several buckets, padding between the tensors."""
    arena = Arena(plan_manifest(describe(WEIGHTS), 512))
    try:
        written = [fill(arena, number % 2, number, one) for number, one in enumerate(versions)]
        return [weights_digest(arena.manifest, [entry.digest for entry in entries]) for entries in written]
    finally:
        arena.close()


def test_equal_weights_have_one_digest_in_every_slot_version_and_process():
    others = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    first, second, other, again = digests(WEIGHTS, WEIGHTS, others, WEIGHTS)
    assert first == second == again != other
    assert digests(WEIGHTS) == [first]


def test_one_bit_makes_another_digest():
    negative_zero = {**WEIGHTS, "a": WEIGHTS["a"].clone()}
    negative_zero["a"][0] = -0.0
    same, other = digests(WEIGHTS, negative_zero)
    assert same != other
