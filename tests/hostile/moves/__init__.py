"""Every move that a hostile loop may make, in one table."""

from __future__ import annotations

from hostile.moves import around, flows, memory, recipes, surgery, verbs
from hostile.moves.move import BROKEN, Detection, Effect, Move

MOVES: dict[str, Move] = {
    move.name: move for module in (verbs, surgery, memory, recipes, around, flows) for move in module.TABLE.values()
}

__all__ = ["BROKEN", "MOVES", "Detection", "Effect", "Move"]
