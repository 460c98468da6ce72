"""Refuses rules (Quantize) that round one of several tensors that share memory: no load could restore both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flowstone.config import PACKED_BELOW_BYTES
from flowstone.errors import UnsupportedStateError
from flowstone.format.codec import QUANTIZED_ELEMENTS
from flowstone.stage.overlap import LoadTargets, candidates
from flowstone.stage.shared_memory import share_bytes, sharing
from flowstone.state.tensors import overlaps_itself
from flowstone.table.pieces import TensorColumns

if TYPE_CHECKING:
    from flowstone.quantize import Quantize
    from flowstone.state import Described


class _Unsaved:
    """A table of tensors that are not saved yet: nothing is known to be equal."""

    def __init__(self, tensors: TensorColumns) -> None:
        self.tensors = tensors

    def rows(self) -> dict[str, int]:
        return {name: at for at, name in enumerate(self.tensors.names)}

    def same_bytes(self, one: int, other: int) -> bool:
        return one == other

    def equal(self, one: int, other: int) -> bool:
        return one == other


def refuse_rounded_views(rules: Sequence[Quantize], described: Described) -> None:
    """Raise UnsupportedStateError for a tensor that a rule rounds while another one has a part of its memory."""
    pieces = described.layout.pieces
    targets = LoadTargets(pieces, described.places, _Unsaved(pieces.tensors), range(len(pieces)))
    for group in sharing(targets, candidates(targets)):
        memory = {at: targets.memory(at) for at in group}
        for at in group:
            piece = pieces[at]
            is_rounded = piece.dtype.name in QUANTIZED_ELEMENTS and piece.bytes >= PACKED_BELOW_BYTES
            rule = next((one for one in rules if one.matches(piece.name)), None)
            others = (one for one in group if one != at and share_bytes(memory[at], memory[one]))
            other = next(others, at if overlaps_itself(memory[at]) else None)
            if is_rounded and rule is not None and other is not None:
                raise UnsupportedStateError(
                    f"{rule} rounds {piece.name!r}, which shares memory with {pieces.names[other]!r}",
                    next="leave one of them out of the state, or both out of the rule: a load could not restore both",
                )
