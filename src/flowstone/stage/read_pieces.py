"""Read the stored bytes of some pieces into given memory, and verify them, without the rest of a load."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from flowstone.stage.arena import open_read_arena
from flowstone.stage.bounce import choose_destinations
from flowstone.stage.scatter import ReadSource, raise_damage, scatter
from flowstone.table.pieces import Pieces, Places


def read_pieces(
    source: ReadSource, pieces: Pieces, places: Places, rows: Sequence[int], *, into_state: bool = True
) -> None:
    """Read `pieces` into the memory `places`, on the host or on devices. Returns when all is read.

    rows        for each piece, the index row of its tensor
    into_state  whether errors name the pieces whose memory has changed

    raises      DamagedError, StorageError, CoverageError, BudgetError
    """
    destinations = choose_destinations(source.index, pieces, places, rows, verify_first=False)
    for stream in destinations.streams.values():
        stream.wait_current()
    arena = open_read_arena(source.store, destinations.device)
    try:
        done = destinations.run(source.index, lambda _, fill: scatter(source.store, source.paths, fill, arena))
    finally:
        arena.close()
    if not into_state:
        done = replace(done, written=())
    raise_damage(done, source.index, destinations.pieces, source.paths, f"cannot load {source.location}")
