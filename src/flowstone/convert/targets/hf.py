"""A directory of safetensors files for Hugging Face as a target: the files (shards), their index, and the model's
documents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from flowstone.convert.layout import Extent, Output, TargetFile, TargetLayout
from flowstone.convert.sources.safetensors import encode_index
from flowstone.errors import UnsupportedFormatError
from flowstone.format.documents import SHARD_INDEX_SUFFIX
from flowstone.format.segment import LENGTH_BYTES, METADATA_KEY, is_reserved

_METADATA = {"format": "pt"}
_ALIGNMENT = 8  # alignment of the data, as in the format's own writer


def lay_out_hf(outputs: Sequence[Output], shard_bytes: int) -> tuple[TargetLayout, Mapping[str, bytes]]:
    """The layout of the files, and their index if there are several. A file has at most `shard_bytes`, unless it has a
    single tensor.

    raises  UnsupportedFormatError  safetensors lacks the type of a tensor; the error names the tensors
    """
    lacking = [output for output in outputs if output.dtype.as_bytes]
    strange = [output for output in outputs if is_reserved(output.name)]
    if lacking or strange:
        raise UnsupportedFormatError(
            f"safetensors cannot store {len(lacking) + len(strange)} of the tensors",
            found=", ".join(f"{output.name} ({output.dtype.name})" for output in (*lacking, *strange)[:5]),
            next="leave them out with --skip PATTERN, or export with --to torch",
        )
    shards = _split(outputs, shard_bytes)
    count = len(shards)
    names = ["model.safetensors"] if count == 1 else [
        f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
    ]
    files = tuple(_file(name, outputs, shard) for name, shard in zip(names, shards, strict=True))
    layout = TargetLayout(tuple(outputs), files)
    if count == 1:
        return layout, {}
    weight_map = {outputs[position].name: name for name, shard in zip(names, shards, strict=True) for position in shard}
    total = sum(output.bytes for output in outputs)
    return layout, {f"model{SHARD_INDEX_SUFFIX}": encode_index(weight_map, total)}


def _split(outputs: Sequence[Output], shard_bytes: int) -> list[list[int]]:
    """Divide the outputs, in order, into shards (files): the positions of the outputs in each. There is at least one
    shard.
    """
    shards: list[list[int]] = [[]]
    taken = 0
    for position, output in enumerate(outputs):
        if shards[-1] and taken + output.bytes > shard_bytes:
            shards.append([])
            taken = 0
        shards[-1].append(position)
        taken += output.bytes
    return shards


def _file(name: str, outputs: Sequence[Output], shard: Sequence[int]) -> TargetFile:
    """The layout of one file. Tensors with the largest element type come first, so that all tensors are aligned."""
    order = sorted(shard, key=lambda position: -outputs[position].dtype.item_bytes)
    entries: dict[str, object] = {METADATA_KEY: _METADATA}
    places, offset = [], 0
    for position in order:
        output = outputs[position]
        end = offset + output.bytes
        entries[output.name] = {
            "dtype": output.dtype.stored, "shape": list(output.tensor.shape), "data_offsets": [offset, end]
        }
        places.append((offset, output.bytes, position))
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % _ALIGNMENT)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    extents = [Extent(0, len(header), literal=header)]
    extents += [Extent(len(header) + begin, length, output=position) for begin, length, position in places]
    return TargetFile(name, len(header) + offset, tuple(extents))
