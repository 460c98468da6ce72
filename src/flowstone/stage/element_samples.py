"""A few elements of each of some pieces, as bytes: which pieces are worth comparing, before a byte is written."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from flowstone.stage.capture import on_device
from flowstone.table.pieces import Memory, Places

_ELEMENTS = 32  # of a piece: of random weights in 16 bits, no two pieces have the same


def element_samples(places: Places, positions: Sequence[int], items: Sequence[int], counts: Sequence[int]) -> dict[
    int, bytes
]:
    """The bytes of elements at the same numbers in all pieces of one length, in row-major order; by position.

    items   length of an element, in bytes
    counts  number of elements
    Pieces that are not one run of bytes are left out. Waits for the current stream of devices.
    """
    found: dict[int, bytes] = {}
    far: dict[tuple[str, int], list[tuple[int, torch.Tensor]]] = {}
    for at, item, count in zip(positions, items, counts, strict=True):
        device, chosen = places.device_of(at), _chosen(count)
        if at in places.apart:
            continue
        if device == "cpu":
            found[at] = _on_host(int(places.address[at]), item, count, chosen)
        else:
            far.setdefault((device, item), []).append((at, _far(places.run(at, (count,), item), chosen)))
    for of in far.values():
        rows = torch.stack([sample for _, sample in of]).cpu()
        for (at, _), row in zip(of, rows, strict=True):
            found[at] = row.numpy().tobytes()
    return found


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
