"""Real refusals as by a container, a kernel or a limit: seccomp filters, resource limits, dropped capabilities.

Each call restricts this process and its children permanently, so run it in a process of its own (own_process.py).
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import select
import struct
from collections.abc import Callable
from pathlib import Path

# These numbers are the same on every architecture, because the calls are newer than the common table.
CALLS = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}
# These differ.
CALLS |= {"userfaultfd": 323, "madvise": 28} if platform.machine() == "x86_64" else {"userfaultfd": 282, "madvise": 233}

_ARCHITECTURES = {"x86_64": (0xC000003E, 317), "aarch64": (0xC00000B7, 277)}  # AUDIT_ARCH_*, number of seccomp(2)
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER, _TSYNC, _NEW_LISTENER, _TSYNC_ESRCH = 1, 1, 8, 16
_RET_ERRNO, _RET_ALLOW, _RET_USER_NOTIF = 0x00050000, 0x7FFF0000, 0x7FC00000
_LOAD, _EQUAL, _GREATER, _RETURN = 0x20, 0x15, 0x25, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGT|K, BPF_RET|K
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data, little-endian
_CAP_IPC_LOCK, _CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 14, 21, 24
_NOBODY_ELSE = 64_321  # an unused user id
_CAPABILITY_VERSION_3 = 0x20080522


HAS_SECCOMP = platform.machine() in _ARCHITECTURES and "Seccomp_filters:" in Path("/proc/self/status").read_text()
"""Whether `refuse` works here."""


def refuse(call: str, code: int, *, above: int | None = None) -> None:
    """From now on the system call fails with `code`, in every thread of this process.

    above  only if the call's first argument is greater than this
    """
    condition = [] if above is None else [(_LOAD, 0, 0, _ARGUMENTS_AT), (_GREATER, 0, 1, above)]
    _filter(call, condition, _RET_ERRNO | code, _TSYNC)


def suspend(call: str, *, third: int) -> Callable[[], None]:
    """From now on the system call blocks forever, in every thread of this process, if its third argument is this.

    returns  a function that waits until a thread is in such a call
    """
    condition = [(_LOAD, 0, 0, _ARGUMENTS_AT + 2 * 8), (_EQUAL, 0, 1, third)]
    listener = _filter(call, condition, _RET_USER_NOTIF, _TSYNC | _NEW_LISTENER | _TSYNC_ESRCH)  # no answer follows

    def await_call() -> None:
        select.select([listener], [], [])

    return await_call


def _filter(call: str, condition: list[tuple[int, int, int, int]], result: int, flags: int) -> int:
    architecture, seccomp = _ARCHITECTURES[platform.machine()]
    # Each jump has the number of instructions to skip if true and if false; the last one allows.
    body = [(_LOAD, 0, 0, _NUMBER_AT), (_EQUAL, 0, len(condition) + 1, CALLS[call]), *condition]
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 0, len(body) + 1, architecture), *body,
        (_RETURN, 0, 0, result), (_RETURN, 0, 0, _RET_ALLOW),
    ]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *instruction) for instruction in program))
    header = struct.pack("@HP", len(program), ctypes.addressof(filters))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise _failure("prctl")
    if (listener := libc.syscall(seccomp, _SECCOMP_SET_MODE_FILTER, flags, header)) < 0:
        raise _failure("seccomp")
    return int(listener)


def limit_locked_memory(limit_bytes: int) -> None:
    """Set RLIMIT_MEMLOCK, and drop the capability with which root ignores it."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit_bytes, limit_bytes))
    _give_up(_CAP_IPC_LOCK)


def count_threads() -> None:
    """Let RLIMIT_NPROC count only the threads of this process. It never limits root; files keep their owner."""
    os.setresuid(_NOBODY_ELSE, os.geteuid(), os.geteuid())
    _give_up(_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE)


def _give_up(*capabilities: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("@Ii", _CAPABILITY_VERSION_3, 0)
    sets = ctypes.create_string_buffer(24)  # effective, permitted, inheritable; low words first, then high ones
    if libc.capget(header, sets):
        raise _failure("capget")
    words = list(struct.unpack("@6I", sets.raw))
    mask = sum(1 << capability for capability in capabilities)
    words[:3] = [word & ~mask for word in words[:3]]
    if libc.capset(header, struct.pack("@6I", *words)):
        raise _failure("capset")


def _failure(call: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{call}: {os.strerror(code)}")
