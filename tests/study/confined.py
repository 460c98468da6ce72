"""Run a command with fewer rights: `python confined.py uring|memlock COMMAND...`.

uring    a seccomp filter refuses io_uring_setup(2) with EPERM, as container runtimes do
memlock  64 KiB of locked memory, without the privilege to exceed it
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys

LIMIT_BYTES = 64 * 1024
_CAP_IPC_LOCK = 14
_PR_CAPBSET_DROP, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 24, 22, 38
_SECCOMP_MODE_FILTER = 2
_IO_URING_SETUP = 425  # the same number on every architecture
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _EPERM = 0x7FFF0000, 0x00050001


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse_io_uring() -> None:
    rows = ((_LOAD_WORD, 0, 0, 0), (_JUMP_IF_EQUAL, 0, 1, _IO_URING_SETUP), (_RETURN, 0, 0, _EPERM),
            (_RETURN, 0, 0, _ALLOW))
    code = b"".join(struct.pack("=HBBI", *row) for row in rows)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(_Program(len(rows), code)))


def limit_locked_memory() -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (LIMIT_BYTES, LIMIT_BYTES))
    if os.geteuid() == 0:
        _prctl(_PR_CAPBSET_DROP, _CAP_IPC_LOCK)  # what exec then gives to root lacks it


def _prctl(*arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    given = [a if isinstance(a, int) else ctypes.cast(a, ctypes.c_void_p) for a in arguments]  # type: ignore[arg-type]
    given += [0] * (5 - len(given))
    if libc.prctl(*(ctypes.c_ulong(a) if isinstance(a, int) else a for a in given)) != 0:
        raise OSError(ctypes.get_errno(), f"prctl{arguments}")


if __name__ == "__main__":
    {"uring": refuse_io_uring, "memlock": limit_locked_memory}[sys.argv[1]]()
    os.execv(sys.argv[2], sys.argv[2:])
