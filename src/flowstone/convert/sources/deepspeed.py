"""A DeepSpeed checkpoint as a source, of any ZeRO stage, or a Universal Checkpoint. Its pickles are not executed."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import cast

import msgspec

from flowstone.convert.fetch import linear_boxes
from flowstone.convert.source import (
    SourceCheckpoint,
    UnmappedValue,
    check_source,
    in_file_order,
    is_path_inside,
    open_plain,
)
from flowstone.convert.sources.deepspeed_files import DeepSpeedFiles, ElementRun
from flowstone.convert.sources.deepspeed_universal import PARAMETERS_NAME, read_universal
from flowstone.convert.sources.deepspeed_zero import (
    MASTER,
    ParameterSlot,
    Shapes,
    ZeroParameter,
    ZeroState,
    read_partitions,
    read_shapes,
)
from flowstone.convert.sources.torch_values import TensorView
from flowstone.convert.sources.tree import PickleTree, check_sections
from flowstone.errors import DamagedError, UnsupportedFormatError
from flowstone.store.os_errors import translated
from flowstone.table.box import Box
from flowstone.table.pieces import Alias
from flowstone.table.stored import SourceTensor, StoredBox

_LATEST = ("latest", "latest_universal")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"((?:bf16_|fp16_)?)zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
OWN_KEYS = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "universal_checkpoint_info",
})
"""Keys of DeepSpeed's model states that become sections or tensors."""
ENGINE_KEYS = (
    "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version", "num_experts", "ds_autoep_layers",
)
"""Keys of DeepSpeed's engine, which become the section "deepspeed"."""
_TO_UNIVERSAL = "convert it first: python -m deepspeed.checkpoint.ds_to_universal, then import the result"


class _FileNames(msgspec.Struct, frozen=True):
    """The names of a directory's files, by kind. `others`: files that are not read."""

    models: list[str]
    optimizers: list[str]
    others: list[str]
    is_universal: bool


def is_deepspeed(path: Path) -> bool:
    """Whether a directory is a DeepSpeed checkpoint, or has a file `latest` that names one."""
    if not path.is_dir():
        return False
    return any(_MODEL.fullmatch(name) for name in os.listdir(_tagged(path)))


def read_deepspeed(path: Path) -> SourceCheckpoint:
    """Read the checkpoint into the sections model, master, optimizer, lr_scheduler, client_state and deepspeed.

    path  a checkpoint's directory, or a directory with several checkpoints, of which the file `latest` names one

    raises  DamagedError            files are missing or incomplete, or contradict each other
            UnsupportedFormatError  parameters cannot be reassembled from the files alone
    """
    directory = _tagged(path)
    with closing(DeepSpeedFiles(str(directory))) as files:
        return _source(directory, files)


def _source(directory: Path, files: DeepSpeedFiles) -> SourceCheckpoint:
    names = _names(directory)
    models = [_model_states(files, directory / name) for name in names.models]
    if names.is_universal:
        shapes = [_shapes(state, files) or [] for state in models]
        buffers = frozenset(name for state in models for name in _module(state)) - {
            name for group_shapes in shapes for group in group_shapes for name in group
        }
        partitioned = read_universal(directory, shapes, buffers, files)
        module = {name: view for state in reversed(models) for name, view in _module(state).items()}
        models = [{**models[0], "module": module}]
    elif names.optimizers:
        partitioned = _partitioned(directory, names, models, files)
    else:
        partitioned = None
        _check_model_complete(directory, models[0], files)
    source = _DeepSpeedAssembly(models, partitioned, files).source()
    unmapped = [UnmappedValue(name, "a file of an unknown kind") for name in names.others]
    return msgspec.structs.replace(source, unmapped=(*source.unmapped, *unmapped))


def _check_model_complete(directory: Path, state: Mapping[str, object], files: DeepSpeedFiles) -> None:
    """Raise DamagedError if the files of optimizer states are missing, although only they contain the parameters, as
    with ZeRO 3.
    """
    module = _module(state)
    for group in _shapes(state, files) or []:
        for name, shape in group.items():
            stored = module.get(name)
            if isinstance(stored, TensorView) and stored.shape != shape:
                raise DamagedError(
                    f"{directory} has no optimizer states, which hold the parameters with ZeRO 3",
                    found=f"no values of {name}", expected="a *_optim_states.pt of each rank",
                    next="copy the whole directory again",
                )


def _tagged(path: Path) -> Path:
    """The directory that the file `latest` names, or `path` itself if there is no such file. Raises DamagedError."""
    for name in _LATEST:
        if (path / name).is_file():
            with translated(path, "read", name), open_plain(path / name) as opened:
                tag = opened.read(4096).decode(errors="replace").strip()
            if "/" in tag or not is_path_inside(tag) or not (path / tag).is_dir():
                raise DamagedError(
                    f"{path / name} names {tag!r:.80}, but there is no such directory beside it",
                    next="give the directory of the checkpoint itself",
                )
            return path / tag
    return path


def _names(directory: Path) -> _FileNames:
    with translated(directory, "list", "."):
        present = sorted(os.listdir(directory))
    models = [match for name in present if (match := _MODEL.fullmatch(name))]
    ranked = sorted((int(match[1] or 0), int(match[2]), match[0]) for match in models)
    states = [match for name in present if (match := _OPTIMIZER.fullmatch(name))]
    others = [
        name for name in present
        if name.endswith(".pt") and not _MODEL.fullmatch(name) and not _OPTIMIZER.fullmatch(name)
    ]
    is_universal = (directory / PARAMETERS_NAME).is_dir()
    if all(rank for rank, _, _ in ranked):
        raise DamagedError(
            f"{directory} has no model states of rank 0", next="copy the whole directory again"
        )
    if is_universal:
        return _FileNames([name for rank, _, name in ranked if rank == 0], [], others, is_universal)
    parallel = {mp for _, mp, _ in ranked} | {int(match[3]) for match in states}
    if len(parallel) > 1 or any(name.startswith(("layer_", "expp_rank_")) for name in others):
        reason = "tensor or pipeline parallelism" if len(parallel) > 1 else "layers or experts in separate files"
        raise UnsupportedFormatError(f"{directory} was saved with {reason}", next=_TO_UNIVERSAL)
    kinds = {match[1] for match in states}
    ranks = sorted(int(match[2]) for match in states)
    if len(kinds) > 1 or ranks != list(range(len(ranks))):
        called = " and ".join(sorted(f"{kind}zero_*" for kind in kinds))
        raise DamagedError(
            f"{directory} lacks optimizer states of some ranks, or mixes files of different jobs",
            found=f"ranks {ranks}, in files named {called}"[:300], expected="one file per rank",
            next="copy the whole directory again",
        )
    ordered = sorted(states, key=lambda match: int(match[2]))
    return _FileNames([name for *_, name in ranked], [match[0] for match in ordered], others, is_universal)


def _model_states(files: DeepSpeedFiles, path: Path) -> dict[str, object]:
    value = files.read(path)
    module = value.get("module") if isinstance(value, dict) else None
    if not isinstance(module, dict) or not all(isinstance(name, str) for name in module):
        raise DamagedError(f"{path} has no `module`, a dict of tensors by name", next="copy the whole directory again")
    return cast("dict[str, object]", value)


def _module(state: Mapping[str, object]) -> dict[str, object]:
    return cast("dict[str, object]", state["module"])


def _shapes(state: Mapping[str, object], files: DeepSpeedFiles) -> Shapes | None:
    shapes = state.get("param_shapes")
    return None if shapes is None else read_shapes(shapes, files.location)


def _is_reordered(state: Mapping[str, object]) -> bool:
    """Whether parameters were assigned to ranks in turn (`round_robin_gradients`) before they were flattened."""
    config = state.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return isinstance(zero, dict) and zero.get("round_robin_gradients") is True


def _partitioned(
    directory: Path, names: _FileNames, models: Sequence[dict[str, object]], files: DeepSpeedFiles
) -> ZeroState:
    shapes = _shapes(models[0], files)
    if shapes is None:
        raise DamagedError(f"{directory / names.models[0]} has no param_shapes", next="copy the whole directory again")
    states: list[dict[str, object]] = []
    versions = {str(model.get("ds_version")): name for model, name in zip(models, names.models, strict=True)}
    for name in names.optimizers:
        value = files.read(directory / name)
        state = value.get("optimizer_state_dict") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(state, dict):
            raise DamagedError(f"{directory / name} has no optimizer_state_dict", next="copy the file again")
        versions.setdefault(str(value.get("ds_version")), name)
        states.append(state)
    if len(versions) > 1:
        raise DamagedError(
            f"{directory} mixes files of different versions of DeepSpeed",
            found=", ".join(f"{version} ({name})" for version, name in versions.items())[:300],
            next="copy the whole directory again, or remove the files of an older job",
        )
    partitioned = read_partitions(states, shapes, files, is_reordered=_is_reordered(models[0]))
    if partitioned.stage == 3 and len(models) != len(states):
        raise DamagedError(
            f"{directory} has model states of {len(models)} ranks",
            expected=f"{len(states)} ranks, as many as have optimizer states", next="copy the files of all ranks",
        )
    return partitioned


class _DeepSpeedAssembly:
    """Assembles the sections of a checkpoint from the content of its files."""

    def __init__(
        self, models: Sequence[dict[str, object]], partitioned: ZeroState | None, files: DeepSpeedFiles
    ) -> None:
        self._models, self._state, self._files = models, models[0], files
        self._partitioned = partitioned
        self._parameters = {parameter.name: parameter for parameter in partitioned.parameters} if partitioned else {}
        self._tree = PickleTree(files.storage_range, files.location)
        self._tensors: list[SourceTensor] = []
        self._aliases: list[Alias] = []

    def source(self) -> SourceCheckpoint:
        objects: dict[str, object] = {"model": self._model()}
        if self._partitioned is not None:
            objects |= {"master": {}, "optimizer": self._optimizer(self._partitioned)}
        elif self._state.get("optimizer") is not None:
            objects["optimizer"] = self._tree.section("optimizer", self._state["optimizer"])
        if self._state.get("lr_scheduler") is not None:
            objects["lr_scheduler"] = self._tree.section("lr_scheduler", self._state["lr_scheduler"])
        objects["deepspeed"] = self._tree.section("deepspeed", self._engine())
        client = {key: value for key, value in self._state.items() if key not in OWN_KEYS and key not in ENGINE_KEYS}
        if client:
            objects["client_state"] = self._tree.section("client_state", client)
        check_sections(objects, self._files.location)
        ordered = in_file_order((*self._tensors, *self._tree.tensors))
        return check_source(SourceCheckpoint(
            "deepspeed", self._files.location, tuple(self._files.files), ordered,
            (*self._aliases, *self._tree.aliases), objects, unmapped=tuple(self._tree.unmapped),
        ))

    def _engine(self) -> dict[str, object]:
        engine = {key: self._state[key] for key in ENGINE_KEYS if self._state.get(key) is not None}
        if self._partitioned is not None:
            engine |= {"zero_stage": self._partitioned.stage, "optimizer": self._partitioned.scalars}
        return engine

    def _model(self) -> object:
        """The module's tensors. With ZeRO 3 the module's files have none, so the optimizer's fp32 weights replace them.
        """
        shared = cast("dict[str, str]", self._state.get("shared_params") or {})
        shapes = self._state.get("frozen_param_shapes")
        frozen = read_shapes(shapes, self._files.location)[0] if shapes and self._stage == 3 else {}
        other: dict[str, object] = {}
        for name, value in _module(self._state).items():
            owner = shared.get(name, name)
            parameter = self._parameters.get(owner)
            if isinstance(value, TensorView) and parameter is not None and value.shape != parameter.shape:
                self._check_placeholder(name, value, parameter)
                self._aliases.append(Alias(f"model.{name}", f"master.{owner}"))
            elif owner in frozen and isinstance(value, TensorView) and value.shape != frozen[owner]:
                self._tensors.append(self._frozen(name, owner, frozen[owner]))
            elif isinstance(value, TensorView):
                self._tree.add(f"model.{name}", value)
            else:
                other[name] = self._tree.section(f"model.{name}", value)
        missing = sorted(self._parameters.keys() - _module(self._state).keys())
        if missing:
            raise DamagedError(
                f"{self._files.location}: the optimizer has parameters that are not in the model",
                found=", ".join(missing[:4]), next="copy the whole directory again",
            )
        for parameter in self._parameters.values():
            self._tensors.append(self._whole(f"master.{parameter.name}", parameter.shape, parameter.slots[MASTER]))
        return {name: value for name, value in other.items() if value is not None}

    @property
    def _stage(self) -> int:
        return 0 if self._partitioned is None else self._partitioned.stage

    def _check_placeholder(self, name: str, value: TensorView, parameter: ZeroParameter) -> None:
        """Check that a tensor whose shape differs from its parameter's is an empty placeholder, as ZeRO 3 writes it."""
        is_part = self._files_have_parts and math.prod(value.shape) <= math.prod(parameter.shape)
        if math.prod(value.shape) and not is_part:
            raise DamagedError(
                f"{self._files.location}: {name!r:.200} has another shape in the model than in the optimizer",
                found=str(value.shape), expected=str(parameter.shape), next="copy the whole directory again",
            )

    @property
    def _files_have_parts(self) -> bool:
        """Whether each of the module's files has only one model-parallel rank's parts of the tensors. This occurs only
        in a Universal Checkpoint.
        """
        dimensions = self._state.get("mp_world_size")
        return isinstance(dimensions, int) and dimensions > 1

    def _frozen(self, name: str, owner: str, shape: tuple[int, ...]) -> SourceTensor:
        """A frozen parameter. With ZeRO 3, each rank's file has a part of it."""
        runs, left, dtype = [], math.prod(shape), None
        for state in self._models:
            view = cast("dict[str, object]", state.get("frozen_param_fragments") or {}).get(owner)
            if not isinstance(view, TensorView):
                raise DamagedError(
                    f"{self._files.location}: the file of one rank lacks its part of {owner!r:.200}",
                    next="copy the whole directory again",
                )
            run = self._files.run(view, owner)
            runs.append(ElementRun(run.file, run.offset_bytes, min(left, run.elements)))
            left -= runs[-1].elements
            dtype = view.dtype
        assert dtype is not None, "there is a model's state"
        return self._whole(f"model.{name}", shape, ParameterSlot(dtype, tuple(runs)))

    def _optimizer(self, partitioned: ZeroState) -> object:
        """The optimizer in the form in which a Checkpointer stores one. Its parameters have their names in the section
        "model".
        """
        listed: dict[str, dict[str, object]] = {}
        for parameter in partitioned.parameters:
            path = f"model.{parameter.name}"
            for slot, runs in parameter.slots.items():
                if slot != MASTER:
                    self._tensors.append(self._whole(f"optimizer.state.{path}.{slot}", parameter.shape, runs))
            for slot, value in parameter.values.items():
                if isinstance(value, TensorView):
                    self._tree.add(f"optimizer.state.{path}.{slot}", value)
                else:
                    entry = self._tree.section(f"optimizer.state.{path}.{slot}", value)
                    listed.setdefault(path, {})[slot] = entry
        groups = [
            {"options": self._tree.section(f"optimizer.param_groups.{number}.options", dict(group.options)),
             "params": [f"model.{name}" for name in group.names]}
            for number, group in enumerate(partitioned.groups)
        ]
        return {"param_groups": groups, "state": listed, "shared": {}, "extra": {}}

    def _whole(self, name: str, shape: tuple[int, ...], slot: ParameterSlot) -> SourceTensor:
        """A tensor that is made of ranges of its elements. Each range becomes one box or a few."""
        boxes: list[StoredBox] = []
        begin = 0
        for run in slot.runs:
            offset = run.offset_bytes
            for box in linear_boxes(shape, begin, begin + run.elements):
                boxes.append(StoredBox(box, run.file, offset))
                offset += box.elements * slot.dtype.item_bytes
            begin += run.elements
        if begin != math.prod(shape):
            raise DamagedError(
                f"{self._files.location}: the ranks hold {begin} elements of {name!r:.200}",
                expected=f"{math.prod(shape)} elements for shape {shape}", next="copy the files of all ranks again",
            )
        if not boxes and slot.runs:
            boxes.append(StoredBox(Box.whole(shape), slot.runs[0].file, slot.runs[0].offset_bytes))
        return SourceTensor(name, slot.dtype, shape, tuple(boxes))
