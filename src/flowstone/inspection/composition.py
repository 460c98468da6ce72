"""What a checkpoint contains: for each section, how many bytes its save wrote, how many are in files of earlier saves,
and with which codecs they are encoded.

Computed from the manifest and the index. No data of tensors is read.
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
    """How the tensors of one section are stored. Bytes count stored chunks, without padding and headers.

    section      name of the section; `section@rank` for the tensors of one rank (fs.PerRank)
    tensors      number of tensors; tied tensors count once
    bytes        length of the tensors before encoding
    written      bytes that the checkpoint's own save wrote
    referred     id of an earlier checkpoint -> bytes of this section that are in files which its save wrote
    derived      bytes of tensors that are not stored, because they are equal to, or rounded from, other tensors
    codecs       for each codec, the stored bytes: those written, and those in files of earlier saves
    coded        for each codec, the length of the same tensors before encoding
    decoded_with id of a checkpoint -> bytes of the base chunks that it wrote, and that are needed to decode differences
                 (codec xor); each base chunk is counted once
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
        """How many bytes are stored: those that this save wrote, and those in files of earlier saves."""
        return self.written + sum(self.referred.values())

    @property
    def ratio(self) -> float:
        """Bytes of the tensors per stored byte, such as 1.2; 1 if nothing is encoded, or nothing is stored."""
        return self.bytes / self.stored if self.stored else 1.0

    @property
    def ratios(self) -> Mapping[str, float]:
        """For each codec, bytes of the tensors per stored byte, such as {"planes": 1.2}."""
        return {codec: self.coded[codec] / size for codec, size in self.codecs.items()}


def sections_of(manifest: Manifest, index: Index, names: Collection[str]) -> tuple[SectionMakeup, ...]:
    """A SectionMakeup for each section that has tensors, in stored order. `names`: the names of the state's sections.
    """
    chunks, pieces = index.chunks, index.pieces
    section_names = {name: _section_of(name, names) for name in index.tensors.names}
    order = {section: position for position, section in enumerate(dict.fromkeys(section_names.values()))}
    of_tensor = np.array([order[section] for section in section_names.values()], np.int64)
    of_piece = of_tensor[pieces.tensor]
    numbers = np.arange(int(chunks.first[-1]))
    holder, within = chunks.locate(numbers)
    segment, _ = chunks.stored_locations(holder, within)
    codec, section = chunks.codecs(), of_piece[holder]
    is_derived = (codec == CAST.id) | _repeats(chunks)
    length = np.where(is_derived, 0, chunks.stored_lengths())
    data_bytes = chunks.logical_bytes(holder, within, within + 1)
    homes = [row.home for row in manifest.segments]
    kinds = list(dict.fromkeys(homes))
    home = np.array([kinds.index(home_id) for home_id in homes], np.int64)[segment]
    by_home = {
        (position, kind): int(length[(section == position) & (home == home_number)].sum())
        for position in order.values() for home_number, kind in enumerate(kinds)
    }
    lengths, near = np.bincount(of_piece, chunks.length, len(order)), _decoded_with(manifest, chunks, section)
    counts = np.bincount(of_tensor, minlength=len(order))
    return tuple(
        SectionMakeup(
            name, int(counts[position]), int(lengths[position]), by_home.get((position, None), 0),
            {kind: size for kind in kinds if kind is not None and (size := by_home[position, kind])},
            int(data_bytes[(section == position) & is_derived].sum()),
            *_by_codec(codec, section == position, length, np.where(is_derived, 0, data_bytes)),
            near.get(position, {}),
        )
        for name, position in order.items()
    )


def _by_codec(
    codec: NDArray[np.uint8], here: NDArray[np.bool_], stored: NDArray[np.integer], data: NDArray[np.integer]
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """For each codec, the sum of the stored lengths, and of the lengths before encoding, of the chunks in `here`.
    Codecs without stored bytes are left out.
    """
    sums: tuple[dict[str, int], dict[str, int]] = {}, {}
    for code in distinct(codec[here]).tolist():
        name, chosen = CODECS[code].name if code in CODECS else f"codec {code}", here & (codec == code)
        if size := int(stored[chosen].sum()):
            sums[0][name], sums[1][name] = size, int(data[chosen].sum())
    return sums


def _decoded_with(manifest: Manifest, chunks: Chunks, section: NDArray[np.int64]) -> Mapping[int, Mapping[str, int]]:
    """How many bytes of base chunks are needed to decode the chunks that are stored as differences. Returns: section
    number -> id of the checkpoint that wrote the base chunks -> their bytes, each base chunk counted once.

    section  the section number of each chunk
    """
    sizes: dict[int, dict[str, int]] = {}
    if chunks.stored is None or chunks.stored.bases is None:
        return sizes
    near = np.flatnonzero(chunks.stored.codec == CODEC_XOR)
    bases = chunks.stored.bases.take(near)
    columns = section[near], bases.segment, bases.offset, bases.length
    for section_number, segment, _, length in sorted(set(zip(*(column.tolist() for column in columns), strict=True))):
        home = manifest.segments[segment].home or manifest.id
        by_home = sizes.setdefault(section_number, {})
        by_home[home] = by_home.get(home, 0) + length
    return sizes


def _repeats(chunks: Chunks) -> NDArray[np.bool_]:
    """For each chunk, whether it is stored at the same place in the same file as an earlier chunk."""
    is_repeat = np.zeros(int(chunks.first[-1]), np.bool_)
    if chunks.stored is not None:
        order = np.lexsort((chunks.stored.offset, chunks.stored.segment))
        places = np.stack([chunks.stored.segment[order].astype(np.uint64), chunks.stored.offset[order]])
        is_repeat[order[1:]] = (places[:, 1:] == places[:, :-1]).all(axis=0)
    return is_repeat


def _section_of(name: str, sections: Collection[str]) -> str:
    """The section of a tensor: the longest section name with which the tensor's name begins. "@rank" is appended if the
    tensor belongs to one rank.
    """
    matching = [prefix for prefix in sections if name == prefix or name.startswith((f"{prefix}.", f"{prefix}@"))]
    if not matching:
        return name.partition(".")[0]
    longest = max(matching, key=len)
    return longest + name[len(longest) :].partition(".")[0]
