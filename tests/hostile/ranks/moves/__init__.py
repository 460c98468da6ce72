"""Every move that the ranks of a hostile job may make, in one table."""

from __future__ import annotations

from hostile.ranks.moves import apart, ends, surgery, verbs
from hostile.ranks.moves.move import BROKEN, Ending, Move

MOVES: dict[str, Move] = {
    move.name: move for module in (verbs, apart, surgery, ends) for move in module.TABLE.values()
}

__all__ = ["BROKEN", "MOVES", "Ending", "Move"]
