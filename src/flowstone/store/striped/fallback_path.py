"""Choose another path for segments that a path cannot take, and limit the memory that is needed for such moves."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flowstone.format.digest import digest
from flowstone.format.segment import path_of
from flowstone.store.base import FilePlan
from flowstone.store.striped.path import PathProvider

if TYPE_CHECKING:
    from flowstone._native import Arena

_HELD_ONE_IN = 2  # one half of the arena may be kept until objects are complete


def held_for_objects(store: PathProvider, files: Sequence[FilePlan], arena: Arena) -> tuple[int, int]:
    """How much of the arena (staging memory) each path may keep for incomplete objects, as (n, maximum): at most 1/n of
    the arena's bytes in use, and at most the maximum, in bytes.
    """
    paths = store.paths()
    buckets = {number for number in (path_of(file.path.rpartition("/")[2]) for file in files)
               if number and not paths[number].store.capabilities.directory_sync}
    one_in = _HELD_ONE_IN * max(len(buckets), 1)
    return one_in, arena.budget_bytes // one_in


def copy_range(source: int, target: int, begin: int, end: int, buffer: memoryview) -> None:
    """Copy bytes `begin` to `end` - 1 of a file into another one, through `buffer`. `source`, `target`: descriptors.
    Raises OSError.
    """
    while begin < end:
        length = os.preadv(source, [buffer[: min(len(buffer), end - begin)]], begin)
        if not length:
            raise OSError(errno.EIO, "the file is shorter than expected")
        rest = buffer[:length]
        while rest:
            written = os.pwrite(target, rest, begin)
            begin, rest = begin + written, rest[written:]


def choose_fallback_path(store: PathProvider, path: str, without: int) -> int:
    """The number of the path that takes over a segment from a failed path. It is chosen by a hash of the segment's
    name, and by the paths' shares, so that segments of several ranks are distributed over all paths. If no other
    directory can be used, it is the first path.

    without  the failed path, which is not chosen even if it counts as usable again
    """
    shares = [
        share for share in store.shares()
        if not share.path or (share.path != without and store.paths()[share.path].store.capabilities.directory_sync)
    ]
    position = int(digest(path.rpartition("/")[2].encode()), 16) / 2.0**64 * sum(share.weight for share in shares)
    for share in shares:
        position -= share.weight
        if position < 0:
            return share.path
    return 0
