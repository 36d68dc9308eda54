"""Programs that nobody trusts: what each tries, and that it stays inside. No process and no file is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from streamrl.envs.rewards.sandbox import Ended, Limits, Sandbox
from streamrl.errors import ConfigError

SYSTEM_PYTHON = "/usr/bin/python3"
"""An interpreter that every user may run: without namespaces the programs of root run as nobody."""
PATIENT_S = 60.0


def start(isolation: str, **limits: float) -> Callable[[str, bytes], Ended]:
    python = SYSTEM_PYTHON if isolation == "seccomp" and os.getuid() == 0 else ""
    sandbox = Sandbox(Limits(**({"wall_s": PATIENT_S} | limits)), isolation, python=python)  # type: ignore[arg-type]

    def run(code: str, given: bytes = b"") -> Ended:
        return asyncio.run(sandbox.run(code, given))

    return run


def permitted(isolation: str) -> bool:
    try:
        return start(isolation)("print(1)", b"").output == b"1\n"
    except ConfigError:
        return False


needs_namespaces = pytest.mark.skipif(not permitted("namespaces"), reason="namespaces are not permitted here")
BOTH = [
    pytest.param("namespaces", marks=needs_namespaces),
    pytest.param("seccomp", marks=pytest.mark.skipif(not permitted("seccomp"), reason="no interpreter for nobody")),
]
either = pytest.mark.parametrize("isolation", BOTH)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = leftovers()
    yield
    assert leftovers() == before


def leftovers() -> set[str]:
    """Folders of sandboxes, and processes that run a program of theirs."""
    found = {str(path) for path in Path(tempfile.gettempdir()).glob("streamrl-sandbox-*")}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue  # it ended meanwhile
        if any(word.endswith((b"/sandbox_child.py", b"/main.py")) for word in words):
            found.add(path.parent.name)
    return found


@either
def test_a_program_reads_its_input_and_prints_its_output(isolation: str) -> None:
    ended = start(isolation)("print(input()[::-1])", b"abc\n")
    assert (ended.code, ended.output, ended.errors, ended.timed_out) == (0, b"cba\n", b"", False)


@either
def test_an_exit_code_and_a_traceback_come_back(isolation: str) -> None:
    ended = start(isolation)("raise ValueError('seven')")
    assert ended.code == 1
    assert ended.errors.endswith(b"ValueError: seven\n")


@either
def test_an_endless_wait_ends_with_its_time(isolation: str) -> None:
    ended = start(isolation, wall_s=1)("import time; time.sleep(1000)")
    assert (ended.code, ended.timed_out) == (-signal.SIGKILL, True)


@either
def test_an_endless_loop_ends_with_its_processor_time(isolation: str) -> None:
    ended = start(isolation, cpu_s=1)("while True: pass")
    assert (ended.code, ended.timed_out) == (-signal.SIGKILL, False)
    assert ended.cpu_s < 3


@either
def test_a_program_that_ignores_signals_ends_all_the_same(isolation: str) -> None:
    code = "import signal, time\nfor n in (2, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile True: pass"
    assert start(isolation, cpu_s=1)(code).code == -signal.SIGKILL


@either
def test_a_memory_hog_gets_a_memory_error(isolation: str) -> None:
    ended = start(isolation, memory_bytes=256 << 20)("x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert ended.code == 1
    assert b"MemoryError" in ended.errors


@either
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_huge_output_is_cut_and_ends_the_program(isolation: str, stream: str) -> None:
    ended = start(isolation, output_bytes=1000)(f"import sys\nwhile True: sys.{stream}.write('x' * 100)")
    assert ended.too_much_output
    assert getattr(ended, {"stdout": "output", "stderr": "errors"}[stream]) == b"x" * 1000


@either
def test_output_of_exactly_the_limit_is_not_too_much(isolation: str) -> None:
    ended = start(isolation, output_bytes=1000)("print('x' * 999)")
    assert (ended.too_much_output, len(ended.output)) == (False, 1000)


@either
def test_a_large_file_cannot_be_written(isolation: str) -> None:
    ended = start(isolation, file_bytes=1 << 20)("open('big', 'wb').write(bytes(2 << 20))")
    assert b"File too large" in ended.errors


@either
@pytest.mark.parametrize("path", ["/etc/streamrl-was-here", "/usr/streamrl-was-here", "/var/log/streamrl-was-here"])
def test_nothing_outside_of_its_folder_can_be_written(isolation: str, path: str) -> None:
    if isolation == "seccomp" and os.getuid() != 0 and os.access(Path(path).parent, os.W_OK):
        pytest.skip("without namespaces only the rights of the user's files protect them")
    assert start(isolation)(f"open({path!r}, 'w')").code == 1
    assert not Path(path).exists()


@either
def test_its_own_folder_can_be_written_and_read(isolation: str) -> None:
    assert start(isolation)("open('f', 'w').write('x'); print(open('f').read())").output == b"x\n"


@either
def test_too_many_files_cannot_be_open(isolation: str) -> None:
    ended = start(isolation, open_files=16)("files = [open('/dev/null') for _ in range(20)]")
    assert b"Too many open files" in ended.errors


@either
@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"])
def test_no_socket_can_be_made(isolation: str, family: str) -> None:
    ended = start(isolation)(f"import socket; socket.socket(socket.{family}, socket.SOCK_RAW)")
    assert b"PermissionError" in ended.errors


@either
def test_no_process_can_be_started(isolation: str) -> None:
    code = """
import os, subprocess
for start in (os.fork, lambda: os.posix_spawn("/bin/true", ["true"], {}), lambda: subprocess.run(["/bin/true"])):
    try:
        start()
    except PermissionError:
        print("refused")
"""
    assert start(isolation)(code).output == b"refused\n" * 3


@either
def test_threads_can_be_started(isolation: str) -> None:
    code = "import threading\nt = threading.Thread(target=print, args=('in a thread',)); t.start(); t.join()"
    assert start(isolation)(code).output == b"in a thread\n"


@either
def test_the_processes_of_the_machine_cannot_be_signalled(isolation: str) -> None:
    code = f"import os\ntry: os.kill({os.getpid()}, 0)\nexcept OSError: print('refused')"
    assert start(isolation)(code).output == b"refused\n"


@either
def test_the_environment_holds_nothing_of_the_run(isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    ended = start(isolation)("import os, json; print(json.dumps(dict(os.environ)))")
    environment = json.loads(ended.output)
    assert set(environment) == {
        "PATH", "HOME", "TMPDIR", "LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS",
    }  # fmt: skip


@either
def test_rights_cannot_be_gained(isolation: str) -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.unshare(0x10000000), libc.mount(b"none", b"/", b"tmpfs", 0, b""), libc.ptrace(0, 0, 0, 0), os.getuid() != 0)
if os.path.exists("/proc/self"):
    print([line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")])
"""
    first, *capabilities = start(isolation)(code).output.decode().splitlines()
    assert first == "-1 -1 -1 True"
    assert capabilities in ([], ["['0000000000000000']"])


# Namespaces only ------------------------------------------------------------------------------------------------------


@needs_namespaces
def test_the_files_of_the_machine_cannot_be_seen(tmp_path: Path) -> None:
    (tmp_path / "answers.txt").write_text("42")
    code = f"""
import os
print(os.path.exists({str(tmp_path)!r}), os.path.exists("/etc/passwd"), os.listdir("."), os.path.exists("/proc/1"))
"""
    assert start("namespaces")(code).output == b"False False ['main.py'] False\n"


@needs_namespaces
def test_the_folder_is_no_larger_than_allowed() -> None:
    code = "for n in range(99): open(str(n), 'wb').write(bytes(1 << 20))"
    assert b"No space left on device" in start("namespaces", disk_bytes=4 << 20)(code).errors


@needs_namespaces
def test_a_fork_bomb_stops_at_the_limit_and_dies_with_its_time() -> None:
    code = """
import os
while True:
    try:
        os.fork()
    except BlockingIOError:
        os.write(1, b"full ")
        while True: pass
"""
    ended = start("namespaces", processes=8, wall_s=6)(code)
    assert b"full" in ended.output
    assert ended.timed_out


@needs_namespaces
def test_grandchildren_that_left_the_session_die_with_the_program() -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(1, b"grandchild ")
        time.sleep(1000)
    os._exit(0)
os.wait()
time.sleep(0.2)
print("program")
"""
    ended = start("namespaces", processes=8)(code)
    assert ended.output == b"grandchild program\n"
    assert ended.wall_s < PATIENT_S / 2


@needs_namespaces
def test_two_programs_of_one_sandbox_do_not_count_for_each_other() -> None:
    code = "import os, time\nfor _ in range(6):\n  if os.fork() == 0: time.sleep(30)\nprint('all')"

    async def both() -> list[bytes]:
        sandbox = Sandbox(Limits(processes=8, wall_s=PATIENT_S), "namespaces", at_once=2)
        return [ended.output for ended in await asyncio.gather(sandbox.run(code), sandbox.run(code))]

    assert asyncio.run(both()) == [b"all\n", b"all\n"]


# The caller -----------------------------------------------------------------------------------------------------------


@either
def test_a_cancelled_call_ends_its_program(isolation: str) -> None:
    python = SYSTEM_PYTHON if isolation == "seccomp" and os.getuid() == 0 else ""

    async def main() -> None:
        sandbox = Sandbox(Limits(wall_s=PATIENT_S), isolation, python=python)
        sandbox.in_force()
        running = asyncio.create_task(sandbox.run("import time; time.sleep(1000)"))
        await asyncio.to_thread(until, lambda: bool(leftovers()))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())


@either
def test_a_killed_caller_takes_its_program_along(isolation: str) -> None:
    python = SYSTEM_PYTHON if isolation == "seccomp" and os.getuid() == 0 else ""
    caller = f"""
import asyncio
from streamrl.envs.rewards.sandbox import Limits, Sandbox
async def main():
    sandbox = Sandbox(Limits(wall_s=1000), {isolation!r}, python={python!r})
    sandbox.in_force()
    print("in", flush=True)
    await sandbox.run("import time; time.sleep(1000)")
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", caller], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    until(lambda: len(leftovers()) >= 2)
    process.kill()
    process.wait()
    process.stdout.close()
    until(lambda: not leftovers())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # other processes give no event to wait for


@needs_namespaces
def test_it_works_on_the_event_loop_of_the_actors() -> None:
    sandbox = Sandbox(Limits(), "namespaces")
    assert uvloop.run(sandbox.run("print(1)")).output == b"1\n"


def test_what_is_in_force_is_known_and_is_the_strongest_permitted() -> None:
    sandbox = Sandbox(Limits(), "auto", python=SYSTEM_PYTHON if Path(SYSTEM_PYTHON).exists() else "")
    assert sandbox.in_force() == ("namespaces" if permitted("namespaces") else "seccomp")


def test_an_interpreter_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="python=/bin/nowhere: No such file"):
        Sandbox(Limits(), python="/bin/nowhere").in_force()


@pytest.mark.parametrize(
    ("limits", "isolation", "message"),
    [
        (Limits(), "jail", "isolation='jail': expected one of auto, namespaces, seccomp"),
        (Limits(wall_s=0), "auto", "wall_s=0: must be a positive number"),
        (Limits(processes=2), "auto", "processes=2 can only be kept to in a namespace"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(limits: Limits, isolation: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sandbox(limits, isolation)


def test_more_than_the_machine_permits_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Sandbox, isolation: str, code: str, given: bytes) -> str:
        return f"{isolation}: Operation not permitted"

    monkeypatch.setattr(Sandbox, "_attempt", nothing)
    with pytest.raises(ConfigError, match="isolation=namespaces is not permitted here: namespaces: Operation not perm"):
        Sandbox(Limits(), "namespaces").in_force()
