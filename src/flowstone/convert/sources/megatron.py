"""A distributed checkpoint of Megatron-core (torch_dist) as a source: files of DCP, and a file with the state that is
common to all ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import msgspec

from flowstone.config import MIB
from flowstone.convert.fetch import linear_boxes
from flowstone.convert.source import SourceCheckpoint, check_source, in_file_order, open_plain
from flowstone.convert.sources.dcp import (
    METADATA_NAME,
    OBJECT_SHARD,
    TENSOR_KIND,
    DcpMetadata,
    contradiction,
    put_at_keys,
    read_metadata,
    stored_tensor,
)
from flowstone.convert.sources.pickled_files import PickledFiles
from flowstone.convert.sources.restricted_unpickler import KnownFunctions, PickledInstance
from flowstone.convert.sources.torch_values import KNOWN, size_of
from flowstone.convert.sources.tree import PickleTree, check_sections
from flowstone.errors import DamagedError, UnsupportedFormatError
from flowstone.format.objects import TensorRef
from flowstone.store.os_errors import translated
from flowstone.table.box import Box
from flowstone.table.stored import SourceTensor, StoredBox

_CONFIG_NAME = "metadata.json"
_COMMON_NAME = "common.pt"
_LATEST_NAME = "latest_checkpointed_iteration.txt"
_BACKENDS = ("torch_dist", 1, "torch", 1)
_FLATTENED = "nd_reformulated_orig_global_shape"


def _enum_value(value: object) -> object:
    if not isinstance(value, int | str):
        raise ValueError("the value of an enumeration is neither a number nor a string")
    return value


_KNOWN: KnownFunctions = {
    **KNOWN, "signal.Signals": _enum_value,
    **{f"megatron.core.{name}": _enum_value for name in (
        "enums.ModelType", "enums.Fp8Recipe", "enums.Fp4Recipe", "transformer.enums.ModelType",
        "transformer.enums.LayerType", "transformer.enums.AttnType", "transformer.enums.AttnMaskType",
        "transformer.enums.AttnBackend", "transformer.enums.CudaGraphScope",
    )},
}


def _fields(value: PickledInstance) -> object:
    return value.state if isinstance(value.state, dict) else value


def _content(value: PickledInstance) -> object:
    """The bytes in a pickled BytesIO, whose state is (bytes, position, attributes)."""
    content = value.state[0] if isinstance(value.state, tuple) and value.state else value
    return content if isinstance(content, bytes) else value


_REPLACED_RECORDS: Mapping[str, Callable[[PickledInstance], object]] = {
    "argparse.Namespace": _fields, "_io.BytesIO": _content
}


class _Config(msgspec.Struct, frozen=True):
    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


def is_megatron(path: Path) -> bool:
    """Whether a directory is a distributed checkpoint of Megatron-core, or has a file that names the latest one in it.

    It is recognized by its metadata.json, as in Megatron-core itself, since other DCP checkpoints may have a common.pt,
    too.
    """
    if (path / _LATEST_NAME).is_file():
        return True
    return (path / _CONFIG_NAME).is_file() and b'"sharded_backend"' in _read(path, _CONFIG_NAME)


def read_megatron(path: Path) -> SourceCheckpoint:
    """Read the checkpoint into the sections model and optimizer, and a section for each value that is common to all
    ranks.

    path  a checkpoint's directory, or a directory with several checkpoints, of which the file
          latest_checkpointed_iteration.txt names one

    raises  DamagedError            a file is missing or incomplete, or the metadata contradicts itself
            UnsupportedFormatError  another backend or version wrote the checkpoint
    """
    directory = _tagged(path)
    _check_config(directory)
    metadata = read_metadata(directory)
    with closing(PickledFiles(str(directory), _KNOWN, frozenset(_REPLACED_RECORDS))) as files:
        return _MegatronAssembly(directory, metadata, files).source()


def _tagged(path: Path) -> Path:
    """The directory of the latest iteration; `path` itself if it has no file that names one. Raises DamagedError."""
    if not (path / _LATEST_NAME).is_file():
        return path
    text = _read(path, _LATEST_NAME)[:40].decode(errors="replace").strip()
    name = f"iter_{int(text):07d}" if text.isascii() and text.isdigit() else text
    if not re.fullmatch(r"release|iter_[0-9]+", name):
        raise DamagedError(
            f"{path / _LATEST_NAME} does not name an iteration", found=f"{text!r}",
            next="give the directory of one iteration, such as iter_0001000",
        )
    if not (path / name).is_dir():
        raise DamagedError(f"{path} lacks the latest iteration, {name}", next="give the directory of another iteration")
    return path / name


def _read(path: Path, name: str) -> bytes:
    with translated(path, "read", name), open_plain(path / name) as opened:
        return opened.read(MIB)


def _check_config(directory: Path) -> None:
    if not (directory / _CONFIG_NAME).is_file():
        if not (directory / METADATA_NAME).is_file():
            raise UnsupportedFormatError(
                f"{directory} is not a distributed checkpoint", expected="the format torch_dist",
                next="let Megatron load it, and save it with --ckpt-format torch_dist",
            )
        raise DamagedError(
            f"{directory} has no {_CONFIG_NAME}: the save was not finished",
            next="copy the whole directory again, or use an older checkpoint",
        )
    try:
        config = msgspec.json.decode(_read(directory, _CONFIG_NAME), type=_Config)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError(
            f"{directory / _CONFIG_NAME} is not valid JSON: {error!s:.100}", next="copy the file again"
        ) from error
    backends = (
        config.sharded_backend, config.sharded_backend_version, config.common_backend, config.common_backend_version
    )
    if backends != _BACKENDS:
        raise UnsupportedFormatError(
            f"{directory} has an unknown Megatron-core backend or version", expected=f"{_BACKENDS}",
            found=f"{backends!s:.200}", next="let Megatron load it, and save it with --ckpt-format torch_dist",
        )
    for name in (METADATA_NAME, _COMMON_NAME):
        if not (directory / name).is_file():
            raise DamagedError(f"{directory} lacks {name}", next="copy the whole directory again")


class _MegatronAssembly:
    """Assembles the sections of a checkpoint from the sharded state and the common state."""

    def __init__(self, directory: Path, metadata: DcpMetadata, files: PickledFiles) -> None:
        self._directory, self._metadata, self._files = directory, metadata, files
        self._tree = PickleTree(files.storage_range, str(directory), _REPLACED_RECORDS)
        self._tensors: list[SourceTensor] = []
        self._objects: dict[str, object] = {}

    def source(self) -> SourceCheckpoint:
        self._add_common()
        for name, entry in self._metadata.entries.items():
            if entry.kind == TENSOR_KIND:
                self._add_tensor(name, entry)
            else:
                self._add_object(name)
        check_sections(self._objects, str(self._directory))
        return check_source(SourceCheckpoint(
            "megatron", str(self._directory), tuple(self._files.files),
            in_file_order((*self._tensors, *self._tree.tensors)), tuple(self._tree.aliases), self._objects,
            unmapped=tuple(self._tree.unmapped),
        ))

    def _add_common(self) -> None:
        place = self._directory / _COMMON_NAME
        common = self._files.read(place)
        if not isinstance(common, dict):
            raise DamagedError(f"{place} does not hold a dict", next="copy the file again")
        check_sections(common, str(place))
        for section, value in common.items():
            self._put(section, (), self._tree.section(section, value))

    def _add_tensor(self, key: str, entry: PickledInstance) -> None:
        tensor = stored_tensor(self._directory, key, entry, self._metadata, self._files)
        added = self._metadata.megatron.get(key)
        if isinstance(added, dict) and _FLATTENED in added:
            tensor = self._unflattened(tensor, added[_FLATTENED])
        section, inner = _section_of(key)
        name = f"{section}.{inner}"
        self._tensors.append(msgspec.structs.replace(tensor, name=name))
        self._put(section, (inner,), TensorRef(name, "tensor"))

    def _add_object(self, key: str) -> None:
        """Add an object. If each rank or layer has its own, the object's position becomes a part of its name."""
        item = self._metadata.items.get((key, None))
        if item is None:
            raise contradiction(self._directory, f"it does not list the location of {key!r:.80}")
        shard = OBJECT_SHARD.fullmatch(key)
        whole = shard[1] if shard else key
        section, inner = (whole, "") if "." not in whole else _section_of(whole)
        is_one = shard is None or set(shard[3].split(".")) == {"1"}
        path = (*([inner] if inner else []), *([] if is_one or shard is None else [shard[2]]))
        value = self._files.read(self._directory / item.file, item.place)
        if shard and isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is None and whole.endswith("._extra_state"):
            return  # this layer has no such object
        self._put(section, path, self._tree.section(".".join((section, *path)), value))

    def _put(self, section: str, path: tuple[str, ...], value: object) -> None:
        """Put a value into a section. A value that cannot be stored is recorded as such instead."""
        keys = (section, *path)
        if not self._tree.unmapped or self._tree.unmapped[-1].name != ".".join(keys):
            put_at_keys(self._objects, keys, value, self._directory)

    def _unflattened(self, tensor: SourceTensor, original: object) -> SourceTensor:
        """A tensor with its original shape. Older versions saved it as a grid of flattened blocks; each rank wrote a
        range of a block.
        """
        try:
            shape = size_of(original)
            *grid, flat = tensor.shape
            block = tuple(side // count for side, count in zip(shape, grid, strict=True))
            if tuple(a * b for a, b in zip(block, grid, strict=True)) != shape or math.prod(block) != flat:
                raise ValueError(f"{grid} blocks of {flat} elements do not form a tensor of shape {shape}")
            boxes = [part for stored in tensor.boxes for part in _parts(stored, block, tensor.dtype.item_bytes)]
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise contradiction(self._directory, f"{tensor.name!r:.80}: {error!s:.100}") from error
        return SourceTensor(tensor.name, tensor.dtype, shape, tuple(boxes))


def _parts(stored: StoredBox, block: tuple[int, ...], item_bytes: int) -> list[StoredBox]:
    """The boxes of the original tensor that a stored range of a flattened block contains. Raises ValueError."""
    *cell, begin = stored.box.offset
    *ones, length = stored.box.shape
    if set(ones) - {1} or (length > 1 and stored.strides is not None and stored.strides[-1] != 1):
        raise ValueError(f"a stored part of shape {stored.box.shape} is not one range of a block")
    parts, offset_bytes = [], stored.offset_bytes
    for box in linear_boxes(block, begin, begin + length):
        offset = tuple(number * side + inner for number, side, inner in zip(cell, block, box.offset, strict=True))
        parts.append(StoredBox(Box(offset, box.shape), stored.file, offset_bytes))
        offset_bytes += box.elements * item_bytes
    return parts


def _section_of(key: str) -> tuple[str, str]:
    """The section of a key ("optimizer" or "model"), and the key's name in that section."""
    if "optimizer" in key.split(".")[:2]:
        return "optimizer", key.removeprefix("optimizer.")
    return "model", key
