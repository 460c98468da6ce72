"""Functions that ranks run in tests of replicas on a GPU, which all of them use."""

from __future__ import annotations

from acts import outcome
from device_replica_acts import PLACES, opened, replicas

from flowstone.config import Watch


def one_byte_differs(rank: int, path: str, watch: Watch) -> dict[str, str]:
    """Of each tensor one byte is another one on rank 1, for one save; what is told of that save, and of the next."""
    state = {name: tensor.cuda() for name, tensor in replicas(None).items()}  # which keeps strides
    record = {}
    with opened(path, watch) as saver:
        for step, (name, place) in enumerate(PLACES.items()):
            if rank:
                state[name].data[place] ^= 1
            record[name] = str(outcome(saver, 2 * step, {"x": state}))
            if rank:
                state[name].data[place] ^= 1
            record[name] += f" / {outcome(saver, 2 * step + 1, {'x': state})}"
    return record
