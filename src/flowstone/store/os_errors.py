"""Errors of the operating system. Only this module converts an errno into a FlowstoneError, with advice on what to do.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from flowstone.errors import FullError, StorageError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_PLAIN_FILES = "a checkpoint contains only plain files; restore the file from a copy, or load an older step"
MORE_THREADS = "raise the limits on threads and processes (ulimit -u, pids.max)"
_REMEDIES = {
    errno.EACCES: "give this user the permission, or choose another path",
    errno.EPERM: "give this user the permission, or choose another path",
    errno.EROFS: "mount the file system for writing, or choose another path",
    errno.ELOOP: "a store must not contain symbolic links: replace the link by the file or directory itself",
    errno.EISDIR: _PLAIN_FILES,
    errno.ENXIO: _PLAIN_FILES,
    errno.EEXIST: "a file or a broken link has that name; move it away, or choose another path",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a file is where a directory should be; choose another path",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EMFILE: "raise the limit on open files of a process (ulimit -n)",
    errno.ENFILE: "raise the machine's limit on open files (fs.file-max)",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or use a file system that takes larger ones",
    errno.EXDEV: "an overlay cannot rename entries of its lower layer; copy the store to another file system",
    errno.EINVAL: 'the file system may refuse direct I/O here; use EngineOptions(direct="auto"), or "off"',
    errno.ENOMEM: "free some memory, or raise the limits on memory (ulimit -v, ulimit -l, memory.max)",
}


def explain(
    root: Path, operation: str, code: int, path: str, *, reach: str = "", needed_bytes: int | None = None,
    remedy: str | None = None,
) -> StorageError:
    """The error for `operation` on `path` that failed with the errno `code`, in the store at `root`.

    reach         the range of the file that was read or written, as text
    needed_bytes  total length, in bytes, of the files to be written, if known
    remedy        what to do next; None: the usual advice for this errno
    """
    facts: dict[str, object] = {"reason": f"{os.strerror(code)} ({errno.errorcode.get(code, code)})"}
    if reach:
        facts["range"] = reach
    if code in _NO_SPACE:
        facts |= {"needed": f"{needed_bytes} bytes" if needed_bytes else "unknown", **_room(root)}
        facts["next"] = "free some space, or prune old checkpoints; the previous checkpoint is untouched"
        return FullError(f"no space to {operation} {path}", errno=code, **facts)
    facts["next"] = remedy or _REMEDIES.get(code, "check the device and the file system's log")
    return StorageError(f"cannot {operation} {path}", errno=code, **facts)


@contextmanager
def translated(
    root: Path, operation: str, path: str, *, needed_bytes: int | None = None, remedy: str | None = None,
    remedies: Mapping[int, str] = MappingProxyType({}),
) -> Iterator[None]:
    """Turn an OSError or a MemoryError into a StorageError that names the operation and the path in the store.

    remedy    what to do next, for any errno; None: the usual advice for the errno
    remedies  what to do next: errno -> advice
    """
    try:
        yield
    except MemoryError as error:
        raise explain(root, operation, errno.ENOMEM, str(root / path)) from error
    except OSError as error:
        code, where = error.errno or 0, str(root / path)
        better = remedies.get(code, remedy)
        raise explain(root, operation, code, where, needed_bytes=needed_bytes, remedy=better) from error


def _room(root: Path) -> dict[str, object]:
    try:
        status = os.statvfs(root)
    except OSError:
        return {"free": "unknown"}  # then the message says that the free space is unknown
    facts: dict[str, object] = {"free": f"{status.f_bavail * status.f_frsize} bytes"}
    if status.f_files and not status.f_favail:  # a disk with free bytes, but without free inodes, is full, too
        facts["inodes"] = "none free: the file system takes no more files"
    return facts
