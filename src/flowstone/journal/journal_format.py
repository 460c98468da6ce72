"""The format of journal files. A file is a sequence of frames: a header, then the record of each step. Each frame has a
prefix, a document and a payload (docs/FORMAT.md, Journal). This module converts bytes, and reads or writes no files.

A journal file may be damaged or hostile: every number is checked before it is used, and no more memory is allocated
than the file has bytes.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from flowstone._native import xxh3_64
from flowstone.config import BLOCK_BYTES, LAG_STEPS_MAX, NDIM_MAX, PACKED_BELOW_BYTES, STEP_MAX
from flowstone.errors import DamagedError, UnsupportedFormatError
from flowstone.table.dtype import DTYPES

MAGIC = b"FLOWJRNL"
# 3: digests computed by devices. 2: compressed gradients. A journal has the lowest version with all that it uses
VERSION = 3
HEADER, STEP = 1, 2
DOCUMENT_BYTES_MAX = 64 << 20
PREFIX_BYTES = 72
_PREFIX = struct.Struct("<8sIIQQQQQQQ")
_PACK_BYTES = 64  # packed tensors begin at a multiple of this number, as torch's own tensors do
_NUMBER_MAX = (1 << 63) - 1


class OptimizerRow(msgspec.Struct, frozen=True):
    """An optimizer whose steps are logged: the name of its class, and the names of its parameters in each group."""

    kind: str
    groups: tuple[tuple[str, ...], ...]


class SourceRow(msgspec.Struct, frozen=True):
    """A section of the state whose object decompresses gradients (a source), and the name of that object's kind.

    exact  whether a replay reproduces the section's own tensors too
    """

    section: str
    kind: str
    exact: bool


class JournalHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame of a journal.

    id          16 hexadecimal digits, the same in the files of all ranks
    number      larger than the number of every journal that was in the store when this one was created
    after       the step before the journal's first one
    checkpoint  id of the checkpoint of step `after`, if one was started; it may never have been committed
    parent      id of the journal that ends at step `after`, if there is one
    exactness   how exact a replay is. "exact": equal bit for bit, and the fingerprints prove it. "proven": some of the
                state is on a device, so only the fingerprints show whether the replay was exact. "tolerance": it may
                differ in some bits, and no fingerprint shows that
    torch, processor, threads  how the steps were computed; "processor" includes devices
    optimizers  in the order in which `acts` number them
    proven      tensors that a replay must reproduce, in the order of the fingerprints
    windows     number of windows into which these tensors are divided; each step has the fingerprint of one
    sources     sources of compressed gradients; `sources` and `owners` exist from version 2 on
    owners      for each optimizer and parameter the rank whose file has the gradients; (): this file has all
    lag_steps   how many frames at the end of the file a crash may leave incomplete; absent: one
    """

    id: str
    number: int
    after: int
    checkpoint: str | None
    parent: str | None
    rank: int
    ranks: int
    exactness: str
    torch: str
    processor: str
    threads: int
    writer: str
    created: str
    optimizers: tuple[OptimizerRow, ...]
    proven: tuple[str, ...]
    windows: int
    sources: tuple[SourceRow, ...] = ()
    owners: tuple[tuple[int, ...], ...] = ()
    lag_steps: int | msgspec.UnsetType = msgspec.UNSET

    @property
    def torn_max(self) -> int:
        """How many frames at the end of the file a crash may leave incomplete: as many as one sync makes durable."""
        return 1 if self.lag_steps is msgspec.UNSET else self.lag_steps

    @property
    def has_chunk_fingerprints(self) -> bool:
        """Whether fingerprints are computed from digests of chunks, as on devices."""
        return self.exactness == "proven"

    @property
    def version(self) -> int:
        """The version in all frames of the journal: the lowest format version that has every feature of this journal.
        """
        return 3 if self.has_chunk_fingerprints else 2 if self.sources or self.owners else 1

    @property
    def other_ranks(self) -> list[int]:
        """The other ranks whose files have gradients that this rank needs."""
        return sorted({rank for row in self.owners for rank in row} - {self.rank})


class TensorRow(msgspec.Struct, frozen=True):
    """A tensor in a frame's payload.

    stride  in elements; None: row-major. The tensor has no gaps, and its bytes are stored in memory order
    offset  in bytes, from the beginning of the payload
    digest  XXH3-64 of its bytes, 16 hexadecimal digits
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    offset: int
    bytes: int
    digest: str


class CompressedRow(msgspec.Struct, frozen=True):
    """Gradients that a source decompresses.

    source      position in the header's `sources`
    tensors     the input of the decompression: name -> position of the tensor in the frame
    length      of the result, in elements
    parameters  (parameter's position in the optimizer, offset of its gradient in the result, in elements)
    scale       factor for the result; None: it is not scaled
    """

    source: int
    tensors: dict[str, int]
    length: int
    parameters: tuple[tuple[int, int], ...]
    scale: float | None = None


class OptimizerStepRow(msgspec.Struct, frozen=True):
    """One step of one optimizer.

    options     for each parameter group, a node (format/objects.py) with its settings in this step; None: unchanged
                since this optimizer's last step
    gradients   (parameter, tensor): the parameter's position in the optimizer, and the tensor's in the frame
    generator   if the step used random numbers: the position, in the frame, of the state that torch's generator had
                before the step
    grad_scale, found_inf  the values that a GradScaler gave to a fused optimizer
    compressed  gradients that are stored compressed instead of in `gradients`
    """

    optimizer: int
    options: tuple[msgspec.Raw, ...] | None
    gradients: tuple[tuple[int, int], ...]
    generator: int | None = None
    grad_scale: float | None = None
    found_inf: float | None = None
    compressed: tuple[CompressedRow, ...] = ()


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """The data with which a replay makes a step from the previous one.

    tensors      the tensors in the payload
    acts         the steps of optimizers, in order
    values       changed tensors of the state that no optimizer computes: name -> position in `tensors`
    replicated   sections whose replicated objects have changed: section -> position of their text in `tensors`
    per_rank     the same for objects that each rank has for itself
    window       number of the window (part of the state) that has the fingerprint; None: there is no fingerprint
    fingerprint  XXH3-64 of the window's bytes after the step, 16 hexadecimal digits
    """

    tensors: tuple[TensorRow, ...]
    acts: tuple[OptimizerStepRow, ...]
    values: dict[str, int]
    replicated: dict[str, int]
    per_rank: dict[str, int]
    window: int | None
    fingerprint: str


class FramePrefix(msgspec.Struct, frozen=True):
    """The fixed-size beginning of a frame.

    number  0 for the header, then 1, 2, ...
    step    in the header: the step before the journal's first one
    """

    kind: int
    number: int
    step: int
    journal: str
    document_bytes: int
    frame_bytes: int
    document_digest: int

    @property
    def payload_offset(self) -> int:
        return _blocks(PREFIX_BYTES + self.document_bytes)


def _blocks(length: int) -> int:
    return -(-length // BLOCK_BYTES) * BLOCK_BYTES


def lay_out_payload(lengths: Sequence[int], phases: Sequence[int]) -> tuple[list[int], int]:
    """The offset of each tensor in a payload, and the payload's length.

    phases  the distance of each tensor's address from the beginning of its page

    A tensor of 64 KiB or more begins in a new block of 4096 bytes. Its distance from the block's beginning is that of
    its memory from the beginning of a page. So all but its first and last bytes can be written directly from its
    memory. Smaller tensors are packed before these large ones.
    """
    offsets, end = [0] * len(lengths), 0
    for i, length in enumerate(lengths):
        if length < PACKED_BELOW_BYTES:
            offsets[i] = end
            end = -(-(end + length) // _PACK_BYTES) * _PACK_BYTES
    end = _blocks(end)
    for i, length in enumerate(lengths):
        if length >= PACKED_BELOW_BYTES:
            offsets[i] = end + phases[i]
            end = _blocks(offsets[i] + length)
    return offsets, end


def encode_frame_head(
    kind: int, number: int, step: int, journal: str, row: JournalHeader | StepRow, payload_bytes: int, version: int = 1
) -> bytes:
    """Encode the prefix and the document of a frame, padded to blocks of 4096 bytes. The payload follows them in the
    file. `version`: the version of the journal.
    """
    document = msgspec.json.encode(row)
    head_bytes = _blocks(PREFIX_BYTES + len(document))
    numbers = (
        MAGIC, version, kind, number, step, int(journal, 16), len(document), head_bytes + payload_bytes,
        xxh3_64(document),
    )
    prefix = _PREFIX.pack(*numbers, 0)[:-8]
    return (prefix + xxh3_64(prefix).to_bytes(8, "little") + document).ljust(head_bytes, b"\0")


def decode_prefix(data: bytes) -> FramePrefix | None:
    """The frame prefix at the start of `data`; None if there is none, or if it was written only in part.

    raises  UnsupportedFormatError for a later version
    """
    if len(data) < PREFIX_BYTES or data[:8] != MAGIC:
        return None
    _, version, kind, number, step, journal, document, frame, digest, prefix_digest = _PREFIX.unpack_from(data)
    if xxh3_64(data[: PREFIX_BYTES - 8]) != prefix_digest:
        return None
    if version > VERSION:
        raise UnsupportedFormatError(
            "a journal needs a newer version of Flowstone", expected=f"version {VERSION}", found=f"version {version}",
            next="upgrade flowstone",
        )
    prefix = FramePrefix(kind, number, step, f"{journal:016x}", document, frame, digest)
    fits = document <= DOCUMENT_BYTES_MAX and frame % BLOCK_BYTES == 0 and prefix.payload_offset <= frame <= _NUMBER_MAX
    return prefix if fits and kind in (HEADER, STEP) and step <= STEP_MAX else None


_Row = TypeVar("_Row", JournalHeader, StepRow)


def decode_document(
    data: bytes | bytearray | memoryview, frame: FramePrefix, kind: type[_Row], *, path: str
) -> _Row | None:
    """The document of a frame; None if its digest is wrong, because the frame was written only in part. `data`: the
    frame, or its first bytes.

    raises  DamagedError for a document with a valid digest and invalid content
    """
    text = bytes(memoryview(data)[PREFIX_BYTES : PREFIX_BYTES + frame.document_bytes])
    if len(text) < frame.document_bytes or xxh3_64(text) != frame.document_digest:
        return None
    try:
        row = msgspec.json.decode(text, type=kind)
        reason = _fault(row, frame)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        reason = f"{error!s:.300}"
    if reason:
        raise DamagedError(
            f"{path} is not valid: {reason}", found=f"frame {frame.number}, step {frame.step}",
            next="load the checkpoint that the journal starts from, or an older step",
        )
    return row


def _fault(row: JournalHeader | StepRow, frame: FramePrefix) -> str:
    if isinstance(row, JournalHeader):
        return _fault_of_header(row, frame)
    payload_bytes = frame.frame_bytes - frame.payload_offset
    for position, tensor in enumerate(row.tensors):
        if reason := fault_of_tensor(tensor, payload_bytes):
            return f"tensor {position} {reason}"
    ends = sorted((tensor.offset, tensor.offset + tensor.bytes) for tensor in row.tensors if tensor.bytes)
    if any(begin < end for (_, end), (begin, _) in itertools.pairwise(ends)):
        return "two tensors share bytes"
    used = [position for act in row.acts for _, position in act.gradients]
    used += [act.generator for act in row.acts if act.generator is not None]
    used += [*row.values.values(), *row.replicated.values(), *row.per_rank.values()]
    compressed = [gradient for act in row.acts for gradient in act.compressed]
    used += [position for gradient in compressed for position in gradient.tensors.values()]
    if any(not 0 <= position < len(row.tensors) for position in used):
        return "it refers to a tensor that is not in the frame"
    numbers = [act.optimizer for act in row.acts] + [position for act in row.acts for position, _ in act.gradients]
    numbers += [number for g in compressed for number in (g.source, g.length, *itertools.chain(*g.parameters))]
    if any(not 0 <= number <= _NUMBER_MAX for number in numbers) or (row.window or 0) < 0:
        return "it has a negative number"
    return ""


def _fault_of_header(row: JournalHeader, frame: FramePrefix) -> str:
    if row.id != frame.journal or row.after != frame.step or frame.number != 0:
        return "it contradicts the prefix of its frame"
    if not 0 <= row.rank < row.ranks or row.number < 0 or not 1 <= row.windows <= 1 << 20 or row.threads < 1:
        return "it has a number out of range"
    if not 1 <= row.torn_max <= LAG_STEPS_MAX:
        return "it has a number out of range"
    if row.checkpoint is None and row.parent is None:
        return "it has neither a checkpoint nor a parent journal"
    if row.owners:
        counts = [sum(map(len, optimizer.groups)) for optimizer in row.optimizers]
        if list(map(len, row.owners)) != counts:
            return "it does not have one owner for each parameter"
        if any(not 0 <= rank < row.ranks for owners in row.owners for rank in owners):
            return "it refers to a rank that does not exist"
    return ""


def fault_of_tensor(tensor: TensorRow, payload_bytes: int) -> str:
    """Why a tensor cannot be in a payload of this length; "" if it can."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        return f"has the unknown dtype {tensor.dtype!r:.40}"
    if len(tensor.shape) > NDIM_MAX or any(not 0 <= side <= _NUMBER_MAX for side in tensor.shape):
        return "has an impossible shape"
    elements = math.prod(tensor.shape)
    if elements * dtype.item_bytes != tensor.bytes or not 0 <= tensor.offset <= payload_bytes - tensor.bytes:
        return "is not within the frame"
    if tensor.stride is not None and not is_gapless(tensor.shape, tensor.stride):
        return "has strides with gaps"
    return ""


def is_gapless(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements at these strides fill one run of memory without gaps or overlaps."""
    if len(shape) != len(stride):
        return False
    expected = 1
    for step, side in sorted(zip(stride, shape, strict=True)):
        if side == 1:
            continue
        if step != expected:
            return 0 in shape
        expected *= side
    return True
