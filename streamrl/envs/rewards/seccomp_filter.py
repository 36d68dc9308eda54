"""A system call filter for sandboxed programs (seccomp-bpf, man 2 seccomp): no sockets, no new processes, no tricks.

Uses only the standard library, and nothing of the package: ``sandbox_child.py`` imports it as a lone file.
"""

from __future__ import annotations

import ctypes
import errno
import os

_X86_64 = {
    "socket": 41, "clone": 56, "fork": 57, "vfork": 58, "kill": 62, "ptrace": 101, "shmget": 29, "msgget": 68,
    "semget": 64, "pivot_root": 155, "chroot": 161, "mount": 165, "umount2": 166, "swapon": 167, "reboot": 169,
    "init_module": 175, "tkill": 200, "rt_sigqueueinfo": 129, "io_setup": 206, "tgkill": 234, "mq_open": 240,
    "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298,
    "rt_tgsigqueueinfo": 297, "prlimit64": 302, "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310,
    "process_vm_writev": 311, "finit_module": 313, "memfd_create": 319, "bpf": 321, "userfaultfd": 323,
}  # fmt: skip
_AARCH64 = {
    "socket": 198, "clone": 220, "kill": 129, "ptrace": 117, "shmget": 194, "msgget": 186, "semget": 190,
    "pivot_root": 41, "chroot": 51, "mount": 40, "umount2": 39, "swapon": 224, "reboot": 142, "init_module": 105,
    "tkill": 130, "rt_sigqueueinfo": 138, "io_setup": 0, "tgkill": 131, "mq_open": 180, "kexec_load": 104,
    "add_key": 217, "request_key": 218, "keyctl": 219, "unshare": 97, "perf_event_open": 241,
    "rt_tgsigqueueinfo": 240, "prlimit64": 261, "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270,
    "process_vm_writev": 271, "finit_module": 273, "memfd_create": 279, "bpf": 280, "userfaultfd": 282,
}  # fmt: skip
_SINCE_2019 = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430,
    "clone3": 435, "pidfd_getfd": 438, "mount_setattr": 442, "memfd_secret": 447,
}  # fmt: skip
"""Numbers that all architectures share."""

_MACHINES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}
"""AUDIT_ARCH_… and the numbers."""

_SPECIAL = {"clone", "clone3", "fork", "vfork", "prlimit64"}
_SIGNALS = {"kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal"}

_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020000
"""Every CLONE_NEW… flag that ``clone`` takes."""

_LOAD, _EQUAL, _GREATER_EQUAL, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in ``struct seccomp_data``; the low half of an argument comes first on these machines."""

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant."""


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


def install(*, processes: int, signals: bool) -> None:
    """Filter this process and all that it starts, for good. Raises ``OSError`` where the kernel refuses.

    ``processes`` of 1: it may start threads but no process. ``signals``: whether it may send any; without a PID
    namespace it could reach every process of the user.
    """
    rules = _rules(os.uname().machine, processes, signals)
    array = (_Instruction * len(rules))(*(_Instruction(*rule) for rule in rules))
    program = _Program(len(rules), array)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "the kernel takes no system call filter")


def _rules(machine: str, processes: int, signals: bool) -> list[Instruction]:
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no system call filter for {machine}, only for {' and '.join(_MACHINES)}")
    architecture, own = _MACHINES[machine]
    numbers = own | _SINCE_2019
    refuse = _ERRNO | errno.EPERM
    rules: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":  # the x32 numbers are the same calls over again
        rules += [(_GREATER_EQUAL, 0, 1, 0x40000000), (_RETURN, 0, 0, refuse)]
    for name, number in numbers.items():
        if name in _SPECIAL or (signals and name in _SIGNALS):
            continue
        rules += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, refuse)]
    # Its flags lie in memory, where a filter cannot look; without it libc takes ``clone``.
    rules += [(_EQUAL, 0, 1, numbers["clone3"]), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    if processes == 1:
        for name in ("fork", "vfork"):
            if name in numbers:
                rules += [(_EQUAL, 0, 1, numbers[name]), (_RETURN, 0, 0, refuse)]
    rules += [
        (_EQUAL, 0, 4, numbers["prlimit64"]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 1, 0, 0),  # its own limits, which it can only lower
        (_RETURN, 0, 0, refuse),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 4, numbers["clone"]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_HAS_BITS, 1, 0, _CLONE_NEW),
        (_HAS_BITS, 1, 0, _CLONE_THREAD) if processes == 1 else (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, refuse),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return rules
