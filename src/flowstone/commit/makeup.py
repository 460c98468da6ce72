"""How a checkpoint is made up: what each section has written, what it refers to, and how that is coded.

From the manifest and the index alone: no data is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.format.codec import CAST, CODECS
from flowstone.format.index import Index
from flowstone.format.manifest import Manifest
from flowstone.table.chunks import CODEC_XOR, Chunks, distinct


class SectionMakeup(msgspec.Struct, frozen=True):
    """What a section's tensors are made up of. Bytes are of their chunks as stored, without padding and headers.

    section      its name; of what each rank has of its own, `section@rank`
    tensors      how many; tied ones count once
    bytes        of the tensors
    written      bytes that the checkpoint's own save has written
    referred     bytes in files of earlier saves, by the identity of the checkpoint that wrote them
    derived      bytes of which nothing is stored: equal to, or rounded from, what other tensors have
    codecs       bytes by codec, written and referred
    coded        bytes of the tensors that these are of, by codec: without what is derived
    decoded_with bytes of chunks with which others are decoded (codec xor), each counted once, by the identity of the
                 checkpoint that wrote them
    """

    section: str
    tensors: int
    bytes: int
    written: int
    referred: Mapping[str, int]
    derived: int
    codecs: Mapping[str, int]
    coded: Mapping[str, int]
    decoded_with: Mapping[str, int] = {}

    @property
    def stored(self) -> int:
        """Bytes as stored, written and referred."""
        return self.written + sum(self.referred.values())

    @property
    def ratio(self) -> float:
        """Bytes of the tensors per stored byte; 1 where nothing is coded, or nothing stored."""
        return self.bytes / self.stored if self.stored else 1.0

    @property
    def ratios(self) -> Mapping[str, float]:
        """The same by codec."""
        return {codec: self.coded[codec] / size for codec, size in self.codecs.items()}


def sections_of(manifest: Manifest, index: Index, names: Collection[str]) -> tuple[SectionMakeup, ...]:
    """The makeup of each section that has tensors, in stored order. `names`: of the state's sections."""
    chunks, pieces = index.chunks, index.pieces
    found = {name: _section(name, names) for name in index.tensors.names}
    order = {section: at for at, section in enumerate(dict.fromkeys(found.values()))}
    of_tensor = np.array([order[section] for section in found.values()], np.int64)
    of_piece = of_tensor[pieces.tensor]
    numbers = np.arange(int(chunks.first[-1]))
    holder, within = chunks.locate(numbers)
    segment, _ = chunks.stored_at(holder, within)
    codec, section = chunks.codecs(), of_piece[holder]
    is_derived = (codec == CAST.id) | _repeats(chunks)
    length = np.where(is_derived, 0, chunks.stored_lengths())
    data_bytes = chunks.logical_bytes(holder, within, within + 1)
    homes = [row.home for row in manifest.segments]
    kinds = list(dict.fromkeys(homes))
    home = np.array([kinds.index(one) for one in homes], np.int64)[segment]
    by_home = {
        (at, kind): int(length[(section == at) & (home == number)].sum())
        for at in order.values() for number, kind in enumerate(kinds)
    }
    lengths, near = np.bincount(of_piece, chunks.length, len(order)), _decoded_with(manifest, chunks, section)
    counts = np.bincount(of_tensor, minlength=len(order))
    return tuple(
        SectionMakeup(
            name, int(counts[at]), int(lengths[at]), by_home.get((at, None), 0),
            {kind: size for kind in kinds if kind is not None and (size := by_home[at, kind])},
            int(data_bytes[(section == at) & is_derived].sum()),
            *_by_codec(codec, section == at, length, np.where(is_derived, 0, data_bytes)),
            near.get(at, {}),
        )
        for name, at in order.items()
    )


def _by_codec(
    codec: NDArray[np.uint8], here: NDArray[np.bool_], stored: NDArray[np.integer], data: NDArray[np.integer]
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Sums of the chunks' lengths by codec, of those that are `here`. Codecs with nothing stored are left out."""
    found: tuple[dict[str, int], dict[str, int]] = {}, {}
    for one in distinct(codec[here]).tolist():
        name, chosen = CODECS[one].name if one in CODECS else f"codec {one}", here & (codec == one)
        if size := int(stored[chosen].sum()):
            found[0][name], found[1][name] = size, int(data[chosen].sum())
    return found


def _decoded_with(manifest: Manifest, chunks: Chunks, section: NDArray[np.int64]) -> Mapping[int, Mapping[str, int]]:
    """For each section by its number: the bytes of its chunks' bases, by who wrote them. `section`: of each chunk."""
    found: dict[int, dict[str, int]] = {}
    if chunks.stored is None or chunks.stored.bases is None:
        return found
    near = np.flatnonzero(chunks.stored.codec == CODEC_XOR)
    bases = chunks.stored.bases.of(near)
    columns = section[near], bases.segment, bases.offset, bases.length
    for at, segment, _, length in sorted(set(zip(*(column.tolist() for column in columns), strict=True))):
        home = manifest.segments[segment].home or manifest.id
        by_home = found.setdefault(at, {})
        by_home[home] = by_home.get(home, 0) + length
    return found


def _repeats(chunks: Chunks) -> NDArray[np.bool_]:
    """Which chunks have the place of one before them."""
    found = np.zeros(int(chunks.first[-1]), np.bool_)
    if chunks.stored is not None:
        order = np.lexsort((chunks.stored.offset, chunks.stored.segment))
        places = np.stack([chunks.stored.segment[order].astype(np.uint64), chunks.stored.offset[order]])
        found[order[1:]] = (places[:, 1:] == places[:, :-1]).all(axis=0)
    return found


def _section(name: str, sections: Collection[str]) -> str:
    """The section of a tensor: the longest that its name begins with; of a rank's own, with the rank."""
    known = [one for one in sections if name == one or name.startswith((f"{one}.", f"{one}@"))]
    if not known:
        return name.partition(".")[0]
    longest = max(known, key=len)
    return longest + name[len(longest) :].partition(".")[0]
