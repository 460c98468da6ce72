"""OS errors: the only module that translates an errno into one of our errors, with what to do next."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from flowstone.errors import FullError, StorageError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_PLAIN_FILES = "a checkpoint holds plain files only; restore the file from a copy, or load an older step"
MORE_THREADS = "raise the limits on threads and processes (ulimit -u, pids.max)"
_REMEDIES = {
    errno.EACCES: "give this user the permission, or choose another path",
    errno.EPERM: "give this user the permission, or choose another path",
    errno.EROFS: "mount the file system for writing, or choose another path",
    errno.ELOOP: "a checkpoint holds no symbolic links, and nothing in a store is changed through one; "
    "put the files themselves there",
    errno.EISDIR: _PLAIN_FILES,
    errno.ENXIO: _PLAIN_FILES,
    errno.EEXIST: "a file, or a link that leads nowhere, is there; move it away, or choose another path",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a file is where a directory should be; choose another path",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EMFILE: "raise the limit on open files of a process (ulimit -n)",
    errno.ENFILE: "raise the machine's limit on open files (fs.file-max)",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or use a file system that takes larger ones",
    errno.EXDEV: "an overlay cannot rename what lies on its lower layer; copy the store to a file system of its own",
    errno.EINVAL: 'the file system may refuse direct I/O here; use EngineOptions(direct="auto"), or "off"',
    errno.ENOMEM: "free some memory, or raise the limits on it (ulimit -v, ulimit -l, memory.max)",
}


def explain(
    root: Path, operation: str, code: int, path: str, *, reach: str = "", needed_bytes: int | None = None,
    remedy: str | None = None,
) -> StorageError:
    """The error for the refusal `code` (an errno) of `operation` on `path`, for the user of the store at `root`.

    reach         the range in the file, as text
    needed_bytes  the total to be written, if known
    remedy        what to do next, if the caller knows better than the errno
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

    remedy, remedies  what to do next, for any errno and for some, if the caller knows better
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
        found = os.statvfs(root)
    except OSError:
        return {"free": "unknown"}  # safe: the message only lacks one fact
    room: dict[str, object] = {"free": f"{found.f_bavail * found.f_frsize} bytes"}
    if found.f_files and not found.f_favail:  # explains "disk full" on a disk with free bytes
        room["inodes"] = "none free: the file system takes no more files"
    return room
