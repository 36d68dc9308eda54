"""The sandbox from inside: closes itself in, starts a program, reports how it ended. ``sandbox.py`` runs this file.

::

    sandbox.py ──► supervisor (this file) ──► program
                   new namespaces, waits      first process of its PID namespace: when it ends, the kernel
                                              kills all that it started

In a PID, mount, network, IPC and user namespace the program sees a file system of its own: the system's libraries and
its interpreter, read-only, and one small writable folder in memory. Where namespaces are not permitted, only limits
(setrlimit) and system call filters (``seccomp_filter.py``) hold it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import seccomp_filter

NOBODY = 65534
"""User and group that the programs of root run as."""

_libc = ctypes.CDLL(None, use_errno=True)
_NAMESPACES = 0x10000000 | 0x00020000 | 0x40000000 | 0x08000000 | 0x20000000 | 0x04000000
"""CLONE_NEWUSER, NEWNS, NEWNET, NEWIPC, NEWPID, NEWUTS."""
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_RECURSIVE = 0x8000
_ATTR_READ_ONLY, _ATTR_NOSUID = 1, 2
_SYS_MOUNT_SETATTR = 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PR_SET_PDEATHSIG = 1
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/ld.so.conf.d")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/urandom", "/dev/random")
_SKELETON_BYTES = 1 << 20
_STAGE = "/dev/shm"
"""A folder to mount the new root on; nothing that a program needs lies under it."""
_HOME = "/sandbox"
"""The writable folder of the new root."""


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def main() -> None:
    """``python sandbox_child.py JOB_FD REPORT_FD PARENT_PID``."""
    job_fd, report_fd, parent = (int(word) for word in sys.argv[1:4])
    os.set_inheritable(report_fd, False)  # the program must not have it
    with os.fdopen(job_fd, "rb") as file:
        job = json.load(file)
    with os.fdopen(report_fd, "w") as report:
        _die_with(parent, signal.SIGTERM)
        wake = _wake_on_signals()
        try:
            outcome = _supervise(job, parent, wake)
        except OSError as error:
            outcome = {"error": f"{error.strerror or error}: {error.filename or 'a system call'}"}
        json.dump(outcome, report)


def _die_with(parent: int, number: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)  # it died before the line above


def _wake_on_signals() -> int:
    """A descriptor that can be read from once SIGCHLD or SIGTERM came."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    return read


def _supervise(job: Mapping[str, Any], parent: int, wake: int) -> dict[str, Any]:
    folder = None
    if job["isolation"] == "namespaces":
        _unshare()
        _die_with(parent, signal.SIGTERM)  # the new credentials have cleared it
    else:
        folder = tempfile.mkdtemp(prefix="streamrl-sandbox-")
    try:
        return _run(job, folder, wake)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _run(job: Mapping[str, Any], folder: str | None, wake: int) -> dict[str, Any]:
    failed_read, failed_write = os.pipe()  # closed by a successful exec; else it says what went wrong
    started = time.monotonic()
    program = os.fork()
    if program == 0:
        try:
            os.close(failed_read)
            _become(job, folder, failed_write)
        except BaseException as error:  # noqa: BLE001 the forked child must not return into the supervisor's code
            os.write(failed_write, f"{type(error).__name__}: {error}".encode()[:500])
        finally:
            os._exit(1)
    os.close(failed_write)
    for descriptor in (0, 1, 2):
        os.close(descriptor)  # so that the parent sees the end of the program's output
    with os.fdopen(failed_read, "rb") as failure:
        if problem := failure.read():
            os.waitpid(program, 0)
            return {"error": problem.decode(errors="replace")}
    timed_out, status = _wait(program, started + job["limits"]["wall_s"], wake)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "timed_out": timed_out,
        "wall_s": time.monotonic() - started,
        "cpu_s": usage.ru_utime + usage.ru_stime,
    }


def _wait(program: int, deadline: float, wake: int) -> tuple[bool, int]:
    """(whether time ran out, wait status) once the program and all that it started is gone."""
    timed_out = False
    while True:
        pid, status = os.waitpid(program, os.WNOHANG)
        if pid:
            return timed_out, status
        readable, _, _ = select.select([wake], [], [], None if timed_out else max(0.0, deadline - time.monotonic()))
        told = bool(readable) and signal.SIGTERM in os.read(wake, 256)
        if not readable or told:
            timed_out = not told
            with contextlib.suppress(ProcessLookupError):
                os.kill(program, signal.SIGKILL)
            _, status = os.waitpid(program, 0)
            return timed_out, status


# Namespaces -----------------------------------------------------------------------------------------------------------


def _unshare() -> None:
    """Enter new namespaces; a helper that stays outside maps this user, and for root also ``NOBODY``, into them."""
    done_read, done_write = os.pipe()
    go_read, go_write = os.pipe()
    me, uid, gid = os.getpid(), os.getuid(), os.getgid()
    helper = os.fork()
    if helper == 0:
        code = 1
        try:
            os.close(go_write)
            if os.read(go_read, 1):
                _write_maps(me, uid, gid)
                code = 0
        except OSError as error:
            os.write(done_write, (error.strerror or "?").encode())
        finally:
            os._exit(code)
    os.close(done_write)
    os.close(go_read)
    if _libc.unshare(_NAMESPACES):
        raise OSError(ctypes.get_errno(), "namespaces are not permitted")
    os.write(go_write, b"+")
    os.close(go_write)
    with os.fdopen(done_read, "rb") as answer:
        problem = answer.read().decode()
    if os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1]):
        raise OSError(1, f"users cannot be mapped into the namespace ({problem})")


def _write_maps(pid: int, uid: int, gid: int) -> None:
    def lines(own: int) -> str:
        return f"0 0 1\n{NOBODY} {NOBODY} 1\n" if uid == 0 else f"{own} {own} 1\n"

    if uid != 0:
        Path(f"/proc/{pid}/setgroups").write_text("deny")
    Path(f"/proc/{pid}/uid_map").write_text(lines(uid))
    Path(f"/proc/{pid}/gid_map").write_text(lines(gid))


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    if _libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot mount {source} ({os.strerror(number)})", target)


def _enter_new_root(trees: list[str], writable_bytes: int) -> None:
    """A file system of ``trees``, read-only, and one writable folder; nothing else of the machine can be seen."""
    writable = _STAGE + _HOME
    _mount("none", "/", "none", _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", _STAGE, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={_SKELETON_BYTES},mode=0755")
    for path in [*_SYSTEM, *_DEVICES, *trees]:
        _show(path)
    os.mkdir(writable)
    if not os.path.exists(f"{_STAGE}/tmp"):  # it does where an interpreter lives below it
        os.symlink(_HOME, f"{_STAGE}/tmp")
    attributes = _MountAttributes(attr_set=_ATTR_READ_ONLY | _ATTR_NOSUID)
    if _libc.syscall(_SYS_MOUNT_SETATTR, -100, _STAGE.encode(), _AT_RECURSIVE, ctypes.byref(attributes),
                     ctypes.sizeof(attributes)):  # fmt: skip
        raise OSError(ctypes.get_errno(), "mounts cannot be made read-only")
    _mount("tmpfs", writable, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={writable_bytes},mode=0777")
    os.chdir(_STAGE)
    if _libc.syscall(_SYS_PIVOT_ROOT[os.uname().machine], b".", b".") or _libc.umount2(b".", _MNT_DETACH):
        raise OSError(ctypes.get_errno(), "the root cannot be changed")
    os.chdir(_HOME)


def _show(path: str) -> None:
    target = _STAGE + path
    if not os.path.lexists(path) or os.path.lexists(target):
        return  # not on this machine, or inside of what is shown already
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, target, "none", _MS_BIND | _MS_REC)


# The program ----------------------------------------------------------------------------------------------------------


def _become(job: Mapping[str, Any], folder: str | None, to_supervisor: int) -> None:
    """In the forked child: close in, drop all rights, limit, filter, and execute the program."""
    if folder is None:
        _enter_new_root(job["trees"], job["limits"]["disk_bytes"])
    else:
        os.chdir(folder)
        if os.getuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    home = os.getcwd()
    Path("main.py").write_text(job["code"])
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    still_there = select.poll()
    still_there.register(to_supervisor, 0)
    if still_there.poll(0):
        os._exit(1)  # nobody reads the pipe: the supervisor died before it could take this process along
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    limits = job["limits"]
    _limit(limits)
    seccomp_filter.install(processes=limits["processes"], signals=folder is None)
    environment = {
        "PATH": "/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    }  # fmt: skip
    os.execve(job["python"], [job["python"], "-I", "-B", f"{home}/main.py"], environment)


def _limit(limits: Mapping[str, Any]) -> None:
    def at_most(kind: int, value: int) -> None:
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))

    at_most(resource.RLIMIT_CPU, max(1, round(limits["cpu_s"])))
    at_most(resource.RLIMIT_AS, limits["memory_bytes"])
    at_most(resource.RLIMIT_FSIZE, limits["file_bytes"])
    at_most(resource.RLIMIT_NOFILE, limits["open_files"])
    at_most(resource.RLIMIT_CORE, 0)
    if limits["processes"] > 1:
        at_most(resource.RLIMIT_NPROC, limits["processes"])


if __name__ == "__main__":
    main()
