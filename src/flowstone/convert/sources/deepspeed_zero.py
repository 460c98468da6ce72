"""ZeRO has flattened the optimizer's state, and divided it among ranks. Find which parts belong to which parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, cast

import msgspec

from flowstone.convert.sources.deepspeed_files import DeepSpeedFiles, ElementRun, fragment
from flowstone.convert.sources.torch_values import TensorView, size_of
from flowstone.errors import DamagedError, UnsupportedFormatError
from flowstone.table.dtype import DType

MASTER = "fp32"
"""The name that Universal Checkpoints give to a parameter's master weights among its slots (optimizer state)."""

Shapes: TypeAlias = "list[dict[str, tuple[int, ...]]]"
"""The parameters of each flattened group, in order."""

_Addresses: TypeAlias = "Mapping[str, tuple[int, int]]"
"""For one group on one rank: (begin, length) of each parameter's part in the flat partition, in elements."""


class ParameterSlot(msgspec.Struct, frozen=True):
    """The ranges of files that make up one tensor of a parameter's state (such as exp_avg), in order."""

    dtype: DType
    runs: tuple[ElementRun, ...]


class ZeroParameter(msgspec.Struct, frozen=True):
    """A parameter that the optimizer owns.

    slots   optimizer state with the parameter's shape: "fp32", "exp_avg", ...
    values  other optimizer state, such as the step count
    """

    name: str
    shape: tuple[int, ...]
    slots: Mapping[str, ParameterSlot]
    values: Mapping[str, object]


class ZeroGroup(msgspec.Struct, frozen=True):
    """A group of an optimizer: its settings, and the names of its parameters."""

    options: Mapping[object, object]
    names: tuple[str, ...]


class ZeroState(msgspec.Struct, frozen=True):
    """The merged content of all ranks' files. `scalars`: values that belong to no parameter and no group."""

    stage: int
    parameters: tuple[ZeroParameter, ...]
    groups: tuple[ZeroGroup, ...]
    scalars: Mapping[str, object]


class _Partition(msgspec.Struct, frozen=True):
    """The content of one rank's file.

    flats      for each group, its state: flat tensors (such as exp_avg) and other values
    addresses  where the parameters are in the flat tensors, if the file says so
    groups     the optimizer's parameter groups
    """

    flats: list[dict[str, object]]
    addresses: list[_Addresses] | None
    groups: list[dict[object, object]]


_NOT_SCALARS = frozenset({
    "base_optimizer_state", "single_partition_of_fp32_groups", "fp32_flat_groups", "optimizer_state_dict",
    "param_slice_mappings", "group_paddings", "param_alignment_paddings", "partition_count", "ds_version", "zero_stage",
})


def read_shapes(value: object, location: str) -> Shapes:
    """The entry `param_shapes` of a file of model states: for each group, name of a parameter -> its shape. Raises
    DamagedError.
    """
    try:
        groups = cast("list[dict[str, object]]", [value] if isinstance(value, dict) else value)
        return [{name: size_of(shape) for name, shape in _named(group)} for group in groups]
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedError(
            f"{location}: param_shapes cannot be read: {error!s:.100}", next="copy the whole directory again"
        ) from error


def _named(group: Mapping[str, object]) -> Iterable[tuple[str, object]]:
    """The items of a group: name of a parameter and its value. Raises ValueError for a name that is not a string."""
    if not all(isinstance(name, str) for name in group):
        raise ValueError("the name of a parameter is not a string")
    return group.items()


def read_partitions(
    states: Sequence[dict[str, object]], shapes: Shapes, files: DeepSpeedFiles, *, is_reordered: bool
) -> ZeroState:
    """Reassemble the parameters from the files of all ranks.

    states        the "optimizer_state_dict" of each rank
    shapes        the parameters of each group, in their order before the group was flattened
    is_reordered  whether `round_robin_gradients` has changed the order of parameters. Even then, the addresses that
                  DeepSpeed (0.19.8) stores are those of the unchanged order

    raises  DamagedError            files are missing, are of different jobs, or contradict the model states
            UnsupportedFormatError  the state is divided in an unknown way
    """
    stage, first = _stage(states, files.location), states[0]
    partitions = [_partition(state, stage, rank, files.location) for rank, state in enumerate(states)]
    for rank, partition in enumerate(partitions):
        if len(partition.flats) != len(shapes):
            raise _contradiction(
                files, f"rank {rank} has {len(partition.flats)} flat groups, but the model states have {len(shapes)}"
            )
    parameters, owners = [], []
    for number, group in enumerate(shapes):
        flats = [partition.flats[number] for partition in partitions]
        if stage == 3:
            addresses = _addresses_by_parameter(group, flats, files)
        else:
            addresses = _addresses_in_group(group, flats, _paddings(first, number, group, files), files)
            if not is_reordered:
                _check_addresses([partition.addresses for partition in partitions], number, addresses, files)
        parameters += [_parameter(name, shape, flats, addresses, files) for name, shape in group.items()]
        owners.append(tuple(group))
    groups = tuple(_groups(partitions[0].groups, owners, files))
    scalars = {name: value for name, value in first.items() if name not in _NOT_SCALARS}
    return ZeroState(stage, tuple(parameters), groups, scalars)


def _stage(states: Sequence[dict[str, object]], location: str) -> int:
    """The ZeRO stage. Raises DamagedError unless all files have the same stage, and the same number of ranks."""
    # BF16_Optimizer, which is stage 1, does not store its stage
    stages = {state.get("zero_stage", 1) for state in states}
    if len(stages) > 1:
        raise DamagedError(
            f"{location} mixes files of different jobs", found=f"ZeRO stages {sorted(map(str, stages))}",
            next="copy the whole directory again",
        )
    (stage,) = stages
    if stage not in (1, 2, 3):
        raise UnsupportedFormatError(f"{location} was saved with ZeRO stage {stage!r:.20}", expected="stage 0 to 3",
                                     next="check which version of DeepSpeed saved it")
    for rank, state in enumerate(states):
        count = state.get("partition_count")
        ranks = max(count, default=0) if isinstance(count, list) else count
        if ranks != len(states):
            raise DamagedError(
                f"{location} has optimizer states of {len(states)} ranks",
                expected=f"{ranks} ranks, according to the file of rank {rank}", next="copy the files of all ranks",
            )
    return stage


def _partition(state: dict[str, object], stage: int, rank: int, location: str) -> _Partition:
    try:
        if stage == 3:
            base, flat = state["optimizer_state_dict"], state["fp32_flat_groups"]
        else:
            base, flat = state["base_optimizer_state"], state["single_partition_of_fp32_groups"]
        # elastic checkpoints have only the state, without groups
        slots = base["state"] if isinstance(base, dict) else base
        groups = base["param_groups"] if isinstance(base, dict) else []
        flats: list[dict[str, object]] = []
        for number, master in enumerate(cast("list[object]", flat)):
            listed = cast("list[dict[str, object]]", slots)
            own = slots.get(number, {}) if isinstance(slots, dict) else listed[number]
            flats.append({MASTER: master, **own})
        mappings = state.get("param_slice_mappings")
        addresses: list[_Addresses] | None = None if mappings is None else [
            {name: fragment(address) for name, address in _named(group)}
            for group in cast("list[dict[str, object]]", mappings)
        ]
        if not all(isinstance(group, dict) and isinstance(group["params"], list) for group in groups):
            raise ValueError("param_groups is not a list of dicts with parameters")
        if addresses is not None and len(addresses) != len(flats):
            raise ValueError("the number of param_slice_mappings is not the number of parameter groups")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DamagedError(
            f"{location}: the optimizer state of rank {rank} has an unexpected form: {error!s:.100}",
            next="copy the file again",
        ) from error
    return _Partition(flats, addresses, groups)


def _paddings(
    state: dict[str, object], number: int, group: Mapping[str, tuple[int, ...]], files: DeepSpeedFiles
) -> list[int]:
    """How many padding elements follow each parameter of a group."""
    paddings = state.get("param_alignment_paddings")
    if paddings is None:
        return [0] * len(group)
    ours = paddings[number] if isinstance(paddings, list) and number < len(paddings) else None
    if not isinstance(ours, list) or len(ours) != len(group) or not all(type(n) is int and n >= 0 for n in ours):
        raise _contradiction(
            files, f"param_alignment_paddings does not have a number for each parameter of group {number}"
        )
    return ours


def _addresses_in_group(
    group: Mapping[str, tuple[int, ...]], flats: Sequence[Mapping[str, object]], paddings: Sequence[int],
    files: DeepSpeedFiles,
) -> list[_Addresses]:
    """Where the parameters are in the flat partitions of stages 1 and 2, which divide each flattened group into one
    range for each rank.
    """
    begins, begin = {}, 0
    for (name, shape), padding in zip(group.items(), paddings, strict=True):
        begins[name] = begin
        begin += math.prod(shape) + padding
    addresses: list[_Addresses] = []
    low = 0
    for flat in flats:
        high = low + _length(flat, files)
        ours = {}
        for name, shape in group.items():
            first, last = max(low, begins[name]), min(high, begins[name] + math.prod(shape))
            if first < last:
                ours[name] = first - low, last - first
        addresses.append(ours)
        low = high
    return addresses


def _check_addresses(
    stated: Sequence[list[_Addresses] | None], number: int, computed: Sequence[_Addresses], files: DeepSpeedFiles
) -> None:
    """Check that the computed addresses of parameters equal the stored ones, which files of DeepSpeed 0.8 and later
    contain.
    """
    for rank, (own, addresses) in enumerate(zip(stated, computed, strict=True)):
        if own is None:
            continue
        for name in (*own[number], *addresses):
            (begin, length), (other, expected) = own[number].get(name, (0, 0)), addresses.get(name, (0, 0))
            if length != expected or (length and begin != other):
                differing = f"{length} elements of {name!r:.200} from {begin} on"
                expectation = f"the model states expect {expected} from {other} on"
                raise _contradiction(files, f"rank {rank} has {differing}, but {expectation}")


def _addresses_by_parameter(
    group: Mapping[str, tuple[int, ...]], flats: Sequence[Mapping[str, object]], files: DeepSpeedFiles
) -> list[_Addresses]:
    """Where the parameters are in the flat partitions of stage 3, which divides each parameter into equal parts. The
    last part is padded.
    """
    ranks = len(flats)
    addresses: list[dict[str, tuple[int, int]]] = [{} for _ in flats]
    begin = 0
    for name, shape in group.items():
        elements = math.prod(shape)
        part = -(-elements // ranks)
        for rank in range(ranks):
            addresses[rank][name] = begin, max(0, min(part, elements - rank * part))
        begin += part
    for rank, flat in enumerate(flats):
        if _length(flat, files) != begin:
            raise _contradiction(
                files, f"rank {rank} has {_length(flat, files)} elements of a parameter group instead of {begin}"
            )
    return list(addresses)


def _length(flat: Mapping[str, object], files: DeepSpeedFiles) -> int:
    master = flat[MASTER]
    if not isinstance(master, TensorView) or len(master.shape) != 1:
        raise _contradiction(files, "the fp32 master weights of a parameter group are not one flat tensor")
    return master.shape[0]


def _parameter(
    name: str, shape: tuple[int, ...], flats: Sequence[Mapping[str, object]], addresses: Sequence[_Addresses],
    files: DeepSpeedFiles,
) -> ZeroParameter:
    holding = [rank for rank in range(len(flats)) if addresses[rank].get(name, (0, 0))[1]]
    element_count = sum(addresses[rank][name][1] for rank in holding)
    if element_count != math.prod(shape):
        raise DamagedError(
            f"{files.location}: the optimizer's partitions hold {element_count} elements of {name!r:.200}",
            expected=f"{math.prod(shape)} elements for shape {shape}", next="copy the files of all ranks again",
        )
    holding = holding or [0]  # a parameter without elements has empty tensors, but they have a type
    first = flats[holding[0]]
    slots, values = {}, {}
    for slot, value in first.items():
        if isinstance(value, TensorView) and value.shape:
            slots[slot] = _slot(name, slot, [(r, flats[r], addresses[r].get(name, (0, 0))) for r in holding], files)
        else:
            values[slot] = value
    return ZeroParameter(name, shape, slots, values)


def _slot(
    name: str, slot: str, parts: Sequence[tuple[int, Mapping[str, object], tuple[int, int]]], files: DeepSpeedFiles
) -> ParameterSlot:
    runs, dtypes = [], []
    for rank, flat, (begin, length) in parts:
        view = flat.get(slot)
        if not isinstance(view, TensorView):
            raise _contradiction(files, f"rank {rank} lacks the optimizer tensor {slot!r:.60} of {name!r:.200}")
        whole = files.run(view, f"{slot} on rank {rank}")
        if begin + length > whole.elements:
            raise _contradiction(files, f"{slot} of {name!r:.200} ends after the end of the partition of rank {rank}")
        runs.append(ElementRun(whole.file, whole.offset_bytes + begin * view.dtype.item_bytes, length))
        dtypes.append(view.dtype)
    if any(dtype is not dtypes[0] for dtype in dtypes):
        raise _contradiction(files, f"{slot} of {name!r:.200} has different dtypes on different ranks")
    return ParameterSlot(dtypes[0], tuple(runs))


def _groups(
    groups: Sequence[dict[object, object]], owners: Sequence[tuple[str, ...]], files: DeepSpeedFiles
) -> list[ZeroGroup]:
    """The optimizer's parameter groups. In the files, the members of a group are numbers of flat groups."""
    if not groups:
        return [ZeroGroup({}, names) for names in owners]
    result = []
    for group in groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        members = cast("list[object]", group["params"])
        if not all(type(number) is int and 0 <= number < len(owners) for number in members):
            raise _contradiction(files, "a parameter group of the optimizer refers to parameters that do not exist")
        result.append(
            ZeroGroup(options, tuple(name for number in cast("list[int]", members) for name in owners[number]))
        )
    return result


def _contradiction(files: DeepSpeedFiles, reason: str) -> DamagedError:
    return DamagedError(
        f"{files.location}: the files of its ranks contradict each other: {reason}",
        next="copy the whole directory again; if a job overwrote an older checkpoint, import another one",
    )
