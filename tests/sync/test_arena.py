"""Weights in shared memory, both sides in one process."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_support import equal, fill, flip_byte, manifest_of, open_memfds, small_model, weights

from streamrl.errors import WeightSyncError
from streamrl.sync.arena import Arena, ArenaReader, Filling, describe
from streamrl.sync.manifest import ITEM_BYTES, plan_manifest
from streamrl.sync.staging import bucket_of, digest_of, require_digest, slot_memory, tensors_in


def test_tensors_arrive_bit_for_bit() -> None:
    model = small_model(1)
    arena = Arena(manifest_of(model))
    fill(arena, 1, 0, model.named_parameters())
    reader = ArenaReader(arena.path, arena.manifest)
    assert reader.holds(0, 1)
    assert equal(tensors_in(arena.manifest, reader.slot(1)), weights(model))


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_every_known_dtype_is_carried(dtype: str) -> None:
    pattern = torch.arange(48, dtype=torch.uint8).clamp(max=1 if dtype == "bool" else 255)
    tensor = pattern.view(getattr(torch, dtype)).reshape(2, -1)
    arena = Arena(plan_manifest(describe({"x": tensor}), 1024))
    fill(arena, 0, 0, {"x": tensor})
    read = tensors_in(arena.manifest, ArenaReader(arena.path, arena.manifest).slot(0))["x"]
    assert read.dtype == tensor.dtype
    assert read.shape == tensor.shape
    assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))


def test_views_of_any_stride_are_written_as_they_read() -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4).t()
    arena = Arena(plan_manifest(describe({"x": tensor}), 1024))
    fill(arena, 0, 0, iter([("x", tensor)]))
    read = tensors_in(arena.manifest, ArenaReader(arena.path, arena.manifest).slot(0))["x"]
    assert torch.equal(read, tensor.contiguous())


def test_a_reader_of_version_0_is_not_disturbed_by_version_1() -> None:
    a, b = small_model(1), small_model(2)
    arena = Arena(manifest_of(a))
    fill(arena, 0, 0, a.named_parameters())
    reader = ArenaReader(arena.path, arena.manifest)
    views = tensors_in(arena.manifest, reader.slot(0))
    fill(arena, 1, 1, b.named_parameters())
    assert equal(views, weights(a))
    assert equal(tensors_in(arena.manifest, reader.slot(1)), weights(b))


def test_a_corrupted_bucket_is_named() -> None:
    manifest = plan_manifest([("a", (256,), "uint8"), ("b", (256,), "uint8"), ("c", (256,), "uint8")], 256)
    arena = Arena(manifest)
    entries = fill(arena, 0, 0, {name: torch.zeros(256, dtype=torch.uint8) for name in "abc"})
    flip_byte(arena, 0, manifest.tensors[1].offset + 200)
    require_digest(manifest, 0, 0, digest_of(arena.bucket(0, 0)), entries[0].digest)
    with pytest.raises(WeightSyncError, match=r"version 0: bucket 1 of 3 \(b, …\) is corrupted"):
        require_digest(manifest, 0, 1, digest_of(arena.bucket(0, 1)), entries[1].digest)


def test_a_slot_that_is_written_again_is_noticed() -> None:
    model = small_model(1)
    arena = Arena(manifest_of(model))
    fill(arena, 0, 0, model.named_parameters())
    reader = ArenaReader(arena.path, arena.manifest)
    assert reader.holds(0, 0)
    arena.fill(0, lambda index: None)
    assert not reader.holds(0, 0)
    arena.seal(0, 2)
    assert reader.holds(2, 0)


@given(st.integers(256, 3000), st.lists(st.integers(1, 40), min_size=1, max_size=60), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_every_bucket_is_reported_once_and_complete_whatever_parts_come_in_whatever_order(
    bucket_bytes: int, cuts: list[int], random: Random
) -> None:
    named = weights(small_model(1))
    manifest = plan_manifest(describe(named), bucket_bytes)
    memory, reported = slot_memory(manifest), {}
    whole = slot_memory(manifest)
    complete = Filling(manifest, whole, lambda index: None)
    for name, tensor in named.items():
        complete.put(name, tensor)

    def report(index: int) -> None:
        assert index not in reported
        reported[index] = bytes(bucket_of(manifest, memory, index))

    filling, parts = Filling(manifest, memory, report), []
    for name, tensor in named.items():
        start = 0
        while start < tensor.numel():
            count = min(cuts[(start + len(parts)) % len(cuts)], tensor.numel() - start)
            parts.append((name, start, count))
            start += count
        if not tensor.numel():
            parts.append((name, 0, 0))
    random.shuffle(parts)
    for name, start, count in parts:
        filling.view(name, start, count).copy_(named[name].reshape(-1)[start : start + count])
        filling.wrote(name, start, count)
    filling.finish(0)
    assert [reported[index] for index in range(len(manifest.buckets))] == [
        bytes(bucket_of(manifest, whole, index)) for index in range(len(manifest.buckets))
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda named: named.pop("scale"), "version 2 lacks 1 tensors, the first is 'scale'"),
        (lambda named: named.update(extra=torch.zeros(1)), "'extra' is not in the manifest"),
        (lambda named: named.update(scale=torch.zeros(())), r"'scale': expected float64 \(\), got float32 \(\)"),
        (lambda named: named.update(empty=torch.zeros(0, 3)), r"expected float32 \(0, 4\), got float32 \(0, 3\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_and_the_slot_holds_nothing(change, message: str) -> None:
    named = weights(small_model(1))
    arena = Arena(manifest_of(small_model(1)))
    fill(arena, 0, 0, named)
    reader = ArenaReader(arena.path, arena.manifest)
    assert reader.holds(0, 0)
    change(named)
    with pytest.raises(WeightSyncError, match=message):
        fill(arena, 0, 2, named)
    assert not reader.holds(0, 0)
    assert not reader.holds(2, 0)


def mapped_weights() -> int:
    """Mappings of weights in this process, those that other tests hold included."""
    return Path("/proc/self/maps").read_text().count("streamrl-weights")


def test_no_descriptor_and_no_mapping_is_left_after_both_sides_close() -> None:
    before = open_memfds(), len(os.listdir("/proc/self/fd")), mapped_weights()
    arena = Arena(manifest_of(small_model(1)))
    fill(arena, 0, 0, small_model(1).named_parameters())
    reader = ArenaReader(arena.path, arena.manifest)
    assert reader.holds(0, 0)
    assert len(open_memfds()) > len(before[0])
    assert mapped_weights() > before[2]
    for _ in range(2):
        reader.close()
        arena.close()
    assert (open_memfds(), len(os.listdir("/proc/self/fd")), mapped_weights()) == before


def test_views_outlive_both_sides() -> None:
    model = small_model(1)
    arena = Arena(manifest_of(model))
    fill(arena, 0, 0, model.named_parameters())
    reader = ArenaReader(arena.path, arena.manifest)
    views = tensors_in(arena.manifest, reader.slot(0))
    reader.close()
    arena.close()
    assert equal(views, weights(model))


def named_memory() -> set[str]:
    """What this process has mapped of /dev/shm; other processes make names there meanwhile."""
    return {line.split()[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line}


def test_nothing_appears_under_a_name_that_could_stay_behind() -> None:
    before = named_memory()
    arena = Arena(manifest_of(small_model(1)))
    assert named_memory() == before
    assert os.readlink(arena.path).startswith("/memfd:streamrl-weights")


def test_a_publisher_that_is_gone_is_a_clear_error() -> None:
    arena = Arena(manifest_of(small_model(1)))
    arena.close()
    with pytest.raises(WeightSyncError, match="cannot open the publisher's memory .* must be alive"):
        ArenaReader(arena.path, arena.manifest)


def test_memory_of_another_manifest_is_refused() -> None:
    arena = Arena(plan_manifest([("a", (4,), "float32")], 1024))
    with pytest.raises(WeightSyncError, match="does not hold the weights of manifest"):
        ArenaReader(arena.path, plan_manifest([("b", (4,), "float32")], 1024))
    with pytest.raises(WeightSyncError, match="expected .* bytes of shared memory"):
        ArenaReader(arena.path, manifest_of(small_model(1)))


def test_readers_cannot_change_or_cut_the_memory() -> None:
    arena = Arena(manifest_of(small_model(1)))
    reader = ArenaReader(arena.path, arena.manifest)
    assert reader._memory.readonly
    fd = os.open(arena.path, os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)


def test_a_system_without_memfd_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(WeightSyncError, match="needs Linux"):
        Arena(manifest_of(small_model(1)))
