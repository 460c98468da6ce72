"""The pickled files of a DeepSpeed checkpoint: values with references to storages, and nothing executed."""

from __future__ import annotations

from pathlib import Path

import msgspec

from flowstone.convert.source import SourceFile, source_file
from flowstone.convert.sources.restricted_unpickler import Known, Record, read_pickle
from flowstone.convert.sources.torch_archive import Place, read_archive
from flowstone.convert.sources.torch_values import KNOWN, StorageRef, TensorView, storage_of, view_bytes
from flowstone.errors import DamagedError
from flowstone.format.objects import Named
from flowstone.store.os_errors import translated

_SCALERS = frozenset({
    "deepspeed.runtime.fp16.loss_scaler.LossScaler", "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
})
_FRAGMENT = "deepspeed.utils.tensor_fragment.fragment_address"
_RECORDS = _SCALERS | {_FRAGMENT}


def _stage(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError("a stage of ZeRO that is no number")
    return value


_KNOWN: Known = {**KNOWN, "deepspeed.runtime.zero.config.ZeroStageEnum": _stage}


class Run(msgspec.Struct, frozen=True):
    """A run of elements of one dimension in a file."""

    file: int
    offset_bytes: int
    elements: int


class PickledFiles:
    """The files of one checkpoint. A storage's key has the number of its file, so values of several files mix."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.opened: list[SourceFile] = []
        self._storages: dict[str, tuple[int, Place]] = {}

    def read(self, path: Path) -> object:
        """What a file of torch.save holds; loss scalers are dicts of their fields.

        raises  DamagedError, UnsupportedFormatError, StorageError
        """
        if not path.is_file():
            raise DamagedError(f"{self.location} lacks {path.name}", next="copy the whole directory again")
        number, file = len(self.opened), source_file(path)
        self.opened.append(file)
        with translated(path.parent, "read", path.name), open(file.path, "rb") as opened:
            archive = read_archive(opened, Place(0, file.bytes), str(path))
        self._storages.update({f"{number}:{key}": (number, place) for key, place in archive.storages.items()})

        def storage(identity: object) -> StorageRef:
            found = storage_of(identity)
            return StorageRef(f"{number}:{found.key}", found.dtype, found.bytes)

        value = read_pickle(archive.content, _KNOWN, _RECORDS, persistent=storage, path=str(path))
        if isinstance(value, dict):
            _show_scaler(value)
            _show_scaler(value.get("optimizer_state_dict"))
        return value

    def place(self, wanted: StorageRef) -> tuple[int, Place]:
        """Where a storage lies. Raises DamagedError."""
        found = self._storages.get(wanted.key)
        if found is None:
            number, _, key = wanted.key.partition(":")
            raise DamagedError(f"{self.opened[int(number)].path} lacks the storage {key!r:.40}", next="copy it again")
        return found

    def run(self, view: TensorView, what: str) -> Run:
        """Where the elements of a flat tensor lie. Raises DamagedError for one that is not flat, or is cut short."""
        file, place = self.place(view.storage)
        begin, _ = view_bytes(view)
        if len(view.shape) != 1 or (view.shape[0] > 1 and view.strides != (1,)):
            raise DamagedError(f"{self.location}: {what} is not flat", found=f"shape {view.shape}", next="save again")
        if place.bytes < view.storage.bytes:
            raise DamagedError(
                f"{self.opened[file].path}: {what} is too short", expected=f"{view.storage.bytes} bytes",
                found=f"{place.bytes} bytes", next="copy the file again",
            )
        return Run(file, place.offset + begin, view.shape[0])


def _show_scaler(state: object) -> None:
    """Replace a loss scaler by its fields."""
    scaler = state.get("loss_scaler") if isinstance(state, dict) else None
    if isinstance(state, dict) and isinstance(scaler, Record) and scaler.kind in _SCALERS:
        state["loss_scaler"] = scaler.state


def sides(value: object) -> tuple[int, ...]:
    """A torch.Size, as the pickle has it, or a tuple or list of numbers. Raises ValueError."""
    if isinstance(value, Named) and value.kind == "torch.Size":
        return tuple(int(n) for n in value.text.split(",") if n)
    if isinstance(value, tuple | list) and all(type(n) is int and n >= 0 for n in value):
        return tuple(value)
    raise ValueError(f"a size {value!r:.40}")


def fragment(value: object) -> tuple[int, int]:
    """Begin and length, in elements, of what a flat partition holds of a parameter. Raises ValueError."""
    if isinstance(value, Record) and value.kind == _FRAGMENT and isinstance(value.state, dict):
        begin, length = value.state.get("start"), value.state.get("numel")
        if type(begin) is int and type(length) is int and begin >= 0 and length >= 0:
            return begin, length
    raise ValueError("a fragment's address")
