"""Samples: a few lines of each of many pieces, as they are at one moment, and digests of those.

Equal pieces have equal ones, wherever they lie. On the host they are read at once, a batch; a device gathers them on
its current stream, and nobody waits for that before the digests are asked for.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.stage.capture import within_reach
from flowstone.stage.device import SideStream
from flowstone.table.pieces import Memory, Places


class Samples(msgspec.Struct, frozen=True, eq=False):
    """Of pieces, in the order in which they were asked for.

    host    digests of those on the host
    far     rows of those on devices, whose lines are there once the streams have come to them
    device  for each piece, whether it is one of these
    """

    host: NDArray[np.uint64]
    far: _native.WriteExtents | None
    lines: tuple[NDArray[np.uint8], ...]
    streams: tuple[SideStream, ...]
    device: NDArray[np.bool_]

    def digests(self) -> NDArray[np.uint16]:
        """Blocks until the devices have gathered theirs. Any thread."""
        found = np.zeros(len(self.device), np.uint64)
        found[~self.device] = self.host
        if self.far is not None:
            for stream in self.streams:
                stream.native.synchronize()
            found[self.device] = self.far.sample_digests()
        return found.astype(np.uint16)


def take_samples(places: Places, rows: NDArray[np.int64], lengths: NDArray[np.uint64], *, seed: int) -> Samples:
    """Sample the pieces at `rows` of what lies at `places`. `lengths`: theirs, in bytes.

    seed    by it the lines lie where they do: the same for whoever compares, and another one each time that they do
    raises  OSError  memory is not there any more
    """
    address, layout, layouts, device, streams, hosted = within_reach(
        _some(places, rows), fetched_bytes_min=_native.LINE_BYTES
    )
    is_far = device >= 0
    samples = []
    for at, stream in enumerate(streams):
        mine = [places.apart[row] for row in rows[device == at].tolist()]
        samples.append(stream.sample(mine, np.full(len(mine), seed, np.uint64)))
        stream.wait_current()

    def batch(chosen: NDArray[np.bool_]) -> _native.WriteExtents:
        count = int(chosen.sum())
        far = bool(device[chosen].max(initial=-1) >= 0)
        return _native.WriteExtents(
            file=np.zeros(count, np.uint32), offset=np.zeros(count, np.uint64), length=lengths[chosen],
            address=address[chosen], chunk=np.full(count, _native.NO_DIGEST, np.uint64), layout=layout[chosen],
            layouts=layouts, chunks=0, lazy=np.ones(count, np.bool_), device=device[chosen],
            devices=[stream.native for stream in streams] if far else [], samples=samples if far else [],
            seed=np.full(count, seed, np.uint64),
        )

    host = batch(~is_far).sample_digests()
    del hosted  # kept until here
    return Samples(host, batch(is_far) if streams else None, tuple(samples), streams, is_far)


def _some(places: Places, rows: NDArray[np.int64]) -> Places:
    if not places.apart:
        return Places(places.address[rows], {}, ())
    apart: dict[int, Memory] = {}
    for new, old in enumerate(rows.tolist()):
        memory = places.apart.get(old)
        if memory is not None:
            apart[new] = memory
    return Places(places.address[rows], apart, ())
