"""The weight plane over ``nixl`` with targets that count to several hosts, and what they read from the source."""

from __future__ import annotations

import os
import threading

from streamrl.bench.sync import plane
from streamrl.bench.sync.stage import Role
from streamrl.sync.transport import BucketId
from streamrl.sync.transports import nixl_pull
from streamrl.sync.transports.host_share import HOST_VARIABLE
from streamrl.sync.transports.nixl_memory import Owner, Pull

Source = plane.Source


class CountingPull(Pull):
    """Counts what this process reads from the trainer."""

    from_trainer = 0

    def fetch(self, owner: Owner, bucket: BucketId, out: memoryview, stopped: threading.Event) -> None:
        super().fetch(owner, bucket, out, stopped)
        if owner.name == nixl_pull.TRAINER:
            CountingPull.from_trainer += out.nbytes


class Target(plane.Target):
    """``options["hosts"]``: how many hosts the targets are dealt to; none of them is the source's."""

    def __init__(self, role: Role) -> None:
        super().__init__(role)
        self._host = f"host-{int(role.name.rpartition('-')[2]) % role.options['hosts']}"

    async def open(self, address: str) -> None:
        os.environ[HOST_VARIABLE] = self._host
        nixl_pull.Pull = CountingPull  # type: ignore[misc]
        await super().open(address)

    async def update(self, version: int) -> dict[str, float]:
        """The source's update has ended, and with it ours: what was read since the last one."""
        nbytes, CountingPull.from_trainer = CountingPull.from_trainer, 0
        return {"from_trainer": nbytes}

    async def close(self) -> None:
        await super().close()
        del os.environ[HOST_VARIABLE]
        nixl_pull.Pull = Pull  # type: ignore[misc]
