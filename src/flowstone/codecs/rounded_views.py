"""Refuses rules (Quantize) that round one of several tensors that share memory: after rounding, no load could restore
all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flowstone.config import PACKED_BELOW_BYTES
from flowstone.errors import UnsupportedStateError
from flowstone.format.codec import QUANTIZED_ELEMENTS
from flowstone.stage.overlap import LoadTargets, find_overlap_groups
from flowstone.stage.shared_memory import find_sharing_groups, share_bytes
from flowstone.state.memory import overlaps_itself
from flowstone.table.pieces import TensorColumns

if TYPE_CHECKING:
    from flowstone.codecs.quantize import Quantize
    from flowstone.state import StateDescription


class _UnsavedRows:
    """A table of tensors that are not saved yet. So no tensor is known to be equal to another one."""

    def __init__(self, tensors: TensorColumns) -> None:
        self.tensors = tensors

    def rows(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self.tensors.names)}

    def same_bytes(self, row: int, other: int) -> bool:
        return row == other

    def equal(self, row: int, other: int) -> bool:
        return row == other


def refuse_rounded_views(rules: Sequence[Quantize], described: StateDescription) -> None:
    """Raise UnsupportedStateError for a tensor that a rule rounds if another tensor shares its memory."""
    pieces = described.layout.pieces
    targets = LoadTargets(pieces, described.places, _UnsavedRows(pieces.tensors), range(len(pieces)))
    for group in find_sharing_groups(targets, find_overlap_groups(targets)):
        memory = {row: targets.memory(row) for row in group}
        for row in group:
            piece = pieces[row]
            is_rounded = piece.dtype.name in QUANTIZED_ELEMENTS and piece.bytes >= PACKED_BELOW_BYTES
            rule = next((candidate for candidate in rules if candidate.matches(piece.name)), None)
            others = (other for other in group if other != row and share_bytes(memory[row], memory[other]))
            other = next(others, row if overlaps_itself(memory[row]) else None)
            if is_rounded and rule is not None and other is not None:
                raise UnsupportedStateError(
                    f"{rule} rounds {piece.name!r}, which shares memory with {pieces.names[other]!r}",
                    next="leave one of the two tensors out of the state, or both out of the rule: a load could not "
                    "restore both",
                )
