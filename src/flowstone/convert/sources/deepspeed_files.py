"""The files of a DeepSpeed checkpoint, read as values with references to storages. Pickles are not executed."""

from __future__ import annotations

from pathlib import Path

import msgspec

from flowstone.convert.sources.pickled_files import PickledFiles
from flowstone.convert.sources.restricted_unpickler import KnownFunctions, PickledInstance
from flowstone.convert.sources.torch_archive import ArchiveRange
from flowstone.convert.sources.torch_values import KNOWN, TensorView, view_bytes
from flowstone.errors import DamagedError

_SCALERS = frozenset({
    "deepspeed.runtime.fp16.loss_scaler.LossScaler", "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
})
_FRAGMENT = "deepspeed.utils.tensor_fragment.fragment_address"
_RECORDS = _SCALERS | {_FRAGMENT}


def _stage(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError("the ZeRO stage is not a number")
    return value


_KNOWN: KnownFunctions = {**KNOWN, "deepspeed.runtime.zero.config.ZeroStageEnum": _stage}


class ElementRun(msgspec.Struct, frozen=True):
    """A contiguous range of a file that has elements of a one-dimensional tensor."""

    file: int
    offset_bytes: int
    elements: int


class DeepSpeedFiles(PickledFiles):
    """The files of a DeepSpeed checkpoint."""

    def __init__(self, location: str) -> None:
        super().__init__(location, _KNOWN, _RECORDS)

    def read(self, path: Path, place: ArchiveRange | None = None) -> object:
        """The content of a torch.save file, in which loss scaler objects are replaced by dicts of their fields."""
        value = super().read(path, place)
        if isinstance(value, dict):
            _show_scaler(value)
            _show_scaler(value.get("optimizer_state_dict"))
        return value

    def run(self, view: TensorView, label: str) -> ElementRun:
        """The range of a file with the elements of a flat tensor. Raises DamagedError unless the tensor is
        one-dimensional and complete.
        """
        file, place = self.storage_range(view.storage)
        begin, _ = view_bytes(view)
        if len(view.shape) != 1 or (view.shape[0] > 1 and view.strides != (1,)):
            raise DamagedError(
                f"{self.location}: {label} is not a flat, contiguous tensor",
                found=f"shape {view.shape}", next="save the checkpoint again",
            )
        if place.bytes < view.storage.bytes:
            raise DamagedError(
                f"{self.files[file].path}: {label} is too short", expected=f"{view.storage.bytes} bytes",
                found=f"{place.bytes} bytes", next="copy the file again",
            )
        return ElementRun(file, place.offset + begin, view.shape[0])


def _show_scaler(state: object) -> None:
    """Replace a loss scaler object in `state` by its fields."""
    scaler = state.get("loss_scaler") if isinstance(state, dict) else None
    if isinstance(state, dict) and isinstance(scaler, PickledInstance) and scaler.kind in _SCALERS:
        state["loss_scaler"] = scaler.state


def fragment(value: object) -> tuple[int, int]:
    """Where a parameter's part is in a flat partition: offset and length, in elements. Raises ValueError."""
    if isinstance(value, PickledInstance) and value.kind == _FRAGMENT and isinstance(value.state, dict):
        begin, length = value.state.get("start"), value.state.get("numel")
        if type(begin) is int and type(length) is int and begin >= 0 and length >= 0:
            return begin, length
    raise ValueError("the address of a part of a parameter is not two numbers")
