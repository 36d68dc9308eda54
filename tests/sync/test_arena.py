"""Weights in shared memory, both sides in one process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from sync_support import equal, flip_byte, manifest_of, open_memfds, small_model, weights

from streamrl.errors import WeightSyncError
from streamrl.sync.arena import Arena, ArenaReader, describe
from streamrl.sync.manifest import ITEM_BYTES, plan_manifest


def test_tensors_arrive_bit_for_bit() -> None:
    model = small_model(1)
    arena = Arena(manifest_of(model))
    digests = arena.write(0, model.named_parameters())
    reader = ArenaReader(arena.path, arena.manifest)
    reader.verify(0, digests)
    assert equal(reader.tensors(0), weights(model))
    assert equal(reader.copy(0, digests), weights(model))


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_every_known_dtype_is_carried(dtype: str) -> None:
    pattern = torch.arange(48, dtype=torch.uint8).clamp(max=1 if dtype == "bool" else 255)
    tensor = pattern.view(getattr(torch, dtype)).reshape(2, -1)
    arena = Arena(plan_manifest(describe({"x": tensor}), 1024))
    arena.write(0, {"x": tensor})
    read = ArenaReader(arena.path, arena.manifest).tensors(0)["x"]
    assert read.dtype == tensor.dtype
    assert read.shape == tensor.shape
    assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))


def test_views_of_any_stride_are_written_as_they_read() -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4).t()
    arena = Arena(plan_manifest(describe({"x": tensor}), 1024))
    arena.write(0, iter([("x", tensor)]))
    assert torch.equal(ArenaReader(arena.path, arena.manifest).tensors(0)["x"], tensor.contiguous())


def test_a_reader_of_version_0_is_not_disturbed_by_version_1() -> None:
    a, b = small_model(1), small_model(2)
    arena = Arena(manifest_of(a))
    arena.write(0, a.named_parameters())
    reader = ArenaReader(arena.path, arena.manifest)
    views = reader.tensors(0)
    arena.write(1, b.named_parameters())
    assert equal(views, weights(a))
    assert equal(reader.tensors(1), weights(b))


def test_a_corrupted_bucket_is_named() -> None:
    manifest = plan_manifest([("a", (256,), "uint8"), ("b", (256,), "uint8"), ("c", (256,), "uint8")], 256)
    arena = Arena(manifest)
    digests = arena.write(0, {name: torch.zeros(256, dtype=torch.uint8) for name in "abc"})
    flip_byte(arena, 0, manifest.tensors[1].offset + 200)
    reader = ArenaReader(arena.path, manifest)
    with pytest.raises(WeightSyncError, match=r"bucket 1 of 3 \(b, …\) is corrupted"):
        reader.verify(0, digests)
    with pytest.raises(WeightSyncError, match=r"bucket 1 of 3 \(b, …\) is corrupted"):
        reader.copy(0, digests)


def test_a_slot_that_was_written_again_is_noticed() -> None:
    model = small_model(1)
    arena = Arena(manifest_of(model))
    digests = arena.write(0, model.named_parameters())
    reader = ArenaReader(arena.path, arena.manifest)
    assert reader.holds(0)
    arena.write(2, model.named_parameters())
    assert not reader.holds(0)
    for read in (reader.verify, reader.copy):
        with pytest.raises(WeightSyncError, match="slot 0 was to hold version 0, it holds 2"):
            read(0, digests)


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
    arena.write(0, named)
    reader = ArenaReader(arena.path, arena.manifest)
    assert reader.holds(0)
    change(named)
    with pytest.raises(WeightSyncError, match=message):
        arena.write(2, named)
    assert not reader.holds(0)
    assert not reader.holds(2)


def test_no_descriptor_and_no_mapping_is_left_after_both_sides_close() -> None:
    before = open_memfds(), len(os.listdir("/proc/self/fd"))
    arena = Arena(manifest_of(small_model(1)))
    digests = arena.write(0, small_model(1).named_parameters())
    reader = ArenaReader(arena.path, arena.manifest)
    reader.verify(0, digests)
    assert len(open_memfds()) > len(before[0])
    for _ in range(2):
        reader.close()
        arena.close()
    assert (open_memfds(), len(os.listdir("/proc/self/fd"))) == before
    assert "streamrl-weights" not in Path("/proc/self/maps").read_text()


def test_views_outlive_both_sides() -> None:
    model = small_model(1)
    arena = Arena(manifest_of(model))
    arena.write(0, model.named_parameters())
    reader = ArenaReader(arena.path, arena.manifest)
    views = reader.tensors(0)
    reader.close()
    arena.close()
    assert equal(views, weights(model))


def test_nothing_appears_under_a_name_that_could_stay_behind() -> None:
    before = os.listdir("/dev/shm")
    arena = Arena(manifest_of(small_model(1)))
    assert os.listdir("/dev/shm") == before
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
