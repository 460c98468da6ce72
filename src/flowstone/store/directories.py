"""Directories of a store, by descriptor: writes, locks and removals never go through a link.

A path is resolved at each call, and a link may have been put there in between; a descriptor always stays the same.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from flowstone.store.descriptors import Descriptors

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def directory(root: Path, path: str = "") -> Iterator[int]:
    """A descriptor of the directory at `path` in `root`. The root itself may be a link.

    raises  OSError, ELOOP for a link
    """
    opened = Descriptors()
    try:
        fd = opened.open(root, _DIRECTORY)
        for name in PurePosixPath(path).parts:
            fd = _inside(opened, name, fd)
        yield fd
    finally:
        opened.close()


@contextmanager
def parent(root: Path, path: str) -> Iterator[int]:
    """A descriptor of the directory that contains the entry at `path`."""
    with directory(root, path.rpartition("/")[0]) as fd:
        yield fd


def _inside(opened: Descriptors, name: str, fd: int) -> int:
    try:
        return opened.open(name, _DIRECTORY | os.O_NOFOLLOW, fd)
    except NotADirectoryError:  # Linux raises this for a link, too
        if is_link(name, at=fd):
            raise OSError(errno.ELOOP, "a symbolic link") from None
        raise


def is_link(path: Path | str, at: int | None = None) -> bool:
    """Whether the entry is a symbolic link."""
    try:
        os.readlink(path, dir_fd=at)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTDIR):
            raise
        return False
    return True


def is_there(path: Path, *, follow: bool = False) -> bool:
    """Whether there is an entry of that name. Raises OSError if that cannot be determined.

    follow  whether a link at the end must have a target; links on the way to the entry always must
    """
    try:
        os.stat(path, follow_symlinks=follow)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno != errno.ELOOP:  # circular links lead nowhere
            raise
        return False
    return True
