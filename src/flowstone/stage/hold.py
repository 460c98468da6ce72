"""Hold: copies of what must not wait, where nobody knows yet who writes it."""

from __future__ import annotations

from collections.abc import Sequence

from flowstone.pieces import Pieces, Places
from flowstone.stage.capture import host_copy
from flowstone.stage.landing import host_array


def hold(pieces: Pieces, places: Places, early: Sequence[int]) -> Places:
    """The same places, but for the pieces at `early`: those are copied, and lie in memory of ours."""
    address, apart, owners = places.address.copy(), dict(places.apart), list(places.owners)
    for at in early:
        memory = places.memory(at, pieces[at])
        if memory.device != "cpu":
            copied = host_copy(memory)
            address[at], owners[at] = copied.address, copied.owner
        else:
            array = host_array(memory).copy(order="C")
            address[at], owners[at] = array.ctypes.data, array
        apart.pop(at, None)
    return Places(address, apart, owners)
