"""The first requests of a load from a distant store: the manifest, and the files that the load probably needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import cast

from flowstone.commit import catalog
from flowstone.commit.entries import step_directory
from flowstone.commit.manifests import path_inside, read_manifest
from flowstone.config import CHUNK_BYTES, KIB, EngineOptions
from flowstone.errors import DamagedError, NoCheckpointError
from flowstone.format.manifest import INDEX_NAME, OBJECTS_NAME, Manifest
from flowstone.format.segment import segment_name
from flowstone.reading.checkpoint import Checkpoint
from flowstone.store.base import Store
from flowstone.store.prefetching import Prefetcher, PrefetchingStore

# How many bytes of a file are prefetched. Of index and objects: the part that is verified first, and one byte more,
# which shows whether the file is longer. Of a segment file: enough for a header of some hundred names.
_FILE_BYTES, _SEGMENT_BYTES = CHUNK_BYTES + 1, 64 * KIB
_SEGMENTS_MAX = 16  # how many segment files are prefetched, each by its own thread


def open_step(store: Store, step: int | None, resources: ExitStack | None) -> tuple[Manifest, Prefetcher | None]:
    """The manifest of `step`, or of the newest step; and the store that prefetches some of its files, or None.

    resources  closes the prefetching store; None: nothing is prefetched
    raises     NoCheckpointError, which lists the existing steps
    """
    asked: list[Prefetcher] = []

    def ask(directory: str) -> None:
        if resources is None or not store.capabilities.asks_ahead:
            return
        lengths = {INDEX_NAME: _FILE_BYTES, OBJECTS_NAME: _FILE_BYTES, segment_name(0, 0): _SEGMENT_BYTES}
        ahead = cast("PrefetchingStore", store).ahead()
        if ahead is not None:
            ahead.prefetch({path_inside(directory, name): length for name, length in lengths.items()})
            resources.callback(ahead.close)
            asked.append(ahead)

    manifest = _manifest(store, step, ask)
    if asked:
        directory = step_directory(manifest.step)
        asked[0].prefetch(
            {path_inside(directory, row.name): row.header_bytes for row in manifest.segments[:_SEGMENTS_MAX]}
        )
    return manifest, asked[0] if asked else None


def _manifest(store: Store, step: int | None, ask: Callable[[str], None]) -> Manifest:
    manifest: Manifest | None = None
    with suppress(NoCheckpointError):  # if there is none, the last line raises an error with more details
        if step is None:
            manifest = catalog.newest_manifest(store, ask)
        else:
            ask(step_directory(step))
            manifest = read_manifest(store, step_directory(step))
    return manifest or read_manifest(store, step_directory(catalog.find_committed_step(store, step)))


def checkpoint_in(ahead: Prefetcher, manifest: Manifest, options: EngineOptions) -> Checkpoint | None:
    """The checkpoint, opened from the prefetched files. None if they do not match the manifest, because the prefetch
    may have read older files.
    """
    checkpoint = Checkpoint(ahead, step_directory(manifest.step), options, manifest)
    with suppress(DamagedError):
        checkpoint.fetch()
        return checkpoint
    return None
