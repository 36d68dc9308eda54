"""The ring on one page: which actors there are, who talks to whom, and how a run begins and ends.

::

             leases                      groups of trajectories              micro-batches
    ┌────────┐ ────────► ┌─────────────┐ ────────────────────► ┌────────────┐ ───────────► ┌────────────┐
    │ ledger │           │ rollouter×R │    queue (ZeroMQ)     │   replay   │              │ trainer×T  │
    │ in the │ ◄──────── │  engine,    │                       │   buffer   │ ◄─────────── │  (FSDP2)   │
    │ buffer │  results  │  episodes   │                       │ lag-bounded│  acknowledge │            │
    └────────┘           └─────────────┘                       └────────────┘              └────────────┘
                                ▲          weights of a version, in shared memory                │
                                └──────── stage, then pause (keep) / load / resume ◄─────────────┘

    actor      consumes              produces                waits for              unblocked by
    preparer   the settings          the initial checkpoint  –                      –
    buffer     groups                leases, micro-batches   a request              producers and consumers
    store ×S   payloads              columns                 a request              producers and consumers
    rollouter  leases, weights       groups                  a lease (credit)       a published version
    engine     weights, requests     continuations           a request              rollouters (rollouters_per_engine)
    scorer     answers               rewards                 a request              episodes (reward_model.name)
    reference  groups, to score      log-probs of π_ref      a request              rollouters (loss.kl.serve=engine)
    trainer    micro-batches         weights of version v+1  a full batch           groups_per_step groups
    evaluator  weights of some v     held-out accuracy       a version to evaluate  trainer rank 0
    replayer   a run's journal       its weights, again      –                      – (streamrl replay, alone)
    controller everyone's reports    metrics, the verdict    the next report        any actor

The loops themselves: ``actors/rollouter.py`` (lease → episodes → put), ``buffers/`` (ledger, C1 and C2),
``actors/trainer.py`` (batch → step → acknowledge → publish). Every wait has a deadline or a watchdog (C9).
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.actors.controller import Controller
from streamrl.actors.queue_wiring import KEYS_FILE
from streamrl.buffers.links.link_keys import LinkKeys
from streamrl.errors import ConfigError, ParityError, StreamRLError
from streamrl.monitor.recorder import Recorder
from streamrl.monitor.screen import Screen
from streamrl.objective_checks import serves_reference
from streamrl.runtime.folders import create_run_folder, create_socket_folder
from streamrl.runtime.messages import Evaluated
from streamrl.schema import Config
from streamrl.sharing import engine_hosts

log = logging.getLogger(__name__)

COMPLETED, FAILED, BAD_CONFIG, PARITY_FAILED, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit codes."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    exit_code: int
    summary: dict[str, Any]
    evaluations: list[Evaluated]


def placement(config: Config) -> list[tuple[str, str, int]]:
    """(actor, host, torch threads) of every process, in the order of their start."""
    rows = [("controller", "localhost", 0), ("buffer", "localhost", 1)]
    if config.buffer.shards > 1:
        rows += [(f"store-{index}", "localhost", 1) for index in range(config.buffer.shards)]
    if config.reward_model.name:
        rows.append(("scorer", "localhost", config.reward_model.threads))
    if serves_reference(config):
        rows.append(("reference", "localhost", config.engine.threads))
    rows += [(f"trainer-{rank}", "localhost", config.trainer.threads) for rank in range(config.trainers)]
    urls = [f"localhost, for {url}" for url in config.engine.urls] or ["localhost"] * engine_hosts(config)
    rows += [(f"engine-{index}", host, config.engine.threads) for index, host in enumerate(urls)]
    threads = 1 if urls else config.engine.threads
    rows += [(f"rollouter-{index}", "localhost", threads) for index in range(config.rollouts)]
    if config.eval.tasks:
        rows.append(("evaluator", "localhost", 1))
    return rows


MakeController = Callable[[Config, Path, str, Recorder, Callable[[], None]], Controller]
"""Settings, run folder, socket folder, recorder, and what to call when something changed."""


async def run(config: Config, run_dir: Path, screen: Screen, make_controller: MakeController = Controller) -> Outcome:
    """One run from an empty folder to its ``summary.json``; raises ``ConfigError`` only before anything started.

    SIGINT, SIGTERM and SIGHUP interrupt it. Whatever the ending, no process, socket or shared memory is left.
    """
    create_run_folder(run_dir, config)
    started = time.monotonic()
    recorder = Recorder(run_dir, config)
    ipc_dir = create_socket_folder()
    if config.queue.transport == "tcp":
        LinkKeys.new().save(Path(ipc_dir, KEYS_FILE))
    controller = make_controller(config, run_dir, ipc_dir, recorder, screen.changed)
    screen.attach(controller.tally, controller.membership)
    try:
        status, reason, code = await _until_the_end(controller)
        controller.record_pending()  # the newest step, held back for its evaluation
        summary = controller.tally.summary(status, reason, time.monotonic() - started, controller.membership)
        recorder.event("run_ended", {"status": status, "reason": reason})
        recorder.summary(summary)
    finally:
        screen.close()
        shutil.rmtree(ipc_dir, ignore_errors=True)
        recorder.close()
    return Outcome(code, summary, controller.tally.evaluations)


async def _until_the_end(controller: Controller) -> tuple[str, str, int]:
    """(status, reason, exit code) once the ring has stopped."""
    ring = asyncio.create_task(controller.run())
    interrupted: list[signal.Signals] = []

    def interrupt(number: signal.Signals) -> None:
        interrupted.append(number)
        ring.cancel()

    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, interrupt, number)
    try:
        await ring
    except asyncio.CancelledError:
        return "interrupted", f"interrupted by {interrupted[0].name if interrupted else 'cancellation'}", INTERRUPTED
    except ParityError as error:
        return "failed", str(error), PARITY_FAILED
    except ConfigError as error:
        return "failed", str(error), BAD_CONFIG
    except StreamRLError as error:
        return "failed", str(error), FAILED
    except Exception as error:  # a bug of ours must not cost the summary; the traceback is logged
        log.exception("the controller failed")
        return "failed", f"{type(error).__name__}: {error}", FAILED
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
    return "completed", "", COMPLETED
