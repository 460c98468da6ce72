"""A checkpoint verified: by this process, or by tasks of a cluster that take a share of its bytes each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise

import msgspec

from flowstone.cluster import PARTS_OF_CPU, Cluster, not_shared
from flowstone.commit import read as contents
from flowstone.commit.manifests import read_manifest
from flowstone.commit.verify import Checked, Finding, Findings, Share, Verified, check_share, segment_bytes, verify
from flowstone.config import GIB, MIB
from flowstone.errors import ArgumentError, FormatError, NoCheckpointError, StorageError
from flowstone.format.index import Index
from flowstone.format.manifest import Manifest
from flowstone.stage.arena import open_read_arena
from flowstone.store.base import Store
from flowstone.store.local import LocalStore

_SHARE_BYTES_MIN = MIB  # each task reads the index, too
_SHARE_BYTES_MAX = 8 * GIB

Progress = Callable[[int, int], None] | None


class _Place(msgspec.Struct, frozen=True):
    """A checkpoint, for a process that may be on another machine; `id`: of its manifest."""

    root: str
    directory: str
    id: str


def inspect(store: Store, directory: str, on_progress: Progress = None, cluster: Cluster | None = None) -> Verified:
    """Check every byte of every file that the manifest in `directory` lists. Blocks.

    on_progress  called with the bytes done and the total
    cluster      does it, in shares; None: this process does

    raises       ArgumentError for a cluster and a store that is not in a directory; what `commit.verify.verify` raises
    """
    if cluster is not None and not isinstance(store, LocalStore):
        raise ArgumentError(
            f"a cluster cannot verify {store.location}, which is in no directory", next="verify it in this process"
        )

    def check_all(manifest: Manifest, index: Index | None) -> Findings:
        checked, total = Checked(store, directory, manifest, index), segment_bytes(manifest)
        tell = None if on_progress is None else lambda done: on_progress(done, total)
        if cluster is None or index is None:
            return _check(checked, Share(0, total), tell)
        place = _Place(store.location, directory, manifest.id)
        return tuple(_check_elsewhere(place, shares(total, cluster.cpus * PARTS_OF_CPU), cluster, tell))

    return verify(store, directory, check_all)


def shares(total: int, count: int) -> list[Share]:
    """About `count` shares of `total` bytes; more where these would be large, fewer where they would be small."""
    count = max(-(-total // _SHARE_BYTES_MAX), min(count, total // _SHARE_BYTES_MIN), 1)
    return [Share(begin, end) for begin, end in pairwise(total * number // count for number in range(count + 1))]


def _check(checked: Checked, share: Share, tell: Callable[[int], None] | None = None) -> Findings:
    arena = open_read_arena(checked.store)
    try:
        return check_share(checked, share, arena, tell)
    finally:
        arena.close()


def _check_elsewhere(
    place: _Place, parts: list[Share], cluster: Cluster, tell: Callable[[int], None] | None
) -> Iterator[Finding]:
    with closing(cluster.each(check_share_in_task, place, parts)) as results:
        for part, findings in zip(parts, results, strict=True):
            yield from findings
            if tell is not None:
                tell(part.end)


def check_share_in_task(place: _Place, share: Share) -> Findings:
    """Check a share as one process of several, perhaps on another machine.

    raises  StorageError where this machine does not see the checkpoint; what `check_share` raises
    """
    store = LocalStore(place.root)
    path = f"{place.root}/{place.directory}".rstrip("/")
    try:
        manifest = read_manifest(store, place.directory)
    except (FormatError, NoCheckpointError, StorageError) as error:
        raise not_shared(path, error.message) from error
    if manifest.id != place.id:
        raise not_shared(path, "another checkpoint")
    index = contents.read_index(store, place.directory, manifest)
    return _check(Checked(store, place.directory, manifest, index), share)
