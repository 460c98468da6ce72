"""Frames of a journal, from memory: digests, and the few bytes that must be copied.

Gradients are written from where they lie. What surrounds them (prefix, document, packed tensors, the bytes of a tensor
before its first page and behind its last) is put together in blocks of a scratch buffer that is used again.
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
from flowstone.format.journal import STEP, ActRow, StepRow, TensorRow, encode_head, lay_out
from flowstone.stage.fingerprints import Window, digests_of
from flowstone.stage.optimizer_steps import Act
from flowstone.state.tensors import dtype_of


def bytes_at(address: int, length: int) -> memoryview:
    """The bytes at an address of this process. The caller keeps the memory alive."""
    if not length:
        return memoryview(b"")
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


class Source(msgspec.Struct, frozen=True, eq=False):
    """A tensor for a frame. `owner` keeps its memory alive."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    address: int
    length_bytes: int
    owner: object

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Source:
        """A tensor whose elements fill one run of memory; of one on a device, a copy on the host."""
        if tensor.device.type != "cpu":
            tensor = tensor.cpu()
        row_major = tensor.is_contiguous()
        stride = None if row_major else tuple(tensor.stride())
        return cls(
            dtype_of(tensor).name, tuple(tensor.shape), stride, tensor.data_ptr() if tensor.numel() else 0,
            tensor.nbytes, tensor,
        )

    @classmethod
    def of_bytes(cls, data: bytes | bytearray) -> Source:
        array = np.frombuffer(data, np.uint8)
        return cls("uint8", (len(data),), None, array.ctypes.data, len(data), array)


class StepContent(msgspec.Struct, frozen=True, eq=False):
    """What a step's frame is made of; see format.journal.StepRow.

    still    of the pieces in the window, by position, the names of those that no step changes
    far_values  further ones, of devices: read on the thread that makes the frame, which waits for them
    streams  a context in which a thread has the devices' streams behind whose work gradients are there
    """

    step: int
    acts: Sequence[Act]
    repeats_options: Sequence[bool]
    values: dict[str, Source]
    replicated: dict[str, bytes]
    per_rank: dict[str, bytes]
    window: Window | None
    still: Mapping[int, str] = {}
    far_values: Callable[[], dict[str, Source]] = dict
    streams: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def uncompressed(self) -> str:
        """Why gradients are logged as they are, though they are exchanged compressed; "" if none are."""
        return next((act.uncompressed for act in self.acts if act.uncompressed), "")


class FrameMaker:
    """Makes the frames of one journal. One thread at a time: the scratch buffer is used again."""

    def __init__(self, journal: str, version: int = 1) -> None:
        self._journal, self._version, self._scratch = journal, version, mmap.mmap(-1, 1 << 20)

    def make(self, number: int, content: StepContent, fingerprint: str) -> list[memoryview]:
        """The frame's bytes, in parts whose addresses and lengths are multiples of 4096. Valid until the next call, and
        while `content` lives.
        """
        sources: list[Source] = []

        def added(source: Source) -> int:
            sources.append(source)
            return len(sources) - 1

        def blobs(texts: dict[str, bytes]) -> dict[str, int]:
            return {name: added(Source.of_bytes(text)) for name, text in texts.items()}

        shared: dict[int, int] = {}  # several acts may be of one exchange

        def added_once(tensor: torch.Tensor) -> int:
            if id(tensor) not in shared:
                shared[id(tensor)] = added(Source.of(tensor))
            return shared[id(tensor)]

        acts = tuple(
            ActRow(
                act.optimizer, None if repeats else act.options,
                tuple([(one.parameter, added(Source.of(one.tensor))) for one in act.gradients]),
                None if act.generator is None else added(Source.of(act.generator)), act.grad_scale, act.found_inf,
                tuple([one.row(added_once) for one in act.compressed]),
            )
            for act, repeats in zip(content.acts, content.repeats_options, strict=True)
        )
        values = {name: added(source) for name, source in (content.values | content.far_values()).items()}
        replicated, per_rank = blobs(content.replicated), blobs(content.per_rank)
        views = [bytes_at(one.address, one.length_bytes) for one in sources]
        phases = [one.address % BLOCK_BYTES for one in sources]
        offsets, payload_bytes = lay_out([one.length_bytes for one in sources], phases)
        digests = digests_of([one.address for one in sources], [one.length_bytes for one in sources])
        row = StepRow(
            tensors=tuple(
                TensorRow(one.dtype, one.shape, one.stride, offset, one.length_bytes, f"{digest:016x}")
                for one, offset, digest in zip(sources, offsets, digests, strict=True)
            ),
            acts=acts, values=values, replicated=replicated, per_rank=per_rank,
            window=None if content.window is None else content.window.number, fingerprint=fingerprint,
        )
        head = encode_head(STEP, number, content.step, self._journal, row, payload_bytes, self._version)
        return self._parts(head, views, [one.address for one in sources], offsets)

    def _parts(
        self, head: bytes, views: Sequence[memoryview], addresses: Sequence[int], offsets: Sequence[int]
    ) -> list[memoryview]:
        packed = [at for at, view in enumerate(views) if 0 < len(view) < PACKED_BELOW_BYTES]
        apart = [at for at, view in enumerate(views) if len(view) >= PACKED_BELOW_BYTES]
        packed_bytes = _blocks(max((offsets[at] + len(views[at]) for at in packed), default=0))
        scratch = self._room(len(head) + packed_bytes + 2 * BLOCK_BYTES * len(apart))
        used = len(head) + packed_bytes
        scratch[: len(head)] = head
        scratch[len(head) : used] = bytes(packed_bytes)
        for at in packed:
            begin = len(head) + offsets[at]
            scratch[begin : begin + len(views[at])] = views[at]
        parts = [scratch[:used]]
        for at in apart:
            view, phase = views[at], addresses[at] % BLOCK_BYTES
            first = (BLOCK_BYTES - phase) % BLOCK_BYTES  # bytes before the first page
            inner = (len(view) - first) // BLOCK_BYTES * BLOCK_BYTES
            if first:
                block = scratch[used : used + BLOCK_BYTES]
                block[:phase] = bytes(phase)
                block[phase:] = view[:first]
                parts.append(block)
                used += BLOCK_BYTES
            parts.append(view[first : first + inner])
            if rest := len(view) - first - inner:
                block = scratch[used : used + BLOCK_BYTES]
                block[:rest] = view[first + inner :]
                block[rest:] = bytes(BLOCK_BYTES - rest)
                parts.append(block)
                used += BLOCK_BYTES
        return parts

    def _room(self, length: int) -> memoryview:
        if len(self._scratch) < length:
            self._scratch = mmap.mmap(-1, _blocks(length))
        return memoryview(self._scratch)


def _blocks(length: int) -> int:
    return -(-length // BLOCK_BYTES) * BLOCK_BYTES
