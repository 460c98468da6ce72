"""Make the frames of a journal (one per step) from memory: computes digests, and copies only a few bytes.

Gradients are written from their own memory. Everything around them (prefix, document, packed tensors, the bytes of a
tensor before its first full page and after its last) is assembled in blocks of a reused scratch buffer.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec
import numpy as np
import torch

from flowstone.config import BLOCK_BYTES, PACKED_BELOW_BYTES
from flowstone.journal.fingerprints import FingerprintWindow, digests_of
from flowstone.journal.journal_format import (
    STEP,
    OptimizerStepRow,
    StepRow,
    TensorRow,
    encode_frame_head,
    lay_out_payload,
)
from flowstone.journal.optimizer_steps import OptimizerStepRecord
from flowstone.torch.tensors import dtype_of


def bytes_at(address: int, length: int) -> memoryview:
    """The bytes at an address of this process. The caller keeps the memory alive."""
    if not length:
        return memoryview(b"")
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


class FrameTensor(msgspec.Struct, frozen=True, eq=False):
    """A tensor for a frame. `owner` keeps its memory alive."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    address: int
    length_bytes: int
    owner: object

    @classmethod
    def of(cls, tensor: torch.Tensor) -> FrameTensor:
        """The description of a contiguous tensor. A tensor on a device is copied to the host first."""
        if tensor.device.type != "cpu":
            tensor = tensor.cpu()
        row_major = tensor.is_contiguous()
        stride = None if row_major else tuple(tensor.stride())
        return cls(
            dtype_of(tensor).name, tuple(tensor.shape), stride, tensor.data_ptr() if tensor.numel() else 0,
            tensor.nbytes, tensor,
        )

    @classmethod
    def of_bytes(cls, data: bytes | bytearray) -> FrameTensor:
        array = np.frombuffer(data, np.uint8)
        return cls("uint8", (len(data),), None, array.ctypes.data, len(data), array)


class StepContent(msgspec.Struct, frozen=True, eq=False):
    """The content of a step's frame; see journal_format.StepRow.

    frozen_names   names of the frozen tensors in the window, by their position among the pieces with fingerprints
    device_values  returns further values, which are on devices; the thread that makes the frame calls it, and waits for
                   them
    streams        context in which a thread uses the streams that have computed the gradients
    """

    step: int
    records: Sequence[OptimizerStepRecord]
    repeats_options: Sequence[bool]
    values: dict[str, FrameTensor]
    replicated: dict[str, bytes]
    per_rank: dict[str, bytes]
    window: FingerprintWindow | None
    frozen_names: Mapping[int, str] = {}
    device_values: Callable[[], dict[str, FrameTensor]] = dict
    streams: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def uncompressed(self) -> str:
        """Why gradients are logged uncompressed, though ranks exchange them in compressed form; "" if all such
        gradients are compressed.
        """
        return next((record.uncompressed for record in self.records if record.uncompressed), "")


class FrameMaker:
    """Makes the frames (records of steps) of one journal. For one thread at a time, since all frames use the same
    scratch buffer.
    """

    def __init__(self, journal: str, version: int = 1) -> None:
        self._journal, self._version, self._scratch = journal, version, mmap.mmap(-1, 1 << 20)

    def make(self, number: int, content: StepContent, fingerprint: str) -> list[memoryview]:
        """The frame's bytes, in parts whose addresses and lengths are multiples of 4096 bytes. They are valid until the
        next call, and only while `content` lives.
        """
        sources: list[FrameTensor] = []

        def add(source: FrameTensor) -> int:
            sources.append(source)
            return len(sources) - 1

        def blobs(texts: dict[str, bytes]) -> dict[str, int]:
            return {name: add(FrameTensor.of_bytes(text)) for name, text in texts.items()}

        shared: dict[int, int] = {}  # several optimizer steps may use the buckets of one exchange

        def add_once(tensor: torch.Tensor) -> int:
            if id(tensor) not in shared:
                shared[id(tensor)] = add(FrameTensor.of(tensor))
            return shared[id(tensor)]

        acts = tuple(
            OptimizerStepRow(
                record.optimizer, None if repeats else record.options,
                tuple([(gradient.parameter, add(FrameTensor.of(gradient.tensor))) for gradient in record.gradients]),
                None if record.generator is None else add(FrameTensor.of(record.generator)),
                record.grad_scale, record.found_inf,
                tuple([bucket.row(add_once) for bucket in record.compressed]),
            )
            for record, repeats in zip(content.records, content.repeats_options, strict=True)
        )
        values = {name: add(source) for name, source in (content.values | content.device_values()).items()}
        replicated, per_rank = blobs(content.replicated), blobs(content.per_rank)
        views = [bytes_at(source.address, source.length_bytes) for source in sources]
        phases = [source.address % BLOCK_BYTES for source in sources]
        offsets, payload_bytes = lay_out_payload([source.length_bytes for source in sources], phases)
        digests = digests_of([source.address for source in sources], [source.length_bytes for source in sources])
        row = StepRow(
            tensors=tuple(
                TensorRow(source.dtype, source.shape, source.stride, offset, source.length_bytes, f"{digest:016x}")
                for source, offset, digest in zip(sources, offsets, digests, strict=True)
            ),
            acts=acts, values=values, replicated=replicated, per_rank=per_rank,
            window=None if content.window is None else content.window.number, fingerprint=fingerprint,
        )
        head = encode_frame_head(STEP, number, content.step, self._journal, row, payload_bytes, self._version)
        return self._parts(head, views, [source.address for source in sources], offsets)

    def _parts(
        self, head: bytes, views: Sequence[memoryview], addresses: Sequence[int], offsets: Sequence[int]
    ) -> list[memoryview]:
        packed = [index for index, view in enumerate(views) if 0 < len(view) < PACKED_BELOW_BYTES]
        apart = [index for index, view in enumerate(views) if len(view) >= PACKED_BELOW_BYTES]
        packed_bytes = _blocks(max((offsets[index] + len(views[index]) for index in packed), default=0))
        scratch = self._scratch_bytes(len(head) + packed_bytes + 2 * BLOCK_BYTES * len(apart))
        used = len(head) + packed_bytes
        scratch[: len(head)] = head
        scratch[len(head) : used] = bytes(packed_bytes)
        for index in packed:
            begin = len(head) + offsets[index]
            scratch[begin : begin + len(views[index])] = views[index]
        parts = [scratch[:used]]
        for index in apart:
            view, phase = views[index], addresses[index] % BLOCK_BYTES
            first = (BLOCK_BYTES - phase) % BLOCK_BYTES  # bytes before the first page
            inner = (len(view) - first) // BLOCK_BYTES * BLOCK_BYTES
            if first:
                block = scratch[used : used + BLOCK_BYTES]
                block[:phase] = bytes(phase)
                block[phase:] = view[:first]
                parts.append(block)
                used += BLOCK_BYTES
            parts.append(view[first : first + inner])
            if rest_bytes := len(view) - first - inner:
                block = scratch[used : used + BLOCK_BYTES]
                block[:rest_bytes] = view[first + inner :]
                block[rest_bytes:] = bytes(BLOCK_BYTES - rest_bytes)
                parts.append(block)
                used += BLOCK_BYTES
        return parts

    def _scratch_bytes(self, length: int) -> memoryview:
        if len(self._scratch) < length:
            self._scratch = mmap.mmap(-1, _blocks(length))
        return memoryview(self._scratch)


def _blocks(length: int) -> int:
    return -(-length // BLOCK_BYTES) * BLOCK_BYTES
