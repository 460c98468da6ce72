"""Journal files: frames, each a prefix, a document and a payload (docs/FORMAT.md, Journal). Bytes only, no I/O.

What is decoded here comes from a file that may hold anything: every number is checked before it is used, and nothing is
allocated beyond the bytes at hand.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from flowstone import _native
from flowstone.config import BLOCK_BYTES, LAG_STEPS_MAX, NDIM_MAX, PACKED_BELOW_BYTES, STEP_MAX
from flowstone.errors import DamagedError, UnsupportedFormatError
from flowstone.table.dtype import DTYPES

MAGIC = b"FLOWJRNL"
VERSION = 3  # without digests of devices it is 2, without compressed gradients as well it is 1; journals say the least
OPENING, STEP = 1, 2
DOCUMENT_BYTES_MAX = 64 << 20
PREFIX_BYTES = 72
_PREFIX = struct.Struct("<8sIIQQQQQQQ")
_PACK_BYTES = 64  # packed tensors begin at a multiple of it, as torch aligns its own
_NUMBER_MAX = (1 << 63) - 1


class OptimizerRow(msgspec.Struct, frozen=True):
    """An optimizer whose steps are logged: the name of its class, and its parameters by name, group by group."""

    kind: str
    groups: tuple[tuple[str, ...], ...]


class SourceRow(msgspec.Struct, frozen=True):
    """What decompresses gradients: a section of the state, and the kind of source that it has to be.

    exact  whether the section's own tensors follow from the journal too
    """

    section: str
    kind: str
    exact: bool


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame of a journal.

    id          16 hexadecimal digits, the same in the files of all ranks
    number      larger than that of every journal that was in the store when this one began
    after       the step after which it begins
    checkpoint  id of the checkpoint of that step, if one was begun; it may never have been committed
    parent      id of the journal that leads to that step, if one does
    exactness   of a replay: "exact" bit for bit, as the fingerprints prove; "proven" where some of the state is on a
                device, so that only they tell whether it is; "tolerance" otherwise
    torch, processor, threads  with which the steps were made; "processor" names devices, too
    optimizers  in the order in which acts number them
    proven      tensors that a replay must reproduce, in the order of the fingerprints
    windows     into how many windows they are divided; one is fingerprinted with each step
    sources     of compressed gradients; in journals of version 2 and later, as `owners`
    owners      for each optimizer, of each parameter the rank whose file has the gradients; (): this one has all
    lag_steps   the last so many frames may be torn; not there: the last one
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
        """How many frames at the end a crash may have torn: those that one sync made durable."""
        return 1 if self.lag_steps is msgspec.UNSET else self.lag_steps

    @property
    def by_chunks(self) -> bool:
        """Whether fingerprints are of chunks, as devices make them."""
        return self.exactness == "proven"

    @property
    def version(self) -> int:
        """The version that all frames of the journal have: the least that a reader must know."""
        return 3 if self.by_chunks else 2 if self.sources or self.owners else 1

    @property
    def others(self) -> list[int]:
        """The other ranks whose files have gradients for this one."""
        return sorted({rank for row in self.owners for rank in row} - {self.rank})


class TensorRow(msgspec.Struct, frozen=True):
    """A tensor in a frame's payload.

    stride  in elements; None: row-major. A tensor without gaps, whose bytes are stored in the order of memory
    offset  in bytes, from the payload's begin
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

    source      position in the opening's `sources`
    tensors     name -> position in the frame: what it decompresses
    length      of the result, in elements
    parameters  (position among all of the optimizer, where its gradient begins in the result, in elements)
    scale       what the result is multiplied by; None: by nothing
    """

    source: int
    tensors: dict[str, int]
    length: int
    parameters: tuple[tuple[int, int], ...]
    scale: float | None = None


class ActRow(msgspec.Struct, frozen=True):
    """One step of one optimizer.

    options     one node for each group: its settings at that time; None: as in the act of it before
    gradients   (parameter, tensor): the parameter's position among all of the optimizer, and the tensor's in the frame
    generator   position of the state of torch's generator before the step, if the step drew from it
    grad_scale  and `found_inf`: what a GradScaler gave to a fused optimizer
    compressed  gradients that are not in `gradients`, but decompressed
    """

    optimizer: int
    options: tuple[msgspec.Raw, ...] | None
    gradients: tuple[tuple[int, int], ...]
    generator: int | None = None
    grad_scale: float | None = None
    found_inf: float | None = None
    compressed: tuple[CompressedRow, ...] = ()


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """What replays a step, from the one before.

    tensors      in the payload
    acts         in order
    values       name -> position: tensors of the state that no optimizer explains, and that have changed
    replicated   section -> position of its objects' text, for those that have changed; `per_rank` likewise
    window       the one that `fingerprint` is of, after the step; None: of none
    fingerprint  XXH3-64 of the window's bytes, 16 hexadecimal digits
    """

    tensors: tuple[TensorRow, ...]
    acts: tuple[ActRow, ...]
    values: dict[str, int]
    replicated: dict[str, int]
    per_rank: dict[str, int]
    window: int | None
    fingerprint: str


class Frame(msgspec.Struct, frozen=True):
    """A frame's prefix.

    number  0 for the opening, then counting
    step    of the opening: the one after which the journal begins
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


def lay_out(lengths: Sequence[int], phases: Sequence[int]) -> tuple[list[int], int]:
    """The offset of each tensor in a payload, and the payload's length.

    phases  of their addresses: the distance from a page's begin

    Tensors of 64 KiB and more begin in a block of their own, as far from its begin as their memory is from a page's, so
    that all but their first and last bytes can be written from where they lie. Smaller ones are packed before them.
    """
    offsets, end = [0] * len(lengths), 0
    for at, length in enumerate(lengths):
        if length < PACKED_BELOW_BYTES:
            offsets[at] = end
            end = -(-(end + length) // _PACK_BYTES) * _PACK_BYTES
    end = _blocks(end)
    for at, length in enumerate(lengths):
        if length >= PACKED_BELOW_BYTES:
            offsets[at] = end + phases[at]
            end = _blocks(offsets[at] + length)
    return offsets, end


def encode_head(
    kind: int, number: int, step: int, journal: str, row: Opening | StepRow, payload_bytes: int, version: int = 1
) -> bytes:
    """Prefix and document of a frame, padded to blocks: all that comes before its payload. `version`: the journal's."""
    document = msgspec.json.encode(row)
    head_bytes = _blocks(PREFIX_BYTES + len(document))
    numbers = (
        MAGIC, version, kind, number, step, int(journal, 16), len(document), head_bytes + payload_bytes,
        _native.xxh3_64(document),
    )
    prefix = _PREFIX.pack(*numbers, 0)[:-8]
    return (prefix + _native.xxh3_64(prefix).to_bytes(8, "little") + document).ljust(head_bytes, b"\0")


def decode_prefix(data: bytes) -> Frame | None:
    """The prefix at the begin of `data`; None if there is none, or it is torn.

    raises  UnsupportedFormatError for a later version
    """
    if len(data) < PREFIX_BYTES or data[:8] != MAGIC:
        return None
    _, version, kind, number, step, journal, document, frame, digest, own = _PREFIX.unpack_from(data)
    if _native.xxh3_64(data[: PREFIX_BYTES - 8]) != own:
        return None
    if version > VERSION:
        raise UnsupportedFormatError(
            "a journal needs a newer reader", expected=f"version {VERSION}", found=f"version {version}",
            next="upgrade flowstone",
        )
    found = Frame(kind, number, step, f"{journal:016x}", document, frame, digest)
    fits = document <= DOCUMENT_BYTES_MAX and frame % BLOCK_BYTES == 0 and found.payload_offset <= frame <= _NUMBER_MAX
    return found if fits and kind in (OPENING, STEP) and step <= STEP_MAX else None


_Row = TypeVar("_Row", Opening, StepRow)


def decode_document(data: bytes | bytearray | memoryview, frame: Frame, kind: type[_Row], *, path: str) -> _Row | None:
    """The document of a frame; None if its digest differs: the frame is torn. `data`: the frame's first bytes, or more.

    raises  DamagedError for one that contradicts itself
    """
    text = bytes(memoryview(data)[PREFIX_BYTES : PREFIX_BYTES + frame.document_bytes])
    if len(text) < frame.document_bytes or _native.xxh3_64(text) != frame.document_digest:
        return None
    try:
        row = msgspec.json.decode(text, type=kind)
        reason = _fault(row, frame)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        reason = f"{error!s:.300}"
    if reason:
        raise DamagedError(
            f"{path} is not valid: {reason}", found=f"frame {frame.number}, step {frame.step}",
            next="load the checkpoint that it begins with, or an older step",
        )
    return row


def _fault(row: Opening | StepRow, frame: Frame) -> str:
    if isinstance(row, Opening):
        return _fault_of_opening(row, frame)
    payload_bytes = frame.frame_bytes - frame.payload_offset
    for at, tensor in enumerate(row.tensors):
        if reason := fault_of_tensor(tensor, payload_bytes):
            return f"tensor {at} {reason}"
    ends = sorted((tensor.offset, tensor.offset + tensor.bytes) for tensor in row.tensors if tensor.bytes)
    if any(begin < end for (_, end), (begin, _) in itertools.pairwise(ends)):
        return "two tensors share bytes"
    used = [at for act in row.acts for _, at in act.gradients]
    used += [act.generator for act in row.acts if act.generator is not None]
    used += [*row.values.values(), *row.replicated.values(), *row.per_rank.values()]
    compressed = [one for act in row.acts for one in act.compressed]
    used += [at for one in compressed for at in one.tensors.values()]
    if any(not 0 <= at < len(row.tensors) for at in used):
        return "it refers to a tensor that it does not have"
    numbers = [act.optimizer for act in row.acts] + [at for act in row.acts for at, _ in act.gradients]
    numbers += [number for one in compressed for number in (one.source, one.length, *itertools.chain(*one.parameters))]
    if any(not 0 <= number <= _NUMBER_MAX for number in numbers) or (row.window or 0) < 0:
        return "it has a negative number"
    return ""


def _fault_of_opening(row: Opening, frame: Frame) -> str:
    if row.id != frame.journal or row.after != frame.step or frame.number != 0:
        return "its prefix says otherwise"
    if not 0 <= row.rank < row.ranks or row.number < 0 or not 1 <= row.windows <= 1 << 20 or row.threads < 1:
        return "it has a number out of range"
    if not 1 <= row.torn_max <= LAG_STEPS_MAX:
        return "it has a number out of range"
    if row.checkpoint is None and row.parent is None:
        return "it begins nowhere"
    if row.owners:
        counts = [sum(map(len, optimizer.groups)) for optimizer in row.optimizers]
        if list(map(len, row.owners)) != counts:
            return "it has not one owner for each parameter"
        if any(not 0 <= rank < row.ranks for owners in row.owners for rank in owners):
            return "it names a rank that does not log"
    return ""


def fault_of_tensor(tensor: TensorRow, payload_bytes: int) -> str:
    """Why a tensor cannot lie in a payload of that length; "" if it can."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        return f"has the unknown dtype {tensor.dtype!r:.40}"
    if len(tensor.shape) > NDIM_MAX or any(not 0 <= side <= _NUMBER_MAX for side in tensor.shape):
        return "has no possible shape"
    elements = math.prod(tensor.shape)
    if elements * dtype.item_bytes != tensor.bytes or not 0 <= tensor.offset <= payload_bytes - tensor.bytes:
        return "does not lie within the frame"
    if tensor.stride is not None and not is_gapless(tensor.shape, tensor.stride):
        return "has strides with gaps"
    return ""


def is_gapless(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements at these strides fill one run of memory, each place once."""
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
