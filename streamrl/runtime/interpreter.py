"""Whether the interpreter of the engines can run them, found out before anything starts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

from streamrl import __version__
from streamrl.errors import ConfigError
from streamrl.runtime.living import engine_python
from streamrl.schema import Config

MODULES = {"vllm": "vllm", "sglang": "sglang"}
"""What has to be importable, by ``engine.name``."""
_WAYS = {"vllm": "pip install 'streamrl[vllm]' there", "sglang": "make one with `make .venv-sglang/.installed`"}
_LOOK = """
import importlib.util, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print("none" if "streamrl" in missing else importlib.import_module("streamrl").__version__, *missing)
"""
_LOOK_S = 60.0


def check_interpreter(config: Config) -> None:
    """``ConfigError`` where ``engine.python`` is no Python, or lacks the engine or this version of streamrl."""
    name = config.engine.name
    if name not in MODULES or config.engine.urls:
        return
    python = engine_python(config)
    where = python or sys.executable
    version, missing = _look(python, ["streamrl", MODULES[name]])
    if missing:
        raise ConfigError(
            f"engine={name}: {' and '.join(missing)} cannot be imported by {where}; "
            f"{_WAYS[name]}, or point engine.python at an interpreter that has both (docs/engines.md)"
        )
    if version != __version__:
        raise ConfigError(
            f"engine={name}: {where} has streamrl {version}, this run is of {__version__}; install the same one there"
        )


def _look(python: str, modules: list[str]) -> tuple[str, list[str]]:
    """Version of streamrl there, and which of ``modules`` it cannot import; an empty ``python`` is this one."""
    if not python:
        return __version__, [module for module in modules if importlib.util.find_spec(module) is None]
    if not os.access(python, os.X_OK):
        raise ConfigError(f"engine.python={python}: no such program; give the path of a Python interpreter")
    try:
        # Without -P: the folder of the run is importable there, as it is for the actors.
        looked = subprocess.run([python, "-c", _LOOK, *modules], capture_output=True, text=True, timeout=_LOOK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.python={python}: cannot be run: {error}") from error
    said = looked.stdout.split()
    if looked.returncode or not said:
        last = (looked.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"engine.python={python}: is no working Python interpreter: {last:.200}")
    return said[0], said[1:]
