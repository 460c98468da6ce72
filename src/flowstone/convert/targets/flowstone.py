"""A Flowstone checkpoint as a target: the same layout of segments as in a save, then index, objects and manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone._version import __version__
from flowstone.commit.publish import Draft, Publication, publish
from flowstone.commit.read import encode_sections, join_objects
from flowstone.config import BLOCK_BYTES, CHUNK_BYTES
from flowstone.convert.layout import Extent, Output, TargetFile, TargetLayout
from flowstone.format.digest import digest
from flowstone.format.manifest import IoRecord, Manifest, SegmentRow
from flowstone.format.segment import encode_header
from flowstone.plan.global_index import global_index
from flowstone.plan.write import SegmentPlan, WritePlan, data_offsets, plan_writes
from flowstone.store.base import Store
from flowstone.table.box import Box
from flowstone.table.chunks import spread
from flowstone.table.pieces import Alias, Piece


class StepLayout(msgspec.Struct, frozen=True, eq=False):
    """The segments of a new checkpoint. The copy uses `layout`; the other fields are for the index."""

    layout: TargetLayout
    plan: WritePlan
    offsets: NDArray[np.uint64]
    headers: tuple[bytes, ...]
    aliases: tuple[Alias, ...]


def lay_out_step(outputs: Sequence[Output], aliases: Sequence[Alias]) -> StepLayout:
    """Plan segments with these tensors, as in a save of one rank. Raises CollisionError for names that a segment cannot
    store.
    """
    shapes = [output.tensor.shape for output in outputs]
    pieces = [
        Piece(output.name, output.dtype, shape, Box.whole(shape)) for output, shape in zip(outputs, shapes, strict=True)
    ]
    plan = plan_writes(pieces)
    offsets = data_offsets(plan, np.zeros(len(pieces), np.uint64))
    headers = tuple(_header(plan, segment, offsets) for segment in plan.segments)
    files = tuple(
        TargetFile(segment.name, segment.bytes, (
            Extent(0, len(header), literal=header),
            *(Extent(int(offsets[piece]), int(plan.length[piece]), output=piece) for piece in segment.pieces),
        ))
        for segment, header in zip(plan.segments, headers, strict=True)
    )
    return StepLayout(TargetLayout(tuple(outputs), files, "chunks"), plan, offsets, headers, tuple(aliases))


def _header(plan: WritePlan, segment: SegmentPlan, offsets: NDArray[np.uint64]) -> bytes:
    moving = segment.pieces[: segment.slotted]
    rows = ((plan.text[piece], int(offsets[piece]), int(plan.length[piece])) for piece in moving)
    return encode_header(rows, header_bytes=segment.header_bytes, file_bytes=segment.bytes, packed=segment.packed)


def publish_step(
    step: StepLayout, checks: Sequence[int], objects: Mapping[str, object], store: Store, draft: Draft, store_id: str,
    io: IoRecord,
) -> Manifest:
    """Commit the checkpoint whose segments were copied. `checks`: the digests of its chunks, in the order of the files.
    Durable on return.
    """
    return publish(store, draft, store_id, publication_of(step, checks, join_objects(encode_sections(objects), {}), io))


def publication_of(
    step: StepLayout, checks: Sequence[int], objects: bytes, io: IoRecord, *, ranks: int = 1
) -> Publication:
    """The small files of a checkpoint whose segments were copied, for `publish_step`. `objects`: the content of
    objects.json.
    """
    plan = step.plan
    frame, order, chunks = global_index(
        [plan.pieces], [np.arange(len(plan.pieces))], step.aliases, plan.segment
    )
    segments = [
        SegmentRow(number, None, segment.name, segment.bytes, segment.header_bytes, digest(header))
        for number, (segment, header) in enumerate(zip(plan.segments, step.headers, strict=True))
    ]
    return Publication(
        segments=segments, index=frame.fill(step.offsets[order], _by_piece(plan, checks)[chunks]), totals=frame.totals,
        objects=objects, io=io, writer=f"flowstone {__version__}", ranks=ranks,
    )


def _by_piece(plan: WritePlan, checks: Sequence[int]) -> NDArray[np.uint64]:
    """Sort digests of chunks, which are in the order of the files, into the order of the pieces."""
    order = np.array([piece for segment in plan.segments for piece in segment.pieces], np.int64)
    counts = -(-plan.length.astype(np.int64) // CHUNK_BYTES)[order]
    digests = np.zeros(plan.chunks, np.uint64)
    assert len(checks) == plan.chunks, "the copy computed the digest of every chunk"
    digests[spread(plan.chunk.astype(np.int64)[order], counts)] = np.array(checks, np.uint64)
    return digests


def io_record(backend: str, request_bytes: int, queue_depth: int, copied_bytes: int) -> IoRecord:
    """The manifest's record of how the segments were written."""
    return IoRecord(
        backend=backend, alignment=BLOCK_BYTES, request_bytes=request_bytes, queue_depth=queue_depth,
        copied_bytes=copied_bytes,
    )
