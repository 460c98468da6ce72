"""Optimizer state that ZeRO has flattened and partitioned among ranks: which elements of it are which parameter's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, cast

import msgspec

from flowstone.convert.sources.deepspeed_files import DeepSpeedFiles, Run, fragment
from flowstone.convert.sources.torch_values import TensorView, sides
from flowstone.errors import DamagedError, UnsupportedFormatError
from flowstone.table.dtype import DType

MASTER = "fp32"
"""The name of a parameter's master weights among its slots, which Universal Checkpoints use."""

Shapes: TypeAlias = "list[dict[str, tuple[int, ...]]]"
"""The parameters of each flattened group, in the order in which they lie there."""

_Addresses: TypeAlias = "Mapping[str, tuple[int, int]]"
"""Of one group on one rank: where each parameter's part begins in the flat partition, and its length."""


class Slot(msgspec.Struct, frozen=True):
    """The runs that one slot of a parameter consists of, in order."""

    dtype: DType
    runs: tuple[Run, ...]


class Parameter(msgspec.Struct, frozen=True):
    """A parameter that the optimizer owns.

    slots   what has the parameter's shape: "fp32", "exp_avg", ...
    values  what has not: a count of steps
    """

    name: str
    shape: tuple[int, ...]
    slots: Mapping[str, Slot]
    values: Mapping[str, object]


class Group(msgspec.Struct, frozen=True):
    """A group of an optimizer: its settings, and the names of its parameters."""

    options: Mapping[object, object]
    names: tuple[str, ...]


class Partitioned(msgspec.Struct, frozen=True):
    """What the files of all ranks say together. `scalars`: what is neither a parameter's nor a group's."""

    stage: int
    parameters: tuple[Parameter, ...]
    groups: tuple[Group, ...]
    scalars: Mapping[str, object]


class _Partition(msgspec.Struct, frozen=True):
    """One rank's file.

    flats   of each group, every slot, flat tensors and others
    """

    flats: list[dict[str, object]]
    addresses: list[_Addresses] | None
    groups: list[dict[object, object]]


_NOT_SCALARS = frozenset({
    "base_optimizer_state", "single_partition_of_fp32_groups", "fp32_flat_groups", "optimizer_state_dict",
    "param_slice_mappings", "group_paddings", "param_alignment_paddings", "partition_count", "ds_version", "zero_stage",
})


def read_shapes(value: object, location: str) -> Shapes:
    """The `param_shapes` of a model's states. Raises DamagedError."""
    try:
        groups = cast("list[dict[str, object]]", [value] if isinstance(value, dict) else value)
        return [{name: sides(shape) for name, shape in _named(group)} for group in groups]
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedError(f"{location}: param_shapes cannot be read: {error!s:.100}", next="copy it again") from error


def _named(group: Mapping[str, object]) -> Iterable[tuple[str, object]]:
    """What a group has of each parameter, by name. Raises ValueError for a name that is no text."""
    if not all(isinstance(name, str) for name in group):
        raise ValueError("a parameter's name that is no text")
    return group.items()


def read_partitions(
    states: Sequence[dict[str, object]], shapes: Shapes, files: DeepSpeedFiles, *, is_reordered: bool
) -> Partitioned:
    """Put the parameters together of what each rank's file holds.

    states        of each rank, its "optimizer_state_dict"
    shapes        in the order in which parameters lie in the flattened groups
    is_reordered  by `round_robin_gradients`: this order is not the optimizer's, of which DeepSpeed (0.19.8) tells the
                  addresses all the same

    raises  DamagedError            files are missing, of different jobs, or contradict the model's states
            UnsupportedFormatError  a way to partition that is not known
    """
    stage, first = _stage(states, files.location), states[0]
    partitions = [_partition(state, stage, rank, files.location) for rank, state in enumerate(states)]
    for rank, partition in enumerate(partitions):
        if len(partition.flats) != len(shapes):
            raise _contradiction(
                files, f"rank {rank} has {len(partition.flats)} flat groups, the model's states {len(shapes)}"
            )
    parameters, owners = [], []
    for number, group in enumerate(shapes):
        flats = [partition.flats[number] for partition in partitions]
        if stage == 3:
            addresses = _of_each_parameter(group, flats, files)
        else:
            addresses = _of_the_whole(group, flats, _paddings(first, number, group, files), files)
            if not is_reordered:
                _check_addresses([partition.addresses for partition in partitions], number, addresses, files)
        parameters += [_parameter(name, shape, flats, addresses, files) for name, shape in group.items()]
        owners.append(tuple(group))
    groups = tuple(_groups(partitions[0].groups, owners, files))
    scalars = {name: value for name, value in first.items() if name not in _NOT_SCALARS}
    return Partitioned(stage, tuple(parameters), groups, scalars)


def _stage(states: Sequence[dict[str, object]], location: str) -> int:
    """The stage of ZeRO, of which all files must be, for as many ranks as there are files."""
    stages = {state.get("zero_stage", 1) for state in states}  # BF16_Optimizer, which is stage 1, says none
    if len(stages) > 1:
        raise DamagedError(
            f"{location} mixes files of different jobs", found=f"ZeRO stages {sorted(map(str, stages))}",
            next="copy the whole directory again",
        )
    (stage,) = stages
    if stage not in (1, 2, 3):
        raise UnsupportedFormatError(f"{location} was saved with ZeRO stage {stage!r:.20}", expected="stage 0 to 3",
                                     next="check which version of DeepSpeed has saved it")
    for rank, state in enumerate(states):
        count = state.get("partition_count")
        ranks = max(count, default=0) if isinstance(count, list) else count
        if ranks != len(states):
            raise DamagedError(
                f"{location} has optimizer states of {len(states)} ranks", expected=f"{ranks}, as rank {rank}'s says",
                next="copy the files of all ranks",
            )
    return stage


def _partition(state: dict[str, object], stage: int, rank: int, location: str) -> _Partition:
    try:
        if stage == 3:
            base, flat = state["optimizer_state_dict"], state["fp32_flat_groups"]
        else:
            base, flat = state["base_optimizer_state"], state["single_partition_of_fp32_groups"]
        slots = base["state"] if isinstance(base, dict) else base  # elastic checkpoints have the slots alone
        groups = base["param_groups"] if isinstance(base, dict) else []
        flats: list[dict[str, object]] = []
        for number, master in enumerate(cast("list[object]", flat)):
            found = slots.get(number, {}) if isinstance(slots, dict) else cast("list[dict[str, object]]", slots)[number]
            flats.append({MASTER: master, **found})
        mappings = state.get("param_slice_mappings")
        addresses: list[_Addresses] | None = None if mappings is None else [
            {name: fragment(address) for name, address in _named(group)}
            for group in cast("list[dict[str, object]]", mappings)
        ]
        if not all(isinstance(group, dict) and isinstance(group["params"], list) for group in groups):
            raise ValueError("param_groups")
        if addresses is not None and len(addresses) != len(flats):
            raise ValueError("param_slice_mappings are not of these groups")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DamagedError(
            f"{location}: the optimizer state of rank {rank} is not as DeepSpeed writes it: {error!s:.100}",
            next="copy the file again",
        ) from error
    return _Partition(flats, addresses, groups)


def _paddings(
    state: dict[str, object], number: int, group: Mapping[str, tuple[int, ...]], files: DeepSpeedFiles
) -> list[int]:
    """How many elements follow each parameter of a group that are none."""
    found = state.get("param_alignment_paddings")
    if found is None:
        return [0] * len(group)
    ours = found[number] if isinstance(found, list) and number < len(found) else None
    if not isinstance(ours, list) or len(ours) != len(group) or not all(type(n) is int and n >= 0 for n in ours):
        raise _contradiction(files, f"the paddings of group {number}")
    return ours


def _of_the_whole(
    group: Mapping[str, tuple[int, ...]], flats: Sequence[Mapping[str, object]], paddings: Sequence[int],
    files: DeepSpeedFiles,
) -> list[_Addresses]:
    """Stages 1 and 2 cut the whole group, flattened, into one run for each rank."""
    begins, begin = {}, 0
    for (name, shape), padding in zip(group.items(), paddings, strict=True):
        begins[name] = begin
        begin += math.prod(shape) + padding
    found: list[_Addresses] = []
    low = 0
    for flat in flats:
        high = low + _length(flat, files)
        ours = {}
        for name, shape in group.items():
            first, last = max(low, begins[name]), min(high, begins[name] + math.prod(shape))
            if first < last:
                ours[name] = first - low, last - first
        found.append(ours)
        low = high
    return found


def _check_addresses(
    told: Sequence[list[_Addresses] | None], number: int, found: Sequence[_Addresses], files: DeepSpeedFiles
) -> None:
    """Versions from 0.8 on say, too, where each parameter of a group lies."""
    for rank, (own, addresses) in enumerate(zip(told, found, strict=True)):
        if own is None:
            continue
        for name in (*own[number], *addresses):
            (begin, length), (other, expected) = own[number].get(name, (0, 0)), addresses.get(name, (0, 0))
            if length != expected or (length and begin != other):
                differing = f"{length} elements of {name!r:.200} from {begin} on; by the model's states, {expected}"
                raise _contradiction(files, f"rank {rank} has {differing} from {other} on")


def _of_each_parameter(
    group: Mapping[str, tuple[int, ...]], flats: Sequence[Mapping[str, object]], files: DeepSpeedFiles
) -> list[_Addresses]:
    """Stage 3 cuts each parameter by itself, into equal parts, of which the last is padded."""
    ranks = len(flats)
    found: list[dict[str, tuple[int, int]]] = [{} for _ in flats]
    begin = 0
    for name, shape in group.items():
        elements = math.prod(shape)
        part = -(-elements // ranks)
        for rank in range(ranks):
            found[rank][name] = begin, max(0, min(part, elements - rank * part))
        begin += part
    for rank, flat in enumerate(flats):
        if _length(flat, files) != begin:
            raise _contradiction(
                files, f"rank {rank} has {_length(flat, files)} elements of a group, where {begin} are expected"
            )
    return list(found)


def _length(flat: Mapping[str, object], files: DeepSpeedFiles) -> int:
    master = flat[MASTER]
    if not isinstance(master, TensorView) or len(master.shape) != 1:
        raise _contradiction(files, "the master weights of a group are no flat tensor")
    return master.shape[0]


def _parameter(
    name: str, shape: tuple[int, ...], flats: Sequence[Mapping[str, object]], addresses: Sequence[_Addresses],
    files: DeepSpeedFiles,
) -> Parameter:
    holding = [rank for rank in range(len(flats)) if addresses[rank].get(name, (0, 0))[1]]
    held = sum(addresses[rank][name][1] for rank in holding)
    if held != math.prod(shape):
        raise DamagedError(
            f"{files.location}: the optimizer's partitions hold {held} elements of {name!r:.200}",
            expected=f"{math.prod(shape)}, of shape {shape}", next="copy the files of all ranks again",
        )
    holding = holding or [0]  # no elements: its slots are empty, and of a type
    first = flats[holding[0]]
    slots, values = {}, {}
    for slot, value in first.items():
        if isinstance(value, TensorView) and value.shape:
            slots[slot] = _slot(name, slot, [(r, flats[r], addresses[r].get(name, (0, 0))) for r in holding], files)
        else:
            values[slot] = value
    return Parameter(name, shape, slots, values)


def _slot(
    name: str, slot: str, parts: Sequence[tuple[int, Mapping[str, object], tuple[int, int]]], files: DeepSpeedFiles
) -> Slot:
    runs, dtypes = [], []
    for rank, flat, (begin, length) in parts:
        view = flat.get(slot)
        if not isinstance(view, TensorView):
            raise _contradiction(files, f"rank {rank} lacks {slot!r:.60} of {name!r:.200}")
        whole = files.run(view, f"{slot} on rank {rank}")
        if begin + length > whole.elements:
            raise _contradiction(files, f"{slot} of {name!r:.200} reaches beyond the partition of rank {rank}")
        runs.append(Run(whole.file, whole.offset_bytes + begin * view.dtype.item_bytes, length))
        dtypes.append(view.dtype)
    if any(dtype is not dtypes[0] for dtype in dtypes):
        raise _contradiction(files, f"{slot} of {name!r:.200} has another type on each rank")
    return Slot(dtypes[0], tuple(runs))


def _groups(
    groups: Sequence[dict[object, object]], owners: Sequence[tuple[str, ...]], files: DeepSpeedFiles
) -> list[Group]:
    """The optimizer's groups, whose members are flat groups by number."""
    if not groups:
        return [Group({}, names) for names in owners]
    found = []
    for group in groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        members = cast("list[object]", group["params"])
        if not all(type(number) is int and 0 <= number < len(owners) for number in members):
            raise _contradiction(files, "a group of the optimizer has members that are not there")
        found.append(Group(options, tuple(name for number in cast("list[int]", members) for name in owners[number])))
    return found


def _contradiction(files: DeepSpeedFiles, what: str) -> DamagedError:
    return DamagedError(
        f"{files.location}: the files of its ranks contradict each other: {what}",
        next="copy the whole directory again; where a job saved over an older checkpoint, import another one",
    )
