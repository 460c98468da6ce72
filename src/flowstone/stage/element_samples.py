"""A few elements of each of some pieces, as bytes: which pieces are worth comparing, before a byte is written."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from flowstone import _native
from flowstone.stage.capture import on_device
from flowstone.stage.device import SideStream, side_stream
from flowstone.table.pieces import Memory, Places

_PIECES_AT_ONCE = 4096  # of a device: 8 MiB of pinned memory, as each element gets a line there
_ELEMENTS = 32  # of a piece: of random weights in 16 bits, no two pieces have the same


def element_samples(places: Places, positions: Sequence[int], items: Sequence[int], counts: Sequence[int]) -> dict[
    int, bytes
]:
    """The bytes of elements at the same numbers in all pieces of one length, in row-major order; by position.

    items   length of an element, in bytes
    counts  number of elements
    Pieces that are not one run of bytes are left out. Waits for the current stream of devices: one kernel gathers from
    thousands of pieces of a device that has a side stream.
    """
    found: dict[int, bytes] = {}
    far: dict[str, list[tuple[int, int, NDArray[np.int64]]]] = {}
    for at, item, count in zip(positions, items, counts, strict=True):
        device, chosen = places.device_of(at), _chosen(count)
        if at in places.apart:
            continue
        if device == "cpu":
            found[at] = _on_host(int(places.address[at]), item, count, chosen)
        elif side_stream(device) is not None:
            far.setdefault(device, []).append((at, item, chosen))
        else:
            found[at] = _far(places.run(at, (count,), item), chosen).cpu().numpy().tobytes()
    for device, of in far.items():
        stream = side_stream(device)
        assert stream is not None, "it had one"
        for first in range(0, len(of), _PIECES_AT_ONCE):
            found |= _gathered(stream, places, of[first : first + _PIECES_AT_ONCE])
    return found


def _gathered(
    stream: SideStream, places: Places, pieces: Sequence[tuple[int, int, NDArray[np.int64]]]
) -> dict[int, bytes]:
    """The same of pieces on one device: position, bytes of an element, and which elements."""
    positions, items = [at for at, _, _ in pieces], np.array([item for _, item, _ in pieces], np.uint32)
    begin = np.concatenate([(chosen * item).astype(np.uint64) for _, item, chosen in pieces])
    lines = stream.gather(
        address=np.repeat(places.address[positions], _ELEMENTS), begin=begin, length=np.repeat(items, _ELEMENTS),
        layout=np.full(len(begin), -1, np.int64), layouts=(),
    )
    stream.wait_current()
    stream.synchronize()
    rows = lines.reshape(len(pieces), _ELEMENTS, _native.GATHERED_ALIGNMENT_BYTES)
    return {at: rows[row, :, :item].tobytes() for row, (at, item, _) in enumerate(pieces)}


def _chosen(count: int) -> NDArray[np.int64]:
    """Spread over all elements, with the first and the last."""
    return np.arange(_ELEMENTS) * (count - 1) // (_ELEMENTS - 1)


def _on_host(address: int, item: int, count: int, chosen: NDArray[np.int64]) -> bytes:
    memory = memoryview((ctypes.c_uint8 * (item * count)).from_address(address))
    elements = np.frombuffer(memory, np.uint8).reshape(count, item)
    found: bytes = elements[chosen].tobytes()
    return found


def _far(memory: Memory, chosen: NDArray[np.int64]) -> torch.Tensor:
    return on_device(memory).reshape(-1)[torch.from_numpy(chosen).to(memory.device)]
