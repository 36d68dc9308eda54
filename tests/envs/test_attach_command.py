"""``streamrl attach`` refuses what cannot be attached in one line, and says what was played."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl import attaching
from streamrl.attaching import Address, Report, RunFolder, _shares
from streamrl.cli import main
from streamrl.config import to_yaml
from streamrl.envs.attach.protocol import Closed
from streamrl.errors import ConfigError
from streamrl.runtime.folders import PROCESS_FILE, create_run_folder
from streamrl.schema import Config


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["attach", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that was launched and did not begin to serve."""
    (tmp_path / "config.yaml").write_text(to_yaml(Config(rollouts=3)))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "attach needs the run's folder, or --url URL with --token TOKEN"),
        (["nowhere"], "nowhere: no run folder, it has no config.yaml; give the one that launch printed"),
        (["one", "two"], "attach takes one run folder, got one and two"),
        (["run", "--workers", "0"], "--workers 0: must be at least 1"),
        (["run", "--token", "t"],
         "attach takes a run folder, or --url and --token for a run on another machine, not both"),
        (["--url", "http://a:1"],
         "--url needs the run's token (RUN/gateways/token): --token TOKEN, or set STREAMRL_TOKEN"),
        (["--url", "http://a:1", "--token", "t"],
         "--url needs --agent module:Name: code is not loaded because another machine names it"),
        (["--url", "a:1", "--token", "t", "--agent", "streamrl.envs.guess:Guess"],
         "--url a:1: expected http://host:port"),
        (["run", "max_lag=2"],
         "attach: max_lag=2: only options of the environment can be set here, env.args.<option>=…"),
    ],
)  # fmt: skip
def test_what_cannot_be_attached_is_refused_in_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STREAMRL_TOKEN", raising=False)
    assert exit_code(*arguments) == 2
    assert capsys.readouterr().err == f"streamrl: {line}\n"


def test_an_address_where_nothing_answers_is_said_at_once_and_then_given_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attaching, "PATIENCE_S", 0.1)  # the second try is later than that
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen: nobody else can get the port meanwhile
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert exit_code("--url", url, "--token", "t", "--agent", "streamrl.envs.guess:Guess", "--workers", "1") == 1
    output = capsys.readouterr()
    assert f"playing guess on its own tasks: 1 worker for 1 rollouter\n{url}: Cannot connect" in output.out
    assert "; trying again\n" in output.out
    assert output.err.startswith("streamrl: nothing to attach to, is the address right: no answer for ")


def test_a_run_that_has_ended_is_no_mistake_of_the_arguments(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "summary.json").write_text(json.dumps({"status": "failed"}))
    assert exit_code(str(run_dir)) == 1
    assert capsys.readouterr().err == f"streamrl: {run_dir}: this run has ended (failed); attach to one that goes on\n"


def test_an_option_that_the_agent_lacks_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(str(run_dir), "--agent", "streamrl.envs.strings:Addition", "env.args.digit=3") == 2
    assert "no such option; did you mean 'digits'?" in capsys.readouterr().err


def test_a_run_folder_says_where_its_rollouters_are(run_dir: Path) -> None:
    (run_dir / "gateways").mkdir()
    (run_dir / "gateways" / "rollouter-1.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "token": "t"}))
    run = RunFolder(run_dir, Config(rollouts=3))
    assert run.names == ["rollouter-0", "rollouter-1", "rollouter-2"]
    assert run.address("rollouter-0") is None
    assert run.address("rollouter-1") == Address("http://127.0.0.1:1", "t")


def test_the_token_of_another_user_is_explained(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(ConfigError, match="only the user who launched the run can attach to it"):
        RunFolder(run_dir, Config()).address("rollouter-0")


NO_PROCESS = 2**22 + 1
"""Over the kernel's limit."""


@pytest.mark.parametrize(
    ("host", "pid", "lives"),
    [(socket.gethostname(), os.getpid(), True), (socket.gethostname(), NO_PROCESS, False), ("elsewhere", 1, None)],
)
def test_a_run_lives_as_long_as_its_process(run_dir: Path, host: str, pid: int, lives: bool | None) -> None:
    (run_dir / "process.json").write_text(json.dumps({"host": host, "pid": pid}))
    assert RunFolder(run_dir, Config()).lives() is lives


def test_a_new_run_folder_names_its_process(tmp_path: Path) -> None:
    assert RunFolder(create_run_folder(tmp_path / "new", Config()), Config()).lives() is True


@pytest.mark.parametrize(
    ("workers", "rollouters", "shares"), [(8, 1, [8]), (8, 3, [3, 3, 2]), (2, 4, [1, 1, 0, 0]), (4, 4, [1, 1, 1, 1])]
)
def test_workers_are_shared_evenly_over_the_rollouters(workers: int, rollouters: int, shares: list[int]) -> None:
    assert _shares(workers, rollouters) == shares


def test_the_report_counts_what_was_played_and_names_each_reason_once() -> None:
    lines: list[str] = []
    report = Report(lines.append)
    report.closed(Closed(0, [1.0, 0.0], []))
    for lease in (1, 2):
        report.closed(Closed(lease, [0.5], ["KeyError: 'a' (mine.py:3)"]))
    report.closed(Closed(3, [], [], cut="the run ended"))
    report.end()
    assert lines == [
        "1 leases played; mean reward of the last 2 episodes: 0.500",
        "lease 1: 1 episodes failed: KeyError: 'a' (mine.py:3)",
        "detached after 3 leases: 4 episodes, mean reward 0.500, 2 failed; 1 leases were cut short",
    ]


def test_a_run_is_gone_when_its_process_was_killed_and_nobody_waited_for_it_yet(run_dir: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (run_dir / PROCESS_FILE).write_text(json.dumps({"host": socket.gethostname(), "pid": killed.pid}))
    run = RunFolder(run_dir, Config())
    assert run.lives() is True
    killed.kill()
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie now
    assert run.lives() is False
    killed.wait()
