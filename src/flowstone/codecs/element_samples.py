"""Samples of pieces (parts of tensors): a few elements, as bytes. They show which pieces may be equal, before any byte
is written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flowstone._native import GATHERED_ALIGNMENT_BYTES
from flowstone.extensions import extension
from flowstone.stage.device import SideStream, side_stream
from flowstone.table.pieces import Places

_PIECES_AT_ONCE = 4096  # pieces per gather of a device; needs 8 MiB of pinned memory, as each element takes 64 bytes
_ELEMENTS = 32  # elements per piece: enough to distinguish random weights of 16 bits


def element_samples(
    places: Places, positions: Sequence[int], items: Sequence[int], counts: Sequence[int]
) -> dict[int, bytes]:
    """For each piece, by position: bytes of a few elements. Pieces of equal length are sampled at the same elements.

    items   length of an element, in bytes
    counts  number of elements

    Pieces that are not contiguous in memory are left out. Waits for the current stream of devices. On a device with a
    side stream, one kernel gathers the elements of thousands of pieces.
    """
    samples: dict[int, bytes] = {}
    far: dict[str, list[tuple[int, int, NDArray[np.int64]]]] = {}
    for position, item, count in zip(positions, items, counts, strict=True):
        device, chosen = places.device_of(position), _chosen(count)
        if position in places.strided:
            continue
        if device == "cpu":
            samples[position] = _on_host(int(places.address[position]), item, count, chosen)
        elif side_stream(device) is not None:
            far.setdefault(device, []).append((position, item, chosen))
        else:
            memory = places.run(position, (count,), item)
            samples[position] = extension("torch.device_memory").elements_of(memory, chosen)
    for device, of in far.items():
        stream = side_stream(device)
        assert stream is not None, "the device has a side stream"
        for first in range(0, len(of), _PIECES_AT_ONCE):
            samples |= _gathered(stream, places, of[first : first + _PIECES_AT_ONCE])
    return samples


def _gathered(
    stream: SideStream, places: Places, pieces: Sequence[tuple[int, int, NDArray[np.int64]]]
) -> dict[int, bytes]:
    """The samples of pieces on one device. `pieces`: position, length of an element, indices of the elements."""
    positions, items = [position for position, _, _ in pieces], np.array([item for _, item, _ in pieces], np.uint32)
    begin = np.concatenate([(chosen * item).astype(np.uint64) for _, item, chosen in pieces])
    lines = stream.gather(
        address=np.repeat(places.address[positions], _ELEMENTS), begin=begin, length=np.repeat(items, _ELEMENTS),
        layout=np.full(len(begin), -1, np.int64), layouts=(),
    )
    stream.wait_current()
    stream.synchronize()
    rows = lines.reshape(len(pieces), _ELEMENTS, GATHERED_ALIGNMENT_BYTES)
    return {position: rows[row, :, :item].tobytes() for row, (position, item, _) in enumerate(pieces)}


def _chosen(count: int) -> NDArray[np.int64]:
    """The indices of the elements to sample, out of `count` elements: evenly spread, with the first and the last."""
    return np.arange(_ELEMENTS) * (count - 1) // (_ELEMENTS - 1)


def _on_host(address: int, item: int, count: int, chosen: NDArray[np.int64]) -> bytes:
    memory = memoryview((ctypes.c_uint8 * (item * count)).from_address(address))
    elements = np.frombuffer(memory, np.uint8).reshape(count, item)
    content: bytes = elements[chosen].tobytes()
    return content
