"""Small tensors on devices that no optimizer explains: what they are at each save, for a journal.

One kernel for each device gathers them in its current stream, behind the step that was made and before any later one:
`save` waits for nothing. The journal's thread reads them once they are there, and logs those that have changed.
Imported once a device is in use.
"""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone import _native
from flowstone.stage.capture import within_reach
from flowstone.stage.device import SideStream
from flowstone.stage.gather import gather_whole
from flowstone.stage.journal_frames import Source, bytes_at
from flowstone.table.pieces import Pieces, Places


class _Part(msgspec.Struct, frozen=True, eq=False):
    """What one device gathers: which of the tensors, and where the bytes of each begin; None: they are on the host."""

    stream: SideStream | None
    rows: NDArray[np.int64]
    begins: NDArray[np.uint64]
    owner: object


class Gathered(msgspec.Struct, frozen=True, eq=False):
    """These tensors at one save, on their way. `begins` of parts are addresses."""

    pieces: Pieces
    at: NDArray[np.int64]
    lengths: NDArray[np.uint64]
    parts: tuple[_Part, ...]

    def read(self) -> dict[str, Source]:
        """Copies of their bytes. Blocks until the devices have gathered them.

        raises  OSError  a device has failed
        """
        found: dict[str, Source] = {}
        for part in self.parts:
            if part.stream is not None:
                part.stream.native.synchronize()
            for row, address in zip(part.rows.tolist(), part.begins.tolist(), strict=True):
                piece = self.pieces[int(self.at[row])]
                copy = Source.of_bytes(bytes(bytes_at(address, int(self.lengths[row]))))
                found[piece.name] = replace(copy, dtype=piece.dtype.name, shape=piece.box.shape)
        return found


def gather_values(pieces: Pieces, places: Places, at: NDArray[np.int64]) -> Gathered:
    """Have the devices gather the pieces at these positions. Call it on the thread that saves.

    raises  StateError, StorageError  as `SideStream.gather`
    """
    lengths = pieces.lengths()[at]
    reach = within_reach(places.take(at.tolist()), lengths)
    hosted = np.flatnonzero(reach.device < 0)  # copied by torch, or without bytes
    parts = [_Part(None, hosted, reach.address[hosted], reach)]
    for number, stream in enumerate(reach.streams):
        rows = np.flatnonzero(reach.device == number)
        found, begins = gather_whole(reach, stream, rows, lengths[rows])
        stream.wait_current()
        parts.append(_Part(stream, rows, begins + np.uint64(found.ctypes.data), found))
    return Gathered(pieces, at, lengths, tuple(parts))


class FarValues:
    """What a journal has last of these tensors, by digests. One thread at a time.

    at  their positions
    """

    def __init__(self, at: NDArray[np.int64], first: Gathered) -> None:
        """`first`: as they are in the state that the journal begins from."""
        self.at, self._first = at, first
        self._digests: dict[str, int] | None = None

    def changed(self, now: Gathered) -> dict[str, Source]:
        """Those that are not what the journal has; from now on it has them. Blocks, and raises, as `Gathered.read`."""
        if self._digests is None:
            self._digests = _digests(self._first.read())
            del self._first
        values = now.read()
        found = _digests(values)
        changed = {name: values[name] for name, digest in found.items() if self._digests.get(name) != digest}
        self._digests = found
        return changed


def _digests(values: dict[str, Source]) -> dict[str, int]:
    return {name: _native.xxh3_64(bytes_at(one.address, one.length_bytes)) for name, one in values.items()}
