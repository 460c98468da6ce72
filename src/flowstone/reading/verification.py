"""Verifies a checkpoint in this process, or by tasks of a cluster, each of which checks some of the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise

import msgspec

from flowstone.cluster import PARTS_OF_CPU, Cluster, not_shared
from flowstone.commit import read as contents
from flowstone.commit.manifests import read_manifest
from flowstone.commit.verify import (
    CheckedFiles,
    Finding,
    Findings,
    Verified,
    VerifyShare,
    check_share,
    segment_bytes,
    verify,
)
from flowstone.config import GIB, MIB
from flowstone.errors import ArgumentError, FormatError, NoCheckpointError, StorageError
from flowstone.format.index import Index
from flowstone.format.manifest import Manifest
from flowstone.stage.arena import open_read_arena
from flowstone.store.base import Store
from flowstone.store.local import LocalStore

_SHARE_BYTES_MIN = MIB  # fewest bytes that a task checks, because each task must also read the index
_SHARE_BYTES_MAX = 8 * GIB

Progress = Callable[[int, int], None] | None


class _CheckpointLocation(msgspec.Struct, frozen=True):
    """Where a process that may be on another machine finds a checkpoint. `id`: the id of the checkpoint, to check that
    it is the same one.
    """

    root: str
    directory: str
    id: str


def inspect(store: Store, directory: str, on_progress: Progress = None, cluster: Cluster | None = None) -> Verified:
    """Check every byte of every file that the manifest in `directory` lists. Returns when all is checked.

    on_progress  called with the bytes done and the total
    cluster      runs the checks as tasks; None: this process does them

    raises       ArgumentError if a cluster is given and the store is not a directory; errors of `commit.verify.verify`
    """
    if cluster is not None and not isinstance(store, LocalStore):
        raise ArgumentError(
            f"a cluster cannot verify {store.location}, which is not a directory", next="leave out `cluster`"
        )

    def check_all(manifest: Manifest, index: Index | None) -> Findings:
        checked, total = CheckedFiles(store, directory, manifest, index), segment_bytes(manifest)
        report = None if on_progress is None else lambda done: on_progress(done, total)
        if cluster is None or index is None:
            return _check(checked, VerifyShare(0, total), report)
        location = _CheckpointLocation(store.location, directory, manifest.id)
        return tuple(_check_elsewhere(location, split_shares(total, cluster.cpus * PARTS_OF_CPU), cluster, report))

    return verify(store, directory, check_all)


def split_shares(total: int, count: int) -> list[VerifyShare]:
    """Divide `total` bytes into about `count` shares; into more if these would be too large for a task, and into fewer
    if too small.
    """
    count = max(-(-total // _SHARE_BYTES_MAX), min(count, total // _SHARE_BYTES_MIN), 1)
    return [VerifyShare(begin, end) for begin, end in pairwise(total * number // count for number in range(count + 1))]


def _check(checked: CheckedFiles, share: VerifyShare, on_progress: Callable[[int], None] | None = None) -> Findings:
    arena = open_read_arena(checked.store)
    try:
        return check_share(checked, share, arena, on_progress)
    finally:
        arena.close()


def _check_elsewhere(
    location: _CheckpointLocation, parts: list[VerifyShare], cluster: Cluster, on_progress: Callable[[int], None] | None
) -> Iterator[Finding]:
    with closing(cluster.each(check_share_in_task, location, parts)) as results:
        for part, findings in zip(parts, results, strict=True):
            yield from findings
            if on_progress is not None:
                on_progress(part.end)


def check_share_in_task(location: _CheckpointLocation, share: VerifyShare) -> Findings:
    """Check a share in a task of the cluster, which may run on another machine.

    raises  StorageError if this machine does not see the checkpoint; errors of `check_share`
    """
    store = LocalStore(location.root)
    path = f"{location.root}/{location.directory}".rstrip("/")
    try:
        manifest = read_manifest(store, location.directory)
    except (FormatError, NoCheckpointError, StorageError) as error:
        raise not_shared(path, error.message) from error
    if manifest.id != location.id:
        raise not_shared(path, "another checkpoint")
    index = contents.read_index(store, location.directory, manifest)
    return _check(CheckedFiles(store, location.directory, manifest, index), share)
