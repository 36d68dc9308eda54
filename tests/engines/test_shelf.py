"""Weights in memory that an engine's processes map."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from file_weights import in_a_file

from streamrl.engines.shelf import Shelf, ShelfReader
from streamrl.sync.arena import Arena, ArenaReader, describe
from streamrl.sync.manifest import plan_manifest
from streamrl.sync.staging import tensors_in


def versions(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "matrix": torch.randn(5, 7), "half": torch.randn(3, dtype=torch.bfloat16), "none": torch.empty(0, 4),
        "scalar": torch.randn(()), "column": torch.randn(4, 6).T,
    }  # fmt: skip


def test_weights_cross_the_shelf_unchanged_version_after_version():
    shelf, reader = Shelf(), ShelfReader()
    for seed in (1, 2, 3):
        put = versions(seed)
        found = reader.views(**shelf.put(put))
        assert found.keys() == put.keys()
        assert all(
            torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in put.items()
        )
    shelf.close()


def test_a_shelf_serves_another_set_of_weights_in_new_memory_and_leaves_nothing_open():
    before = set(os.listdir("/proc/self/fd"))
    shelf, reader = Shelf(), ShelfReader()
    reader.views(**shelf.put(versions(1)))
    larger = {"matrix": torch.arange(1000.0)}
    assert torch.equal(reader.views(**shelf.put(larger))["matrix"], larger["matrix"])
    shelf.close()
    shelf.close()
    del shelf, reader
    assert set(os.listdir("/proc/self/fd")) == before
    assert not [name for name in os.listdir("/dev/shm") if "streamrl" in name]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], tensor) and one[name].dtype == tensor.dtype for name, tensor in other.items()
    )


def test_weights_that_lie_in_one_file_are_read_there_without_a_copy():
    shelf, reader, lying = Shelf(), ShelfReader(), in_a_file(versions(1))
    found = reader.views(**shelf.put(lying))
    assert same(found, versions(1))
    for name, tensor in versions(2).items():
        lying[name].copy_(tensor)
    assert same(found, versions(2)), "what is seen is the very memory"
    shelf.close()


def turned(lying: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return lying | {"matrix": lying["matrix"].T}


def beside(lying: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return lying | {"constant": torch.tensor([3.5, 4.5])}


def scattered(lying: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return lying | in_a_file({"elsewhere": torch.tensor([3.5, 4.5])})


@pytest.mark.parametrize("changed", [turned, beside, scattered])
def test_weights_that_lie_otherwise_are_copied(changed: Callable[..., dict[str, torch.Tensor]]):
    shelf, reader, given = Shelf(), ShelfReader(), changed(in_a_file(versions(1)))
    expected = {name: tensor.clone() for name, tensor in given.items()}
    found = reader.views(**shelf.put(given))
    for tensor in given.values():
        tensor.zero_()
    assert same(found, expected)
    shelf.close()


def test_weights_of_the_weight_plane_are_read_where_they_arrived():
    model = versions(1)
    manifest = plan_manifest(describe(model), 4096)
    arena = Arena(manifest)
    filling = arena.fill(1, lambda index: None)
    for name, tensor in model.items():
        filling.put(name, tensor)
    arrived = tensors_in(manifest, ArenaReader(arena.path, manifest).slot(1))
    shelf, reader = Shelf(), ShelfReader()
    before = os.listdir("/proc/self/fd")
    assert same(reader.views(**shelf.put(arrived)), model)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1, "that of the reader's mapping, and no file of the shelf"
    arena.close()
