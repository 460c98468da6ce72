"""Read the stored bytes of some pieces into memory, verified: a load without a state around it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from flowstone.stage.arena import open_read_arena
from flowstone.stage.bounce import choose_destinations
from flowstone.stage.scatter import Source, raise_damage, scatter
from flowstone.table.pieces import Pieces, Places


def read_pieces(
    source: Source, pieces: Pieces, places: Places, rows: Sequence[int], *, into_state: bool = True
) -> None:
    """Fill the places, on the host or on devices. Blocks.

    rows        of the index, parallel
    into_state  whether errors name the pieces whose memory has changed

    raises      DamagedError, StorageError, CoverageError, BudgetError
    """
    found = choose_destinations(source.index, pieces, places, rows, verify_first=False)
    for stream in found.streams.values():
        stream.wait_current()
    arena = open_read_arena(source.store, found.device)
    try:
        done = found.run(source.index, lambda _, fill: scatter(source.store, source.paths, fill, arena))
    finally:
        arena.close()
    if not into_state:
        done = replace(done, written=())
    raise_damage(done, source.index, found.wanted, source.paths, f"cannot load {source.location}")
