"""How a process becomes an actor: in a fork of the spawner, or executed by an interpreter of its own.

Engines that need an environment of their own (``engine.python``) get it this way: the actor that holds one is executed
by that interpreter, in the process that was forked for it, so that its number, process group, log and death with the
spawner stay what they are. Its spec arrives as an anonymous file on standard input.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import shutil
import signal
import sys
from typing import Any, NoReturn

import msgspec

from streamrl.runtime.actor import ActorSpec
from streamrl.schema import Config
from streamrl.sharing import engine_holder

KINDS = {
    "preparer": "streamrl.actors.preparer:Preparer",
    "buffer": "streamrl.actors.buffer:Buffer",
    "store": "streamrl.actors.store:Store",
    "trainer": "streamrl.actors.trainer:Trainer",
    "rollouter": "streamrl.actors.rollouter:Rollouter",
    "engine": "streamrl.actors.engine_host:EngineHost",
    "reference": "streamrl.actors.reference:Reference",
    "evaluator": "streamrl.actors.evaluator:Evaluator",
    "scorer": "streamrl.actors.scorer:Scorer",
    "replayer": "streamrl.actors.replayer:Replayer",
}
_HOLD_ENGINES = ("reference", "evaluator")
"""Kinds with an engine in any run that has them; who holds those of the rollouters depends on the settings."""

_IMPORTED = ("vllm",)
"""Engines that live in their actor's process. Those that are servers get ``engine.python`` for the server alone."""


def live(spec: ActorSpec) -> int:
    """The actor's whole life in this process; its exit code."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the watchdog asks for stacks
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)

    import uvloop

    actor = actor_class(spec.kind)(spec)
    return uvloop.run(actor.live())


def actor_class(kind: str) -> Any:
    module, _, name = KINDS[kind].partition(":")
    return getattr(importlib.import_module(module), name)


def interpreter_of(spec: ActorSpec) -> str:
    """Path of the interpreter that executes the actor; empty: it stays a fork."""
    engine = spec.config.engine
    holds = spec.kind in (*_HOLD_ENGINES, engine_holder(spec.config)) and engine.name in _IMPORTED
    return engine_python(spec.config) if holds and not engine.urls else ""


def engine_python(config: Config) -> str:
    """``engine.python`` as a path, found as a shell finds it; symbolic links stay, a virtual environment is one."""
    python = os.path.expanduser(config.engine.python)
    if not python:
        return ""
    return os.path.abspath(python) if os.sep in python else shutil.which(python) or python


def execute(python: str, spec: ActorSpec) -> NoReturn:
    """Replace this process by ``python`` living as the actor."""
    file = os.memfd_create("streamrl-actor")
    with os.fdopen(file, "wb", closefd=False) as writer:
        writer.write(msgspec.msgpack.encode(spec))
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, 0)
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join([os.path.dirname(python), environment.get("PATH", os.defpath)])
    os.execve(python, [python, "-m", "streamrl.runtime.living"], environment)


def main() -> int:
    """``python -m streamrl.runtime.living``: the actor whose spec is on standard input."""
    spec = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ActorSpec)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return live(spec)


if __name__ == "__main__":
    code = 70
    try:
        code = main()
    except BaseException:  # as in a fork: to the log, and no exit handler waits for threads
        logging.exception("the actor failed")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
