"""Run a program to which the kernel refuses io_uring, as the default profile of many containers does.

    python -m bench.seccomp PROGRAM [ARGUMENT ...]

The filter is installed before the program's first instruction, applies to all its threads and children, and cannot be
removed: seccomp(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

REFUSED = (425, 426, 427)  # io_uring_setup, _enter, _register: the same numbers on every architecture
ERRNO = errno.EPERM  # the error in containers; a kernel without io_uring returns ENOSYS

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2  # linux/prctl.h, linux/seccomp.h
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
_NUMBER_AT, _ARCH_AT = 0, 4  # offsets in struct seccomp_data


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def instructions(machine: str) -> bytes:
    """The filter, as an array of struct sock_filter. Calls of another architecture are allowed."""
    refused = len(REFUSED)
    code = [
        (_LOAD_WORD, 0, 0, _ARCH_AT),
        (_JUMP_IF_EQUAL, 0, refused + 1, _AUDIT_ARCH[machine]),
        (_LOAD_WORD, 0, 0, _NUMBER_AT),
        *((_JUMP_IF_EQUAL, refused - index, 0, number) for index, number in enumerate(REFUSED)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE | ERRNO),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def refuse_io_uring() -> None:
    """For this thread, its later children, and programs that it executes."""
    code = instructions(platform.machine())
    string_buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(string_buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        # An unprivileged process may only install a filter after it has renounced new privileges.
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({call[0]}) failed: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    refuse_io_uring()
    os.execvp(sys.argv[1], sys.argv[1:])
