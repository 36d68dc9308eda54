"""Transport ``disk``: each version is a folder with one safetensors file, which anything can read.

::

    weights/.version-7/model.safetensors     while it is written; receivers read the buckets that are there
    weights/version-7/model.safetensors      complete: renamed in one step
    weights/version-6/ …                     the last KEPT versions stay, also when the run is over

For debugging, and for engines that load from disk alone. The file holds the tensors without the slab's padding, those
of wide elements first, so that each is aligned to its elements; both sides compute the places from the manifest.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from streamrl.errors import WeightSyncError
from streamrl.sync.manifest import ITEM_BYTES, Bucket, Manifest
from streamrl.sync.staging import HostStaging
from streamrl.sync.transport import BucketId, Receiver, Sender

FILE = "model.safetensors"
KEPT = 2
"""Newest complete versions that stay; older ones do while somebody may fetch them."""
PART_BYTES = 16 << 20
"""Read or written between two looks at whether to stop."""

_DTYPES = {
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"{sign}int{bits}": f"{sign.upper() or 'I'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "bfloat16": "BF16",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
"""What safetensors calls torch's dtypes."""


class Layout:
    """Where a file of ``manifest``'s tensors has what."""

    def __init__(self, manifest: Manifest) -> None:
        offsets: dict[int, int] = {}
        entries: dict[str, object] = {}
        end = 0
        widest_first = sorted(enumerate(manifest.tensors), key=lambda each: -ITEM_BYTES[each[1].dtype])
        for index, tensor in widest_first:
            offsets[index] = end
            entries[tensor.name] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [end, end + tensor.nbytes],
            }
            end += tensor.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self.header) + end
        self._offsets = {index: len(self.header) + offset for index, offset in offsets.items()}

    def parts(self, bucket: Bucket, memory: memoryview) -> Iterator[tuple[int, memoryview]]:
        """(place in the file, bytes in ``memory``) of all that ``bucket`` holds of tensors."""
        for piece in bucket.pieces:
            start = self._offsets[piece.tensor] + piece.tensor_offset
            for done in range(0, piece.nbytes, PART_BYTES):
                size = min(PART_BYTES, piece.nbytes - done)
                yield start + done, memory[piece.offset + done : piece.offset + done + size]


class DiskSender(Sender):
    """Writes each version to ``folder``, which is its own: versions that an earlier life left there are removed."""

    name = "disk"

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        self._manifest = manifest
        self._layout = Layout(manifest)
        self._folder = folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in (*self._folder.glob("version-*"), *self._folder.glob(".version-*")):
            shutil.rmtree(left, ignore_errors=True)
        self.address = str(self._folder)
        self._open: dict[int, int] = {}
        """Descriptors of the versions that are being written."""
        self._offered: set[int] = set()
        """Versions that somebody may fetch."""

    async def run(self) -> None:
        await asyncio.Event().wait()

    def set_members(self, names: set[str]) -> None:
        """Who reads needs not be known."""

    async def begin(self, version: BucketId) -> None:
        if version.version not in self._offered:  # else it is all there, and one more member wants it
            with _as_sync_error(f"version {version.version} cannot be written to {self._folder}"):
                self._open[version.version] = await asyncio.to_thread(self._create, version.version)
            self._offered.add(version.version)

    async def offer(self, bucket: BucketId, payload: memoryview) -> None:
        fd = self._open.get(bucket.version)
        if fd is None:
            return
        parts = self._layout.parts(self._manifest.buckets[bucket.index], payload)
        with _as_sync_error(f"version {bucket.version} cannot be written to {self._folder}"):
            await _on_thread(parts, lambda place, part: _write_all(fd, part, place))

    async def complete(self, version: BucketId) -> None:
        fd = self._open.pop(version.version, None)
        if fd is not None:
            with _as_sync_error(f"version {version.version} cannot be completed in {self._folder}"):
                await asyncio.to_thread(self._finish, version.version, fd)

    def withdraw(self, version: int) -> None:
        """One that is complete stays for whoever wants to look at it, until there are KEPT newer ones."""
        self._offered.discard(version)
        fd = self._open.pop(version, None)
        if fd is not None:
            os.close(fd)
            shutil.rmtree(self._folder / _aside(version), ignore_errors=True)

    def close(self) -> None:
        for version in list(self._open):
            self.withdraw(version)

    def _create(self, version: int) -> int:
        shutil.rmtree(self._folder / _final(version), ignore_errors=True)  # of an attempt that was withdrawn
        aside = self._folder / _aside(version)
        aside.mkdir()
        fd = os.open(aside / FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(fd, 0, self._layout.nbytes)
            _write_all(fd, memoryview(self._layout.header), 0)
        except OSError:
            os.close(fd)
            shutil.rmtree(aside)
            raise
        return fd

    def _finish(self, version: int, fd: int) -> None:
        os.close(fd)
        os.rename(self._folder / _aside(version), self._folder / _final(version))
        complete = sorted(int(path.name.removeprefix("version-")) for path in self._folder.glob("version-*"))
        for old in set(complete[:-KEPT]) - self._offered:
            shutil.rmtree(self._folder / _final(old), ignore_errors=True)


class DiskReceiver(Receiver):
    """Reads buckets into two slots of private memory. ``timeout_s``: for the bytes of one bucket."""

    in_place = False

    def __init__(self, address: str, manifest: Manifest, *, timeout_s: float) -> None:
        self._folder = Path(address)
        self._manifest = manifest
        self._layout = Layout(manifest)
        self._staging = HostStaging(manifest)
        self._timeout_s = timeout_s

    def memory(self, slot: int) -> memoryview:
        return self._staging.memory(slot)

    async def fetch(self, bucket: BucketId, out: memoryview) -> None:
        planned = self._manifest.buckets[bucket.index]
        if out.nbytes != planned.nbytes:
            raise WeightSyncError(f"bucket {bucket.index} takes {planned.nbytes} bytes, asked for are {out.nbytes}")
        with _as_sync_error(f"version {bucket.version} cannot be read from {self._folder}"):
            fd = self._find(bucket.version)
            try:
                async with asyncio.timeout(self._timeout_s):
                    await _on_thread(self._layout.parts(planned, out), lambda place, part: _read_all(fd, part, place))
            except TimeoutError:
                raise WeightSyncError(
                    f"{self._folder}: bucket {bucket.index} of version {bucket.version} was not read within "
                    f"{self._timeout_s:g} s"
                ) from None
            finally:
                os.close(fd)

    def close(self) -> None:
        self._staging.close()

    def _find(self, version: int) -> int:
        try:
            return os.open(self._folder / _aside(version) / FILE, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return os.open(self._folder / _final(version) / FILE, os.O_RDONLY | os.O_CLOEXEC)


def _aside(version: int) -> str:
    return f".version-{version}"


def _final(version: int) -> str:
    return f"version-{version}"


@contextlib.contextmanager
def _as_sync_error(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeightSyncError(f"{what}: {error}") from None


async def _on_thread(parts: Iterator[tuple[int, memoryview]], move: Callable[[int, memoryview], None]) -> None:
    """Move all parts on a thread; a cancelled call has stopped when it raises."""
    stop = threading.Event()

    def work() -> None:
        for place, part in parts:
            if stop.is_set():
                return
            move(place, part)

    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([working])
        raise


def _write_all(fd: int, part: memoryview, place: int) -> None:
    while part.nbytes:
        done = os.pwrite(fd, part, place)
        part, place = part[done:], place + done


def _read_all(fd: int, part: memoryview, place: int) -> None:
    while part.nbytes:
        done = os.preadv(fd, [part], place)
        if not done:
            raise OSError(f"the file ends at byte {place}")
        part, place = part[done:], place + done
