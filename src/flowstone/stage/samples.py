"""Samples: a few lines of each of many pieces, as they are at one moment, and their digests.

Equal pieces have equal samples, on any device. Host memory is read at once, in one batch; a device gathers samples in
its current stream, and only reading the digests waits for that.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.stage.capture import within_reach
from flowstone.stage.device import SideStream
from flowstone.table.pieces import Places


class Samples(msgspec.Struct, frozen=True, eq=False):
    """Samples of pieces, in the order of the request.

    host    digests of pieces in host memory
    far     rows of pieces on devices, whose lines are available once the streams have gathered them
    device  for each piece, whether it is on a device
    """

    host: NDArray[np.uint64]
    far: _native.WriteExtents | None
    lines: tuple[NDArray[np.uint8], ...]
    streams: tuple[SideStream, ...]
    device: NDArray[np.bool_]

    def digests(self) -> NDArray[np.uint16]:
        """The digests. Blocks until the devices have gathered their samples. Any thread.

        raises  StorageError  a device has failed
        """
        found = np.zeros(len(self.device), np.uint64)
        found[~self.device] = self.host
        if self.far is not None:
            for stream in self.streams:
                stream.synchronize()
            found[self.device] = self.far.sample_digests()
        return found.astype(np.uint16)


def take_samples(places: Places, rows: NDArray[np.int64], lengths: NDArray[np.uint64], *, seed: int) -> Samples:
    """Sample the pieces at `rows` of `places`. `lengths`: of those pieces, in bytes.

    seed    chooses the lines: the same for all ranks that compare, different for each comparison
    raises  OSError  memory is gone
    """
    reach = within_reach(_some(places, rows), lengths)
    is_far = reach.device >= 0
    samples = []
    for at, stream in enumerate(reach.streams):
        from flowstone.stage.gather import sample  # imported here: most processes have no GPU

        mine = np.flatnonzero(reach.device == at)
        samples.append(sample(reach, stream, mine, lengths[mine], np.full(len(mine), seed, np.uint64)))
        stream.wait_current()

    def batch(chosen: NDArray[np.bool_]) -> _native.WriteExtents:
        count = int(chosen.sum())
        far = bool(reach.device[chosen].max(initial=-1) >= 0)
        return _native.WriteExtents(
            file=np.zeros(count, np.uint32), offset=np.zeros(count, np.uint64), length=lengths[chosen],
            address=reach.address[chosen], chunk=np.full(count, _native.NO_DIGEST, np.uint64),
            layout=reach.layout[chosen], layouts=reach.layouts, chunks=0, lazy=np.ones(count, np.bool_),
            device=reach.device[chosen], devices=[stream.native for stream in reach.streams] if far else [],
            samples=samples if far else [], seed=np.full(count, seed, np.uint64),
        )

    host = batch(~is_far).sample_digests()  # `reach` keeps copies alive until here
    return Samples(host, batch(is_far) if reach.streams else None, tuple(samples), reach.streams, is_far)


def _some(places: Places, rows: NDArray[np.int64]) -> Places:
    if places.apart or places.devices:
        return places.take(rows.tolist())
    return Places(places.address[rows], {}, ())
