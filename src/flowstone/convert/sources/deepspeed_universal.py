"""Universal Checkpoints: a directory for each parameter, with a file for each of its slots."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from flowstone.convert.sources.deepspeed_files import DeepSpeedFiles, Run
from flowstone.convert.sources.deepspeed_zero import MASTER, Group, Parameter, Partitioned, Shapes, Slot
from flowstone.convert.sources.torch_values import TensorView, view_bytes
from flowstone.errors import DamagedError
from flowstone.store.os_errors import translated
from flowstone.table.stored import row_major

PARAMETERS_NAME = "zero"
OPTIMIZER_NAME = "optimizer_state.pt"
_SUFFIX = ".pt"
_NOT_SCALARS = frozenset({
    "optimizer_state_dict", "fp32_flat_groups", "param_groups", "group_paddings", "param_alignment_paddings",
    "partition_count", "ds_version", "zero_stage",
})


def read_universal(
    directory: Path, shapes: Sequence[Shapes], buffers: frozenset[str], files: DeepSpeedFiles
) -> Partitioned:
    """Every parameter of the directory.

    shapes   of each model-parallel rank, its `param_shapes`: they say which parameters form a group
    buffers  what the modules hold that no optimizer owns: the converter adds copies of it

    raises  DamagedError  a parameter's file is missing, torn, or of another shape
    """
    place = directory / PARAMETERS_NAME
    with translated(directory, "list", PARAMETERS_NAME):
        present = {entry.name for entry in os.scandir(place) if entry.is_dir()}
    grouped = _grouped(shapes)
    known = {name: shape for group in grouped for name, shape in group.items()}
    lacking = sorted(known.keys() - present)
    if lacking:
        raise DamagedError(
            f"{place} lacks {len(lacking)} parameters of the model", found=f"no directory {lacking[0]}",
            next="copy the whole directory again",
        )
    extra = sorted(present - known.keys() - buffers)
    state = files.read(place / OPTIMIZER_NAME)
    if not isinstance(state, dict) or not isinstance(state.get("param_groups"), list):
        raise DamagedError(f"{place / OPTIMIZER_NAME} has no param_groups", next="convert the checkpoint again")
    names = [tuple(group) for group in grouped] or [tuple(extra)]
    steps = {name: step for number, step in _steps(state) for name in (names[number] if number < len(names) else ())}
    parameters = {
        name: _parameter(place, name, known.get(name), steps.get(name), files) for name in [*known, *extra]
    }
    groups = _groups(state["param_groups"], names)
    scalars = {name: value for name, value in state.items() if name not in _NOT_SCALARS}
    return Partitioned(cast("int", state.get("zero_stage", 1)), tuple(parameters.values()), groups, scalars)


def _grouped(shapes: Sequence[Shapes]) -> Shapes:
    """The groups of all model-parallel ranks as one: a parameter that several of them have parts of is in one group."""
    found: Shapes = [{} for _ in range(max(map(len, shapes), default=0))]
    for one in shapes:
        for group, theirs in zip(found, one, strict=False):
            for name, shape in theirs.items():
                group.setdefault(name, shape)
    return found


def _steps(state: Mapping[str, object]) -> list[tuple[int, object]]:
    """Of ZeRO 3, whose parameters have no file for it: the count of steps of each flat group, by its number."""
    inner = state.get("optimizer_state_dict")
    slots = inner.get("state") if isinstance(inner, dict) else None
    found = slots.items() if isinstance(slots, dict) else ()
    return [(number, one["step"]) for number, one in found if type(number) is int and "step" in one]


def _parameter(
    place: Path, name: str, shape: tuple[int, ...] | None, step: object, files: DeepSpeedFiles
) -> Parameter:
    """A parameter as its files have it.

    shape  that of one model-parallel rank's part, or None
    step   the count of steps, if no file says it
    """
    with translated(place, "list", name):
        slots = sorted(entry for entry in os.listdir(place / name) if entry.endswith(_SUFFIX))
    if MASTER + _SUFFIX not in slots:
        raise DamagedError(f"{place / name} has no {MASTER}{_SUFFIX}", next="convert the checkpoint again")
    views: dict[str, TensorView] = {}
    values: dict[str, object] = {} if step is None else {"step": step}
    for file in slots:
        found = files.read(place / name / file)
        value = found.get("param") if isinstance(found, dict) else found
        if isinstance(value, TensorView) and value.shape:
            views[file.removesuffix(_SUFFIX)] = value
        else:
            values[file.removesuffix(_SUFFIX)] = value
    master = views.get(MASTER, cast("TensorView", values.pop(MASTER, None)))
    if not isinstance(master, TensorView):
        raise DamagedError(f"{place / name / MASTER}{_SUFFIX} is no tensor", next="convert the checkpoint again")
    views[MASTER] = master
    is_flat = shape is not None and len(master.shape) == 1 and math.prod(shape) == master.shape[0]
    whole = shape if is_flat and shape is not None else master.shape
    found_slots = {slot: _slot(place / name, slot, view, whole, files) for slot, view in views.items()}
    return Parameter(name, whole, found_slots, values)


def _slot(place: Path, slot: str, view: TensorView, shape: tuple[int, ...], files: DeepSpeedFiles) -> Slot:
    """ZeRO 3's are flat, others have the parameter's shape."""
    elements = math.prod(shape)
    if (view.shape != shape and view.shape != (elements,)) or view.strides != row_major(view.shape):
        raise DamagedError(
            f"{place / slot}{_SUFFIX} has another shape than the parameter", expected=str(shape),
            found=str(view.shape), next="convert the checkpoint again",
        )
    flat = TensorView(view.storage, view.dtype, view.offset, (elements,), (1,))
    view_bytes(flat)
    run = files.run(flat, slot)
    return Slot(view.dtype, (Run(run.file, run.offset_bytes, elements),))


def _groups(groups: Sequence[object], names: Sequence[tuple[str, ...]]) -> tuple[Group, ...]:
    found = []
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping):
            raise DamagedError(f"group {number} of {OPTIMIZER_NAME} is none", next="convert the checkpoint again")
        members = group.get("params", [number])
        if not isinstance(members, list) or not all(type(one) is int and 0 <= one < len(names) for one in members):
            raise DamagedError(
                f"group {number} of {OPTIMIZER_NAME} has members that are not there", found=f"{members!r:.80}",
                next="convert the checkpoint again",
            )
        ours = tuple(name for member in members for name in names[member])
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        found.append(Group(options, ours))
    return tuple(found)
