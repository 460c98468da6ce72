"""The files of a DeepSpeed checkpoint: values with references to storages, and nothing executed."""

from __future__ import annotations

from pathlib import Path

import msgspec

from flowstone.convert.sources.pickled_files import PickledFiles
from flowstone.convert.sources.restricted_unpickler import Known, Record
from flowstone.convert.sources.torch_archive import Place
from flowstone.convert.sources.torch_values import KNOWN, TensorView, view_bytes
from flowstone.errors import DamagedError

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


class DeepSpeedFiles(PickledFiles):
    """The files of a checkpoint of DeepSpeed."""

    def __init__(self, location: str) -> None:
        super().__init__(location, _KNOWN, _RECORDS)

    def read(self, path: Path, place: Place | None = None) -> object:
        """What a file of torch.save holds; loss scalers are dicts of their fields."""
        value = super().read(path, place)
        if isinstance(value, dict):
            _show_scaler(value)
            _show_scaler(value.get("optimizer_state_dict"))
        return value

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


def fragment(value: object) -> tuple[int, int]:
    """Begin and length, in elements, of what a flat partition holds of a parameter. Raises ValueError."""
    if isinstance(value, Record) and value.kind == _FRAGMENT and isinstance(value.state, dict):
        begin, length = value.state.get("start"), value.state.get("numel")
        if type(begin) is int and type(length) is int and begin >= 0 and length >= 0:
            return begin, length
    raise ValueError("a fragment's address")
