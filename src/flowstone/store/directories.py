"""Directories of a store are used through descriptors, so that writes, locks and removals never follow a symbolic link.

A path is resolved at each call, and another program may have replaced a directory by a link meanwhile. A descriptor
always refers to the same directory.
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

    raises  OSError, ELOOP for a link in `path`
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
    except NotADirectoryError:  # on Linux, also the error for a link
        if is_link(name, fd):
            raise OSError(errno.ELOOP, "the path is a symbolic link") from None
        raise


def is_link(path: Path | str, dir_fd: int | None = None) -> bool:
    """Whether the entry is a symbolic link; False if it does not exist."""
    try:
        os.readlink(path, dir_fd=dir_fd)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTDIR):
            raise
        return False
    return True


def entry_exists(path: Path, *, follow: bool = False) -> bool:
    """Whether the entry exists. Raises OSError if that cannot be determined.

    follow  whether a link at the end must have a target; links to parent directories always must
    """
    try:
        os.stat(path, follow_symlinks=follow)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno != errno.ELOOP:  # a link that leads to itself has no target
            raise
        return False
    return True
