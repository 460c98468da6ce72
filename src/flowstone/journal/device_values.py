"""Read, at each journaled save, the values of small device tensors that no optimizer updates (such as buffers).

One kernel for each device gathers the values in its current stream, after the last step and before any later one, so
`save` does not wait. The journal's thread reads the gathered values, and logs those that have changed. Imported only
if a device is in use.
"""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone._native import xxh3_64
from flowstone.journal.journal_frames import FrameTensor, bytes_at
from flowstone.stage.capture import resolve_device_memory
from flowstone.stage.device import SideStream
from flowstone.stage.gather import gather_whole
from flowstone.table.pieces import Pieces, Places


class _GatherPart(msgspec.Struct, frozen=True, eq=False):
    """The tensors that one device gathers. `begins`: the address of each copy. `stream`: None for the host."""

    stream: SideStream | None
    rows: NDArray[np.int64]
    begins: NDArray[np.uint64]
    owner: object


class ValueGather(msgspec.Struct, frozen=True, eq=False):
    """The values of small device tensors for one save, while the devices gather them."""

    pieces: Pieces
    rows: NDArray[np.int64]
    lengths: NDArray[np.uint64]
    parts: tuple[_GatherPart, ...]

    def read(self) -> dict[str, FrameTensor]:
        """Copies of the values. Blocks until the devices have gathered them.

        raises  OSError  a device has failed
        """
        tensors: dict[str, FrameTensor] = {}
        for part in self.parts:
            if part.stream is not None:
                part.stream.native.synchronize()
            for row, address in zip(part.rows.tolist(), part.begins.tolist(), strict=True):
                piece = self.pieces[int(self.rows[row])]
                copy = FrameTensor.of_bytes(bytes(bytes_at(address, int(self.lengths[row]))))
                tensors[piece.name] = replace(copy, dtype=piece.dtype.name, shape=piece.box.shape)
        return tensors


def gather_values(pieces: Pieces, places: Places, rows: NDArray[np.int64]) -> ValueGather:
    """Start gathering the values of the tensors at the positions `rows` of `pieces`. Called on the thread that saves.

    raises  StateError, StorageError  the errors of `SideStream.gather`
    """
    lengths = pieces.lengths()[rows]
    reach = resolve_device_memory(places.take(rows.tolist()), lengths)
    hosted = np.flatnonzero(reach.device < 0)  # copied by torch, or tensors without bytes
    parts = [_GatherPart(None, hosted, reach.address[hosted], reach)]
    for number, stream in enumerate(reach.streams):
        members = np.flatnonzero(reach.device == number)
        buffer, begins = gather_whole(reach, stream, members, lengths[members])
        stream.wait_current()
        parts.append(_GatherPart(stream, members, begins + np.uint64(buffer.ctypes.data), buffer))
    return ValueGather(pieces, rows, lengths, tuple(parts))


class DeviceValues:
    """Finds device tensors whose values have changed, by digests of the values that the journal has. For one thread at
    a time.

    rows  positions of these tensors among the pieces (parts of tensors) of the state
    """

    def __init__(self, rows: NDArray[np.int64], first: ValueGather) -> None:
        """`first`: the values in the journal's baseline."""
        self.rows, self._first = rows, first
        self._digests: dict[str, int] | None = None

    def changed(self, now: ValueGather) -> dict[str, FrameTensor]:
        """The values that differ from those in the journal; the caller logs them. Blocks, and raises the errors of
        `ValueGather.read`.
        """
        if self._digests is None:
            self._digests = _digests(self._first.read())
            del self._first
        values = now.read()
        digests = _digests(values)
        changed = {name: values[name] for name, digest in digests.items() if self._digests.get(name) != digest}
        self._digests = digests
        return changed


def _digests(values: dict[str, FrameTensor]) -> dict[str, int]:
    return {name: xxh3_64(bytes_at(tensor.address, tensor.length_bytes)) for name, tensor in values.items()}
