"""What is known of a state at the step that the next record of a journal begins from."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone._native import xxh3_64
from flowstone.config import JOURNAL_VALUE_BYTES_MAX
from flowstone.stage.journal_frames import Source, bytes_at
from flowstone.state import Described
from flowstone.state.compressed import CompressedGradients
from flowstone.table.pieces import Layout


class Known(msgspec.Struct):
    """One state.

    layout    of the state; the next step must have the same
    proven    positions of the pieces that the optimizers' steps explain
    others    positions of the pieces that they do not explain, and may change
    digests   of these, and of sections, as they were last written
    options   of each optimizer, as they were last written
    sources   of compressed gradients, by section
    """

    layout: Layout
    proven: NDArray[np.int64]
    others: NDArray[np.int64]
    digests: dict[str, int]
    options: dict[int, tuple[msgspec.Raw, ...]]
    sources: dict[str, CompressedGradients]

    @property
    def unlogged(self) -> tuple[str, ...]:
        """Sections whose tensors and objects no step has: they do not follow from compressed gradients."""
        return tuple(section for section, source in self.sources.items() if not source.exact)

    def changed_values(self, described: Described) -> tuple[dict[str, Source], str]:
        """Copies of what no optimizer explains, and has changed; and why that cannot be logged."""
        places, pieces, total = described.places, described.pieces, 0
        found: dict[str, Source] = {}
        lengths = pieces.lengths()
        for at in self.others.tolist():
            length, piece = int(lengths[at]), pieces[at]
            view = bytes_at(int(places.address[at]), length)
            digest = xxh3_64(view)
            if self.digests.get(piece.name) == digest:
                continue
            total += length
            if total > JOURNAL_VALUE_BYTES_MAX:
                return {}, f"'{piece.name}' has changed, which no optimizer explains, and is too large for the journal"
            self.digests[piece.name] = digest
            copy = Source.of_bytes(bytes(view))
            found[piece.name] = msgspec.structs.replace(copy, dtype=piece.dtype.name, shape=piece.box.shape)
        return found, ""

    def changed_sections(self, texts: Mapping[str, bytes]) -> dict[str, bytes]:
        """The sections whose objects have changed."""
        changed = {}
        for section, text in texts.items():
            if section in self.unlogged:
                continue
            digest, name = xxh3_64(text), f"{section}\0"
            if self.digests.get(name) != digest:
                self.digests[name] = digest
                changed[section] = text
        return changed
