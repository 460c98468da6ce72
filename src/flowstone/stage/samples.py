"""Samples: digests of a few cache lines of each of many pieces, taken at one moment.

Equal pieces have equal samples, on the host and on any device. Host memory is read immediately, in one batch. A device
gathers samples in its current stream, and only `wait_digests` waits for that.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone._native import NO_DIGEST, WriteExtents
from flowstone.stage.capture import resolve_device_memory
from flowstone.stage.device import SideStream
from flowstone.table.pieces import Places


class Samples(msgspec.Struct, frozen=True, eq=False):
    """Samples of pieces, in the order of the request.

    host    digests of the pieces in host memory
    far     lines of the pieces on devices; they can be read once the devices' streams have gathered them
    device  for each piece, whether it is on a device
    """

    host: NDArray[np.uint64]
    far: WriteExtents | None
    lines: tuple[NDArray[np.uint8], ...]
    streams: tuple[SideStream, ...]
    device: NDArray[np.bool_]

    def wait_digests(self) -> NDArray[np.uint16]:
        """The digests. Blocks until the devices have gathered their samples. Can be called on any thread.

        raises  StorageError  a device has failed
        """
        digests = np.zeros(len(self.device), np.uint64)
        digests[~self.device] = self.host
        if self.far is not None:
            for stream in self.streams:
                stream.synchronize()
            digests[self.device] = self.far.sample_digests()
        return digests.astype(np.uint16)


def take_samples(places: Places, rows: NDArray[np.int64], lengths: NDArray[np.uint64], *, seed: int) -> Samples:
    """Sample the pieces at `rows` of `places`. `lengths`: lengths of these pieces, in bytes.

    seed    selects the lines; must be equal on all ranks that compare, and different for each comparison
    raises  OSError  memory was freed
    """
    reach = resolve_device_memory(_some(places, rows), lengths)
    is_far = reach.device >= 0
    samples = []
    for number, stream in enumerate(reach.streams):
        from flowstone.stage.gather import sample  # imported here: most processes have no GPU

        mine = np.flatnonzero(reach.device == number)
        samples.append(sample(reach, stream, mine, lengths[mine], np.full(len(mine), seed, np.uint64)))
        stream.wait_current()

    def batch(chosen: NDArray[np.bool_]) -> WriteExtents:
        count = int(chosen.sum())
        far = bool(reach.device[chosen].max(initial=-1) >= 0)
        rows = WriteExtents(
            file=np.zeros(count, np.uint32), offset=np.zeros(count, np.uint64), length=lengths[chosen],
            address=reach.address[chosen], chunk=np.full(count, NO_DIGEST, np.uint64),
            layout=reach.layout[chosen], layouts=reach.layouts, chunks=0,
        )
        rows.mark_lazy(np.ones(count, np.bool_), np.full(count, seed, np.uint64))
        if far:
            streams = [stream.native for stream in reach.streams]
            rows.place_on_devices(reach.device[chosen], streams, samples=samples)
        return rows

    host = batch(~is_far).sample_digests()  # `reach` keeps its copies alive until here
    return Samples(host, batch(is_far) if reach.streams else None, tuple(samples), reach.streams, is_far)


def _some(places: Places, rows: NDArray[np.int64]) -> Places:
    if places.strided or places.devices:
        return places.take(rows.tolist())
    return Places(places.address[rows], {}, ())
