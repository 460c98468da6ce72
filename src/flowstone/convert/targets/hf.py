"""A directory of safetensors files as Hugging Face reads it: shards, their index, and the model's documents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from flowstone.convert.layout import Extent, Layout, Output, TargetFile
from flowstone.convert.sources.safetensors import encode_index
from flowstone.errors import UnsupportedFormatError
from flowstone.format.documents import SHARD_INDEX_SUFFIX
from flowstone.format.segment import LENGTH_BYTES, METADATA_KEY, reserved

_METADATA = {"format": "pt"}
_ALIGNMENT = 8  # of the data, as the format's own writer has it


def lay_out_hf(outputs: Sequence[Output], shard_bytes: int) -> tuple[Layout, Mapping[str, bytes]]:
    """The files, and the index if there are several. A shard has at most `shard_bytes` of tensors, or one tensor.

    raises  UnsupportedFormatError naming the tensors whose type safetensors lacks
    """
    lacking = [output for output in outputs if output.dtype.as_bytes]
    strange = [output for output in outputs if reserved(output.name)]
    if lacking or strange:
        raise UnsupportedFormatError(
            f"safetensors cannot hold {len(lacking) + len(strange)} of the tensors",
            found=", ".join(f"{one.name} ({one.dtype.name})" for one in (*lacking, *strange)[:5]),
            next="leave them out with --skip PATTERN, or export with --to torch",
        )
    shards = _split(outputs, shard_bytes)
    count = len(shards)
    names = ["model.safetensors"] if count == 1 else [
        f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
    ]
    files = tuple(_file(name, outputs, shard) for name, shard in zip(names, shards, strict=True))
    layout = Layout(tuple(outputs), files)
    if count == 1:
        return layout, {}
    weight_map = {outputs[at].name: name for name, shard in zip(names, shards, strict=True) for at in shard}
    total = sum(output.bytes for output in outputs)
    return layout, {f"model{SHARD_INDEX_SUFFIX}": encode_index(weight_map, total)}


def _split(outputs: Sequence[Output], shard_bytes: int) -> list[list[int]]:
    """Positions of outputs, in order, for each shard; at least one shard."""
    shards: list[list[int]] = [[]]
    taken = 0
    for at, output in enumerate(outputs):
        if shards[-1] and taken + output.bytes > shard_bytes:
            shards.append([])
            taken = 0
        shards[-1].append(at)
        taken += output.bytes
    return shards


def _file(name: str, outputs: Sequence[Output], shard: Sequence[int]) -> TargetFile:
    """One file. The largest element type first, so that each tensor lies aligned to its own."""
    order = sorted(shard, key=lambda at: -outputs[at].dtype.item_bytes)
    entries: dict[str, object] = {METADATA_KEY: _METADATA}
    places, at = [], 0
    for position in order:
        output = outputs[position]
        entries[output.name] = {
            "dtype": output.dtype.stored, "shape": list(output.tensor.shape), "data_offsets": [at, at + output.bytes]
        }
        places.append((at, output.bytes, position))
        at += output.bytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % _ALIGNMENT)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    extents = [Extent(0, len(header), literal=header)]
    extents += [Extent(len(header) + begin, length, output=position) for begin, length, position in places]
    return TargetFile(name, len(header) + at, tuple(extents))
