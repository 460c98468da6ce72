"""The base of a first save: a checkpoint that an earlier process has written, or that a load has read.

After a load it is the checkpoint that was loaded, and of that what was read and verified, if its files have not changed
since. In a process that has loaded nothing it is the newest checkpoint, by its index. In both cases a rank refers only
to files of its own number, so that no two ranks link the same one. Pieces are found by name, dtype, shape and box:
another layout finds fewer, or none.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone.checkpoint import Checkpoint
from flowstone.commit import catalog
from flowstone.commit.entries import step_directory
from flowstone.commit.manifests import inside
from flowstone.config import PACKED_BELOW_BYTES
from flowstone.errors import FlowstoneError
from flowstone.format.index import ChunkPlaces
from flowstone.format.manifest import DELTA
from flowstone.format.segment import is_of_rank
from flowstone.log import log
from flowstone.pipeline.base import Base, mostly, raw_forms
from flowstone.pipeline.load_outcome import VerifiedRead
from flowstone.pipeline.messages import Assignment
from flowstone.pipeline.shared import Shared
from flowstone.table.chunks import CODEC_RAW, CODEC_XOR, ChunkBases, first_chunks, spread


def adopted_base(shared: Shared, assignment: Assignment) -> Base | None:
    """The base of a save by this assignment in a process that has none; None if there is none, or nothing would rest.

    Reads a manifest; and the index, if some pieces are expected to rest: parameters that no optimizer owns, and what
    the checkpoint refers to itself.
    """
    outcome, frozen = shared.outcome, shared.frozen.names
    verified = outcome.verified
    if outcome.loads and verified is None:
        return None
    try:
        checkpoint = _checkpoint(shared, verified)
        if checkpoint is None or not (frozen or DELTA in checkpoint.manifest.critical):
            return None
        found = _base_of(checkpoint, assignment, shared.group.rank, verified)
    except FlowstoneError as error:
        log.info("the next save refers to no earlier checkpoint: %s", error)
        return None
    assert found.known is not None, "another process has written it"
    assert found.rests is not None, "the index tells"
    length = found.pieces.lengths()
    is_frozen = np.isin(np.arange(len(length)), _named(found.pieces.names, frozen))
    rests = (found.rests | is_frozen) & mostly(found.known, length)
    return replace(found, rests=rests, loads=outcome.loads) if rests.any() else None


def _checkpoint(shared: Shared, verified: VerifiedRead | None) -> Checkpoint | None:
    """The one that was loaded, if it is there still; without a load the newest one."""
    if verified is None:
        newest = catalog.newest(shared.store)
        return None if newest is None else Checkpoint(
            shared.store, step_directory(newest.step), shared.options, newest
        )
    found = Checkpoint(shared.store, step_directory(verified.step), shared.options)
    changed = [
        name for name, stamp in verified.stamps.items()
        if shared.store.stamp(inside(step_directory(verified.step), name)) != stamp
    ]
    if found.manifest.id == verified.id and not changed:
        return found
    log.info("step %d has changed since it was loaded: the next save does not refer to it", verified.step)
    return None


def _base_of(checkpoint: Checkpoint, assignment: Assignment, rank: int, verified: VerifiedRead | None) -> Base:
    """What the checkpoint has of the pieces that this rank writes."""
    manifest, chunks, pieces = checkpoint.manifest, checkpoint.index.chunks, assignment.pieces()
    own = np.array([is_of_rank(row.name, rank) for row in manifest.segments], np.bool_)
    referred = np.array([row.home is not None for row in manifest.segments], np.bool_)
    length = pieces.lengths()
    first = first_chunks(length)
    count = int(first[-1])
    digest, offset, segment = np.zeros(count, np.uint64), np.zeros(count, np.uint64), np.zeros(count, np.uint32)
    known, rested = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    mine, theirs = _same_pieces(checkpoint, assignment, own)
    counts = np.diff(first)[mine]
    to, source = spread(first[:-1][mine], counts), spread(chunks.first[theirs], counts)
    holder = np.repeat(theirs, counts)
    digest[to] = chunks.digest[source]
    segment[to], offset[to] = chunks.stored_at(holder, source - chunks.first[holder])
    known[to] = own[segment[to]]
    codec, forms = None, None
    if chunks.stored is not None and (kinds := chunks.stored.codec[source]).any():
        # What is encoded by itself is told by its stored bytes, which the same encoder makes of the same data.
        codec, forms = np.zeros(count, np.uint8), raw_forms(length, digest)
        codec[to] = np.where(kinds == CODEC_XOR, CODEC_RAW, kinds)
        digest[to] = chunks.identities()[source]
        forms.length[to], forms.codec[to] = chunks.stored.length[source], kinds
        forms.digest[to] = chunks.digest[source]
        if chunks.stored.bases is not None:
            forms = replace(forms, bases=_bases(chunks.stored.bases, count, to, source))
            known[to] &= own[chunks.stored.bases.segment[source]] | (kinds != CODEC_XOR)
    rested[to] = referred[segment[to]]
    if verified is not None:
        known[to] &= np.unpackbits(verified.chunks)[source].astype(np.bool_)
    return Base(
        manifest.step, manifest.id, pieces, assignment.lazy(), digest, manifest.segments,
        ChunkPlaces(segment, offset, forms), mostly(rested, length), 0, known, codec=codec,
    )


def _bases(
    bases: ChunkBases, chunks: int, to: NDArray[np.int64], source: NDArray[np.int64]
) -> ChunkBases:
    """Of so many chunks: those numbered `to` have what `source` has."""
    found = ChunkBases.none(chunks)
    for mine, theirs in zip(found.columns(), bases.columns(), strict=True):
        mine[to] = theirs[source]
    return found


def _same_pieces(
    checkpoint: Checkpoint, assignment: Assignment, own: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions of pieces that are written, and of those in the index that are the same and in files `own` has."""
    index, pieces = checkpoint.index, assignment.pieces()
    chunks, stored = index.chunks, index.pieces
    some = np.flatnonzero(chunks.counts > 0)
    begins, _ = chunks.stored_at(some, np.zeros(len(some), np.int64))
    names, dtypes, shapes = stored.names, stored.dtypes, stored.shapes
    there = {(names[at], dtypes[at].name, tuple(shapes[at]), stored.box(at)): at for at in some[own[begins]].tolist()}
    names, dtypes, shapes = pieces.names, pieces.dtypes, pieces.shapes
    large = np.flatnonzero(pieces.lengths() >= PACKED_BELOW_BYTES).tolist()
    wanted = ((at, (names[at], dtypes[at].name, tuple(shapes[at]), pieces.box(at))) for at in large)
    found = [(at, there.get(piece, -1)) for at, piece in wanted]
    pairs = np.array([pair for pair in found if pair[1] >= 0], np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _named(names: Collection[str], wanted: Collection[str]) -> list[int]:
    chosen = frozenset(wanted)
    return [at for at, name in enumerate(names) if name in chosen]
