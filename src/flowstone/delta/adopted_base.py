"""The base of a process's first save, that is, the earlier checkpoint to whose chunks this save may refer.

After a load the base is the verified part of the loaded checkpoint, if its files have not changed since. In a process
that has loaded nothing, the base is the newest checkpoint, as its index describes it. A rank refers only to files of
its own rank number, so that no two ranks hard-link the same file. Pieces are matched by name, dtype, shape and box (the
region of the tensor): if the tensors are divided in another way than in the base, fewer pieces match, or none.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone.commit import catalog
from flowstone.commit.entries import step_directory
from flowstone.commit.manifests import path_inside
from flowstone.config import PACKED_BELOW_BYTES
from flowstone.coordination.messages import Assignment
from flowstone.delta.base import Base, find_unchanged
from flowstone.errors import FlowstoneError
from flowstone.format.index import ChunkForms, ChunkPlaces
from flowstone.format.manifest import DELTA
from flowstone.format.segment import is_of_rank
from flowstone.log import log
from flowstone.reading.checkpoint import Checkpoint
from flowstone.session.load_outcome import VerifiedRead
from flowstone.session.shared import Shared
from flowstone.table.chunks import CODEC_RAW, CODEC_XOR, ChunkBases, first_chunks, spread


def adopted_base(shared: Shared, assignment: Assignment) -> Base | None:
    """Find a base for a save of the assigned pieces. None if there is no checkpoint, or if all pieces are expected to
    change.

    Reads a manifest. Reads the index only if some pieces are expected to be unchanged: parameters that no optimizer
    owns, and pieces for which the checkpoint itself refers to an earlier one.
    """
    outcome, frozen = shared.outcome, shared.frozen.names
    verified = outcome.verified
    if outcome.loads and verified is None:
        return None
    try:
        checkpoint = _checkpoint(shared, verified)
        if checkpoint is None or not (frozen or DELTA in checkpoint.manifest.critical):
            return None
        base = _base_of(checkpoint, assignment, shared.group.rank, verified)
    except FlowstoneError as error:
        log.info("the next save writes everything, and refers to no earlier checkpoint: %s", error)
        return None
    assert base.known is not None, "an adopted base lists its known chunks"
    assert base.unchanged is not None, "the index lists the unchanged pieces"
    length = base.pieces.lengths()
    is_frozen = np.isin(np.arange(len(length)), _named(base.pieces.names, frozen))
    unchanged = (base.unchanged | is_frozen) & find_unchanged(base.known, length)
    return replace(base, unchanged=unchanged, loads=outcome.loads) if unchanged.any() else None


def _checkpoint(shared: Shared, verified: VerifiedRead | None) -> Checkpoint | None:
    """The checkpoint that was loaded, if it still exists. If nothing was loaded, the newest checkpoint."""
    if verified is None:
        newest = catalog.newest_manifest(shared.store)
        return None if newest is None else Checkpoint(
            shared.store, step_directory(newest.step), shared.options, newest
        )
    checkpoint = Checkpoint(shared.store, step_directory(verified.step), shared.options)
    changed = [
        name for name, stamp in verified.stamps.items()
        if shared.store.stamp(path_inside(step_directory(verified.step), name)) != stamp
    ]
    if checkpoint.manifest.id == verified.id and not changed:
        return checkpoint
    log.info(
        "the checkpoint of step %d has changed since it was loaded: the next save does not refer to it", verified.step
    )
    return None


def _base_of(checkpoint: Checkpoint, assignment: Assignment, rank: int, verified: VerifiedRead | None) -> Base:
    """The base made from `checkpoint`: those pieces that this rank writes and that the checkpoint has, too."""
    manifest, chunks, pieces = checkpoint.manifest, checkpoint.index.chunks, assignment.pieces()
    own = np.array([is_of_rank(row.name, rank) for row in manifest.segments], np.bool_)
    referred = np.array([row.home is not None for row in manifest.segments], np.bool_)
    length = pieces.lengths()
    first = first_chunks(length)
    count = int(first[-1])
    digest, offset, segment = np.zeros(count, np.uint64), np.zeros(count, np.uint64), np.zeros(count, np.uint32)
    known, unchanged = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    mine, theirs = _same_pieces(checkpoint, assignment, own)
    counts = np.diff(first)[mine]
    to, source = spread(first[:-1][mine], counts), spread(chunks.first[theirs], counts)
    holder = np.repeat(theirs, counts)
    digest[to] = chunks.digest[source]
    segment[to], offset[to] = chunks.stored_locations(holder, source - chunks.first[holder])
    known[to] = own[segment[to]]
    codec, forms = None, None
    if chunks.stored is not None and (kinds := chunks.stored.codec[source]).any():
        # Encoding is deterministic, so the stored bytes of a chunk that was encoded without a base identify its data.
        codec, forms = np.zeros(count, np.uint8), ChunkForms.of_raw(length, digest)
        codec[to] = np.where(kinds == CODEC_XOR, CODEC_RAW, kinds)
        digest[to] = chunks.identities()[source]
        forms.length[to], forms.codec[to] = chunks.stored.length[source], kinds
        forms.digest[to] = chunks.digest[source]
        if chunks.stored.bases is not None:
            forms = replace(forms, bases=_bases(chunks.stored.bases, count, to, source))
            known[to] &= own[chunks.stored.bases.segment[source]] | (kinds != CODEC_XOR)
    unchanged[to] = referred[segment[to]]
    if verified is not None:
        known[to] &= np.unpackbits(verified.chunks)[source].astype(np.bool_)
    return Base(
        manifest.step, manifest.id, pieces, assignment.lazy(), digest, manifest.segments,
        ChunkPlaces(segment, offset, forms), find_unchanged(unchanged, length), 0, known, codec=codec,
    )


def _bases(
    bases: ChunkBases, chunks: int, to: NDArray[np.int64], source: NDArray[np.int64]
) -> ChunkBases:
    """For `chunks` chunks, the chunks from which they are stored as differences: chunks with the numbers `to` get the
    entries `source` of `bases`, in this order.
    """
    spread_bases = ChunkBases.empty(chunks)
    for mine, theirs in zip(spread_bases.columns(), bases.columns(), strict=True):
        mine[to] = theirs[source]
    return spread_bases


def _same_pieces(
    checkpoint: Checkpoint, assignment: Assignment, own: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The assigned pieces that the checkpoint has in files of this rank, and their rows of its index. `own`: for each
    row of the index whether it is in such a file.
    """
    index, pieces = checkpoint.index, assignment.pieces()
    chunks, stored = index.chunks, index.pieces
    some = np.flatnonzero(chunks.counts > 0)
    begins, _ = chunks.stored_locations(some, np.zeros(len(some), np.int64))
    names, dtypes, shapes = stored.names, stored.dtypes, stored.shapes
    there = {
        (names[row], dtypes[row].name, tuple(shapes[row]), stored.box(row)): row for row in some[own[begins]].tolist()
    }
    names, dtypes, shapes = pieces.names, pieces.dtypes, pieces.shapes
    large = np.flatnonzero(pieces.lengths() >= PACKED_BELOW_BYTES).tolist()
    own_pieces = ((row, (names[row], dtypes[row].name, tuple(shapes[row]), pieces.box(row))) for row in large)
    candidates = [(row, there.get(piece, -1)) for row, piece in own_pieces]
    pairs = np.array([pair for pair in candidates if pair[1] >= 0], np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _named(names: Collection[str], selected: Collection[str]) -> list[int]:
    chosen = frozenset(selected)
    return [row for row, name in enumerate(names) if name in chosen]
