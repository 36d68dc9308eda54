"""The controller of ``streamrl parity``: the ring is assembled and judged, and nothing is trained."""

from __future__ import annotations

import time

from streamrl.actors.controller import Controller
from streamrl.runtime.messages import Start


class ParityController(Controller):
    """A run that ends with the verdict of its gates."""

    async def _phases(self) -> None:
        await self._prepare()
        await self._assemble()
        self._started = True
        self._last_progress = time.monotonic()
        for member in self.membership.live():
            await self._send(member, Start())
        await self._membership_changed()
        timeout_s = self.config.liveness.no_progress_s
        await self._until(lambda: self.tally.verdict is not None, timeout_s, "the verdict of the parity gates")
        await self._drain()

    def _open_queue(self) -> None:
        """Trainers stay where they are: before their first batch."""
