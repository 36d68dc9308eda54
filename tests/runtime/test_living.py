"""Which actors are executed by an interpreter of their own, and how they get there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from streamrl import __version__
from streamrl.config import load_config
from streamrl.errors import ConfigError
from streamrl.runtime import interpreter
from streamrl.runtime.actor import ActorSpec
from streamrl.runtime.interpreter import check_interpreter
from streamrl.runtime.living import interpreter_of


def spec(kind: str, *overrides: str) -> ActorSpec:
    config = load_config(overrides=["engine=vllm", *overrides])
    return ActorSpec(kind=kind, name=f"{kind}-0", incarnation=0, index=0, run_dir=".", ipc_dir=".", config=config)


@pytest.mark.parametrize(
    ("holds", "overrides"),
    [
        ({"rollouter", "evaluator", "reference"}, ()),
        ({"engine", "evaluator", "reference"}, ("rollouters_per_engine=2", "rollouts=2")),
    ],
)
def test_only_actors_that_hold_an_engine_leave_the_runs_interpreter(holds: set[str], overrides: tuple[str, ...]):
    kinds = ("trainer", "buffer", "scorer", "rollouter", "engine", "evaluator", "reference")
    found = {kind for kind in kinds if interpreter_of(spec(kind, "engine.python=/opt/python", *overrides))}
    assert found == holds
    assert not any(interpreter_of(spec(kind, *overrides)) for kind in kinds), "without engine.python all are forks"


def test_an_interpreter_is_found_as_a_shell_finds_it_and_links_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    link = tmp_path / "env" / "bin" / "python"
    link.parent.mkdir(parents=True)
    link.symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(link.parent))
    for given in ("env/bin/python", "~/env/bin/python", "python"):
        assert interpreter_of(spec("rollouter", f"engine.python={given}")) == str(link)


def test_an_executed_actor_gets_its_spec_on_standard_input_and_nothing_on_its_command_line(tmp_path: Path):
    """A script in the place of the interpreter writes down what it was given."""
    script = tmp_path / "python"
    script.write_text(
        f'#!/bin/sh\ncat > {tmp_path}/spec\necho "$@" > {tmp_path}/arguments\necho "$PATH" > {tmp_path}/path'
    )
    script.chmod(0o700)
    (tmp_path / "given").write_bytes(msgspec.msgpack.encode(given := spec("rollouter", f"engine.python={script}")))
    code = (
        "import msgspec, sys; from streamrl.runtime.living import ActorSpec, execute; "
        "execute(sys.argv[1], msgspec.msgpack.decode(open(sys.argv[2], 'rb').read(), type=ActorSpec))"
    )
    subprocess.run([sys.executable, "-c", code, str(script), str(tmp_path / "given")], check=True, timeout=60)
    assert msgspec.msgpack.decode((tmp_path / "spec").read_bytes(), type=ActorSpec) == given
    assert (tmp_path / "arguments").read_text().strip() == "-m streamrl.runtime.living"
    assert (tmp_path / "path").read_text().startswith(f"{tmp_path}{os.pathsep}"), "its own programs come first"


def settings(*overrides: str):
    return load_config(overrides=["engine=vllm", *overrides])


def test_an_interpreter_without_the_engine_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(interpreter.MODULES, "vllm", "no_such_engine")
    with pytest.raises(ConfigError, match=f"vllm: no_such_engine cannot be imported by {sys.executable}; .*python"):
        check_interpreter(settings())
    with pytest.raises(ConfigError, match="engine=vllm: no_such_engine cannot be imported by "):
        check_interpreter(settings(f"engine.python={sys.executable}"))
    with pytest.raises(ConfigError, match="engine.python=/no/python: no such program"):
        check_interpreter(settings("engine.python=/no/python"))
    for program in ("/bin/false", "/bin/true"):
        with pytest.raises(ConfigError, match=f"engine.python={program}: is no working Python interpreter: no message"):
            check_interpreter(settings(f"engine.python={program}"))


def test_an_interpreter_with_the_engine_passes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(interpreter.MODULES, "vllm", "json")
    check_interpreter(settings())
    check_interpreter(settings(f"engine.python={sys.executable}"))


def test_an_interpreter_with_another_streamrl_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(interpreter.MODULES, "vllm", "json")
    monkeypatch.setattr(interpreter, "__version__", "7.8.9")
    check_interpreter(settings())
    message = f"{sys.executable} has streamrl {__version__}, this run is of 7.8.9; install the same one there"
    with pytest.raises(ConfigError, match=message):
        check_interpreter(settings(f"engine.python={sys.executable}"))
