"""Directories of a store, by descriptors: what is written, locked or removed is reached through no link.

A path is looked up anew for each call, and somebody may put a link in its way meanwhile; a descriptor stays what it is.
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
    """A descriptor of the directory at `path` in `root`, which itself may be a link, as its user likes.

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
    """The same of the directory that the entry at `path` lies in."""
    with directory(root, path.rpartition("/")[0]) as fd:
        yield fd


def _inside(opened: Descriptors, name: str, fd: int) -> int:
    try:
        return opened.open(name, _DIRECTORY | os.O_NOFOLLOW, fd)
    except NotADirectoryError:  # as Linux says of a link, too
        if is_link(name, at=fd):
            raise OSError(errno.ELOOP, "a symbolic link") from None
        raise


def is_link(path: Path | str, at: int | None = None) -> bool:
    """Whether a symbolic link is there."""
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
    """Whether there is an entry of that name. If that cannot be found out, it is an OSError, not `False`.

    follow  whether a link has to lead somewhere; one on the way to the entry has, always
    """
    try:
        os.stat(path, follow_symlinks=follow)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno != errno.ELOOP:  # links that lead in a circle lead nowhere
            raise
        return False
    return True
