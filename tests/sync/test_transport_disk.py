"""Transport ``disk``: folders that anything can read, complete or not there, and no more of them than are needed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transport_support import (
    bucket_id,
    expected,
    fetch_version,
    fetched,
    mixed,
    offer_version,
    receiving,
    refused,
    same_bits,
    sending,
)

from streamrl.sync.manifest import ITEM_BYTES, plan_manifest
from streamrl.sync.staging import bucket_of
from streamrl.sync.transports.disk import FILE, Layout


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "weights"))


def test_a_version_is_a_safetensors_file_once_it_is_complete(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sending("disk", mixed(), tmp_path) as (sender, slab):
            await offer_version(sender, slab, 3, 0, buckets=2)
            assert names(tmp_path) == [".version-3"]
            sender.withdraw(3)
            await offer_version(sender, slab, 3, 0)
            assert names(tmp_path) == ["version-3"]

    asyncio.run(scenario())
    assert os.listdir(tmp_path / "weights" / "version-3") == [FILE]
    assert same_bits(load_file(tmp_path / "weights" / "version-3" / FILE), expected(mixed(), 3))


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_every_known_dtype_has_its_name_in_the_file(dtype: str, tmp_path: Path) -> None:
    manifest = plan_manifest([("x", (3, 2), dtype), ("odd", (3,), "uint8"), ("wide", (1,), "float64")], 1024)

    async def scenario() -> None:
        async with sending("disk", manifest, tmp_path) as (sender, slab):
            await offer_version(sender, slab, 0, 0)

    asyncio.run(scenario())
    loaded = load_file(tmp_path / "weights" / "version-0" / FILE)
    assert loaded["x"].dtype == getattr(torch, dtype)
    assert same_bits(loaded, expected(manifest, 0))


def test_buckets_are_read_before_the_version_is_complete(tmp_path: Path) -> None:
    manifest = mixed()

    async def scenario() -> None:
        async with sending("disk", manifest, tmp_path) as (sender, slab):
            await offer_version(sender, slab, 0, 0, buckets=1)
            with receiving("disk", sender.address, manifest) as receiver:
                out = bucket_of(manifest, receiver.memory(0), 0)
                await receiver.fetch(bucket_id(0, 0, 0), out)
                assert out == slab.bucket(0, 0)

    asyncio.run(scenario())


def test_the_last_two_versions_stay_and_whatever_may_still_be_fetched(tmp_path: Path) -> None:
    manifest = mixed()

    async def scenario() -> None:
        async with sending("disk", manifest, tmp_path) as (sender, slab):
            for version in range(4):
                sender.withdraw(version - 2)
                await offer_version(sender, slab, version, version % 2)
            assert names(tmp_path) == ["version-2", "version-3"]
            for rejected in (4, 5, 6):  # 3 serves on, and a late joiner asks for it
                sender.withdraw(rejected - 1 if rejected > 4 else 2)
                await offer_version(sender, slab, rejected, 0)
            assert names(tmp_path) == ["version-3", "version-5", "version-6"]
            with receiving("disk", sender.address, manifest) as late:
                await fetch_version(late, manifest, 3, 1, private=True)
                assert same_bits(fetched(late, manifest, 1), expected(manifest, 3))

    asyncio.run(scenario())
    assert names(tmp_path) == ["version-3", "version-5", "version-6"]


def test_what_an_earlier_life_left_is_gone_and_what_is_incomplete_goes_with_its_sender(tmp_path: Path) -> None:
    for left in (".version-7", "version-30"):
        (tmp_path / "weights" / left).mkdir(parents=True)
        (tmp_path / "weights" / left / FILE).write_bytes(b"old")

    async def scenario() -> None:
        async with sending("disk", mixed(), tmp_path) as (sender, slab):
            assert names(tmp_path) == []
            await offer_version(sender, slab, 0, 0)
            await offer_version(sender, slab, 1, 1, buckets=1)

    asyncio.run(scenario())
    assert names(tmp_path) == ["version-0"]


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    manifest = mixed()

    async def scenario() -> str:
        async with sending("disk", manifest, tmp_path) as (sender, slab):
            await offer_version(sender, slab, 0, 0)
            path = tmp_path / "weights" / "version-0" / FILE
            os.truncate(path, Layout(manifest).nbytes - 1)
            with receiving("disk", sender.address, manifest) as receiver:
                return await refused(fetch_version(receiver, manifest, 0, 0))

    assert "version 0 cannot be read from" in asyncio.run(scenario())


def test_a_disk_that_is_full_gives_the_version_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)

    async def scenario() -> str:
        async with sending("disk", mixed(), tmp_path) as (sender, slab):
            return await refused(offer_version(sender, slab, 0, 0))

    assert "version 0 cannot be written to" in asyncio.run(scenario())
    assert names(tmp_path) == []
