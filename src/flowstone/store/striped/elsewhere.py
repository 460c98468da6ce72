"""Where segments go that their path refuses, and what is kept of them for that."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flowstone.format.digest import digest
from flowstone.format.segment import path_of
from flowstone.store.base import FilePlan
from flowstone.store.striped.path import Striping

if TYPE_CHECKING:
    from flowstone import _native

_HELD_ONE_IN = 2  # of so many bytes of the arena, until objects are complete


def held_for_objects(store: Striping, files: Sequence[FilePlan], arena: _native.Arena) -> tuple[int, int]:
    """How much of the arena each path may hold for objects that are not complete: one byte in so many of what is there,
    and so many bytes at most.
    """
    paths = store.paths()
    buckets = {number for number in (path_of(one.path.rpartition("/")[2]) for one in files)
               if number and not paths[number].store.capabilities.directory_sync}
    one_in = _HELD_ONE_IN * max(len(buckets), 1)
    return one_in, arena.budget_bytes // one_in


def copy_range(source: int, target: int, begin: int, end: int, room: memoryview) -> None:
    """Bytes [begin, end) of a file into another one. Raises OSError."""
    while begin < end:
        length = os.preadv(source, [room[: min(len(room), end - begin)]], begin)
        if not length:
            raise OSError(errno.EIO, "the file ends early")
        rest = room[:length]
        while rest:
            written = os.pwrite(target, rest, begin)
            begin, rest = begin + written, rest[written:]


def other_path(store: Striping, path: str, without: int) -> int:
    """Which path gets a segment of one that has failed: drawn by the segment's name, with the paths' shares as odds, so
    that those of several ranks come to all of them. The first one, where no other directory is left.

    without  the path that has failed: it may count as usable again by now
    """
    shares = [
        share for share in store.shares()
        if not share.path or (share.path != without and store.paths()[share.path].store.capabilities.directory_sync)
    ]
    drawn = int(digest(path.rpartition("/")[2].encode()), 16) / 2.0**64 * sum(share.weight for share in shares)
    for share in shares:
        drawn -= share.weight
        if drawn < 0:
            return share.path
    return 0
