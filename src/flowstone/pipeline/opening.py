"""The first requests of a load from a distant store: what a step is likely to need is asked for with its manifest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import cast

from flowstone.checkpoint import Checkpoint
from flowstone.commit import catalog
from flowstone.commit.entries import step_directory
from flowstone.commit.manifests import inside, read_manifest
from flowstone.config import CHUNK_BYTES, KIB, EngineOptions
from flowstone.errors import DamagedError, NoCheckpointError
from flowstone.format.manifest import INDEX_NAME, OBJECTS_NAME, Manifest
from flowstone.format.segment import segment_name
from flowstone.store.asks_ahead import Ahead, AsksAhead
from flowstone.store.base import Store

# Of index and objects: the part that is verified first, and one byte more, which tells of a file that is longer. Of a
# segment: a header of some hundred names.
_FILE_BYTES, _SEGMENT_BYTES = CHUNK_BYTES + 1, 64 * KIB
_SEGMENTS_MAX = 16  # a thread for each


def open_step(store: Store, step: int | None, held: ExitStack | None) -> tuple[Manifest, Ahead | None]:
    """The manifest of `step`, or of the newest; and the store in which some of its files are on their way, if any are.

    held    closes what is asked for ahead; None: nothing is
    raises  NoCheckpointError, which lists the existing steps
    """
    asked: list[Ahead] = []

    def ask(directory: str) -> None:
        if held is None or not store.capabilities.asks_ahead:
            return
        lengths = {INDEX_NAME: _FILE_BYTES, OBJECTS_NAME: _FILE_BYTES, segment_name(0, 0): _SEGMENT_BYTES}
        ahead = cast("AsksAhead", store).ahead()
        if ahead is not None:
            ahead.ask({inside(directory, name): length for name, length in lengths.items()})
            held.callback(ahead.close)
            asked.append(ahead)

    manifest = _manifest(store, step, ask)
    if asked:
        directory = step_directory(manifest.step)
        asked[0].ask({inside(directory, row.name): row.header_bytes for row in manifest.segments[:_SEGMENTS_MAX]})
    return manifest, asked[0] if asked else None


def _manifest(store: Store, step: int | None, ask: Callable[[str], None]) -> Manifest:
    found: Manifest | None = None
    with suppress(NoCheckpointError):  # the last line has more to say
        if step is None:
            found = catalog.newest(store, ask)
        else:
            ask(step_directory(step))
            found = read_manifest(store, step_directory(step))
    return found or read_manifest(store, step_directory(catalog.find(store, step)))


def checkpoint_in(ahead: Ahead, manifest: Manifest, options: EngineOptions) -> Checkpoint | None:
    """The checkpoint, of what is on its way; None if that is not what the manifest says: it may be older."""
    checkpoint = Checkpoint(ahead, step_directory(manifest.step), options, manifest)
    with suppress(DamagedError):
        checkpoint.fetch()
        return checkpoint
    return None
