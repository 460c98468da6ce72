"""Reads Universal Checkpoints: a directory for each parameter, with a file for its fp32 values, and one for each tensor
of its optimizer state.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from flowstone.convert.sources.deepspeed_files import DeepSpeedFiles, ElementRun
from flowstone.convert.sources.deepspeed_zero import MASTER, ParameterSlot, Shapes, ZeroGroup, ZeroParameter, ZeroState
from flowstone.convert.sources.torch_values import TensorView, view_bytes
from flowstone.errors import DamagedError
from flowstone.store.os_errors import translated
from flowstone.table.stored import row_major

PARAMETERS_NAME = "zero"
OPTIMIZER_NAME = "optimizer_state.pt"
_SUFFIX = ".pt"
_REMAKE = "make the Universal Checkpoint again from the original checkpoint"
_NOT_SCALARS = frozenset({
    "optimizer_state_dict", "fp32_flat_groups", "param_groups", "group_paddings", "param_alignment_paddings",
    "partition_count", "ds_version", "zero_stage",
})


def read_universal(
    directory: Path, shapes: Sequence[Shapes], buffers: frozenset[str], files: DeepSpeedFiles
) -> ZeroState:
    """Read all parameters of the directory.

    shapes   the `param_shapes` of each model-parallel rank, which list the parameters of each group
    buffers  names of the modules' buffers, which are skipped: DeepSpeed's converter adds copies of them

    raises  DamagedError  a parameter's file is missing or incomplete, or has another shape
    """
    place = directory / PARAMETERS_NAME
    with translated(directory, "list", PARAMETERS_NAME):
        present = {entry.name for entry in os.scandir(place) if entry.is_dir()}
    grouped = _grouped(shapes)
    shape_of = {name: shape for group in grouped for name, shape in group.items()}
    lacking = sorted(shape_of.keys() - present)
    if lacking:
        raise DamagedError(
            f"{place} lacks {len(lacking)} parameters of the model", found=f"no directory {lacking[0]}",
            next="copy the whole directory again",
        )
    extra = sorted(present - shape_of.keys() - buffers)
    state = files.read(place / OPTIMIZER_NAME)
    if not isinstance(state, dict) or not isinstance(state.get("param_groups"), list):
        raise DamagedError(f"{place / OPTIMIZER_NAME} has no param_groups", next=_REMAKE)
    names = [tuple(group) for group in grouped] or [tuple(extra)]
    steps = {name: step for number, step in _steps(state) for name in (names[number] if number < len(names) else ())}
    parameters = {
        name: _parameter(place, name, shape_of.get(name), steps.get(name), files) for name in [*shape_of, *extra]
    }
    groups = _groups(place / OPTIMIZER_NAME, state["param_groups"], names)
    scalars = {name: value for name, value in state.items() if name not in _NOT_SCALARS}
    return ZeroState(cast("int", state.get("zero_stage", 1)), tuple(parameters.values()), groups, scalars)


def _grouped(shapes: Sequence[Shapes]) -> Shapes:
    """Merge the parameter groups of all model-parallel ranks. A parameter with parts on several ranks is listed once.
    """
    groups: Shapes = [{} for _ in range(max(map(len, shapes), default=0))]
    for rank_shapes in shapes:
        for group, theirs in zip(groups, rank_shapes, strict=False):
            for name, shape in theirs.items():
                group.setdefault(name, shape)
    return groups


def _steps(state: Mapping[str, object]) -> list[tuple[int, object]]:
    """The number and the step count of each flat group. Used for ZeRO 3, whose parameters have no file with the step
    count.
    """
    inner = state.get("optimizer_state_dict")
    slots = inner.get("state") if isinstance(inner, dict) else None
    items = slots.items() if isinstance(slots, dict) else ()
    return [(number, slot["step"]) for number, slot in items if type(number) is int and "step" in slot]


def _parameter(
    place: Path, name: str, shape: tuple[int, ...] | None, step: object, files: DeepSpeedFiles
) -> ZeroParameter:
    """Read a parameter from its files.

    shape  the shape of one model-parallel rank's part, or None
    step   the step count; used if the parameter has no file with it
    """
    with translated(place, "list", name):
        slots = sorted(entry for entry in os.listdir(place / name) if entry.endswith(_SUFFIX))
    if MASTER + _SUFFIX not in slots:
        raise DamagedError(f"{place / name} has no {MASTER}{_SUFFIX}", next=_REMAKE)
    views: dict[str, TensorView] = {}
    values: dict[str, object] = {} if step is None else {"step": step}
    for file in slots:
        content = files.read(place / name / file)
        value = content.get("param") if isinstance(content, dict) else content
        if isinstance(value, TensorView) and value.shape:
            views[file.removesuffix(_SUFFIX)] = value
        else:
            values[file.removesuffix(_SUFFIX)] = value
    master = views.get(MASTER, cast("TensorView", values.pop(MASTER, None)))
    if not isinstance(master, TensorView):
        raise DamagedError(f"{place / name / MASTER}{_SUFFIX} is not a tensor", next=_REMAKE)
    views[MASTER] = master
    is_flat = shape is not None and len(master.shape) == 1 and math.prod(shape) == master.shape[0]
    whole = shape if is_flat and shape is not None else master.shape
    found_slots = {slot: _slot(place / name, slot, view, whole, files) for slot, view in views.items()}
    return ZeroParameter(name, whole, found_slots, values)


def _slot(place: Path, slot: str, view: TensorView, shape: tuple[int, ...], files: DeepSpeedFiles) -> ParameterSlot:
    """One tensor of a parameter's state. It is flat with ZeRO 3, and otherwise has the parameter's shape."""
    elements = math.prod(shape)
    if (view.shape != shape and view.shape != (elements,)) or view.strides != row_major(view.shape):
        raise DamagedError(
            f"{place / slot}{_SUFFIX} does not have the parameter's shape", expected=str(shape),
            found=str(view.shape), next=_REMAKE,
        )
    flat = TensorView(view.storage, view.dtype, view.offset, (elements,), (1,))
    view_bytes(flat)
    run = files.run(flat, slot)
    return ParameterSlot(view.dtype, (ElementRun(run.file, run.offset_bytes, elements),))


def _groups(path: Path, groups: Sequence[object], names: Sequence[tuple[str, ...]]) -> tuple[ZeroGroup, ...]:
    result = []
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping):
            raise DamagedError(f"parameter group {number} in {path} is not a dict", next=_REMAKE)
        members = group.get("params", [number])
        if not isinstance(members, list) or not all(type(n) is int and 0 <= n < len(names) for n in members):
            raise DamagedError(
                f"parameter group {number} in {path} refers to parameters that do not exist",
                found=f"{members!r:.80}", next=_REMAKE,
            )
        ours = tuple(name for member in members for name in names[member])
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        result.append(ZeroGroup(options, ours))
    return tuple(result)
