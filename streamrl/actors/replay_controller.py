"""The controller of a replay: trainer ranks alone, and every version's weights against the recorded ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from streamrl.actors.controller import Controller
from streamrl.actors.recording import Recording, ReplayPlan, first_checkpoint
from streamrl.errors import StreamRLError
from streamrl.monitor.recorder import Recorder
from streamrl.runtime.membership import Member
from streamrl.runtime.messages import Event, Message, Start, Stop
from streamrl.schema import Config


class ReplayController(Controller):
    """A run whose batches are on the disk already. The first version that differs from the recorded one ends it."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        ipc_dir: str,
        recorder: Recorder,
        on_change: Callable[[], None],
        *,
        recording: Recording,
        plan: ReplayPlan,
    ) -> None:
        super().__init__(config, run_dir, ipc_dir, recorder, on_change)
        self._recording = recording
        self._plan = plan
        self._model = str(first_checkpoint(Path(plan.recording)))

    async def _phases(self) -> None:
        self._plan.save(self._run_dir)
        self._recorder.event("replay_started", msgspec.structs.asdict(self._plan))
        for rank in range(self.config.trainers):
            await self._spawn("replayer", f"replayer-{rank}", rank)
        await self._until(self.membership.all_ready, self.config.liveness.start_timeout_s, "all ranks to be ready")
        self._started = True
        self._last_progress = time.monotonic()
        self.tally.started()
        for member in self.membership.live():
            await self._send(member, Start())
        await self._until(lambda: all(member.finished for member in self.membership.of("replayer")), None, "the replay")
        self.record_pending()
        for member in self.membership.live():
            await self._send(member, Stop())
        await self._until(lambda: not self.membership.live(), self.config.liveness.drain_timeout_s, "the ranks to stop")

    def _replaceable(self, kind: str) -> bool:
        return False  # a rank that died can be replayed as a whole, from the start

    def _receive(self, member: Member, message: Message) -> None:
        super()._receive(member, message)
        if isinstance(message, Event) and message.event == "version_replayed" and not self._plan.changed:
            self._compare(message.fields["version"], message.fields["weights"])

    def _compare(self, version: int, digest: str) -> None:
        recorded = self._recording.digests.get(version, digest)
        if digest == recorded:
            return
        self._recorder.event("version_differs", {"version": version, "weights": digest, "recorded": recorded})
        cause = (
            "the checkpoint is not the one that the run started from"
            if version == 0
            else "the code, torch or the processor is not the one that it was recorded with"
        )
        self._fail(
            StreamRLError(
                f"version {version} is the first whose weights differ from the recorded ones: expected digest "
                f"{recorded}, got {digest}; {cause}"
            )
        )
