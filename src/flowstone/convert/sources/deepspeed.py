"""A checkpoint of DeepSpeed as a source: ZeRO of any stage, and Universal Checkpoints. Nothing in it is executed."""

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
from flowstone.convert.source import Source, Unmapped, check_source, in_file_order, is_inner, open_plain
from flowstone.convert.sources.deepspeed_files import DeepSpeedFiles, Run
from flowstone.convert.sources.deepspeed_universal import PARAMETERS_NAME, read_universal
from flowstone.convert.sources.deepspeed_zero import (
    MASTER,
    Parameter,
    Partitioned,
    Shapes,
    Slot,
    read_partitions,
    read_shapes,
)
from flowstone.convert.sources.torch_values import TensorView
from flowstone.convert.sources.tree import Tree, check_sections
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
"""What DeepSpeed itself writes into a model's states, and becomes a section, or tensors."""
ENGINE_KEYS = (
    "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version", "num_experts", "ds_autoep_layers",
)
"""What it keeps of the engine itself: the section "deepspeed"."""
_TO_UNIVERSAL = "convert it first: python -m deepspeed.checkpoint.ds_to_universal, then import what that has written"


class _Names(msgspec.Struct, frozen=True):
    """The files of a directory. `others`: what a reader of these two would miss."""

    models: list[str]
    optimizers: list[str]
    others: list[str]
    is_universal: bool


def is_deepspeed(path: Path) -> bool:
    """Whether a directory is a checkpoint of DeepSpeed, or has a tag that names one."""
    if not path.is_dir():
        return False
    return any(_MODEL.fullmatch(name) for name in os.listdir(_tagged(path)))


def read_deepspeed(path: Path) -> Source:
    """What the checkpoint holds: the sections model, master, optimizer, lr_scheduler, client_state and deepspeed.

    path  a directory of checkpoints, of which its `latest` names one, or one of these

    raises  DamagedError            files are missing or torn, or contradict each other
            UnsupportedFormatError  a layout that cannot be put together from files alone
    """
    directory = _tagged(path)
    with closing(DeepSpeedFiles(str(directory))) as files:
        return _source(directory, files)


def _source(directory: Path, files: DeepSpeedFiles) -> Source:
    names = _names(directory)
    models = [_model_states(files, directory / name) for name in names.models]
    if names.is_universal:
        shapes = [_shapes(one, files) or [] for one in models]
        buffers = frozenset(name for one in models for name in _module(one)) - {
            name for one in shapes for group in one for name in group
        }
        partitioned = read_universal(directory, shapes, buffers, files)
        module = {name: view for one in reversed(models) for name, view in _module(one).items()}
        models = [{**models[0], "module": module}]
    elif names.optimizers:
        partitioned = _partitioned(directory, names, models, files)
    else:
        partitioned = None
        _check_whole(directory, models[0], files)
    source = _Assembly(models, partitioned, files).source()
    unmapped = [Unmapped(name, "a file of a kind that is not known") for name in names.others]
    return msgspec.structs.replace(source, unmapped=(*source.unmapped, *unmapped))


def _check_whole(directory: Path, state: Mapping[str, object], files: DeepSpeedFiles) -> None:
    """Without optimizer states: refuse a module whose parameters lie in those alone, as ZeRO 3 has them."""
    module = _module(state)
    for group in _shapes(state, files) or []:
        for name, shape in group.items():
            kept = module.get(name)
            if isinstance(kept, TensorView) and kept.shape != shape:
                raise DamagedError(
                    f"{directory} has no optimizer states, which hold the parameters of ZeRO 3", found=name,
                    expected="a *_optim_states.pt of each rank", next="copy the whole directory again",
                )


def _tagged(path: Path) -> Path:
    """The directory that `latest` names, or the path itself if it has none. Raises DamagedError."""
    for name in _LATEST:
        if (path / name).is_file():
            with translated(path, "read", name), open_plain(path / name) as opened:
                tag = opened.read(4096).decode(errors="replace").strip()
            if "/" in tag or not is_inner(tag) or not (path / tag).is_dir():
                raise DamagedError(
                    f"{path / name} names {tag!r:.80}, which is no directory there", next="give the directory itself"
                )
            return path / tag
    return path


def _names(directory: Path) -> _Names:
    with translated(directory, "list", "."):
        present = sorted(os.listdir(directory))
    models = [found for name in present if (found := _MODEL.fullmatch(name))]
    ranked = sorted((int(found[1] or 0), int(found[2]), found[0]) for found in models)
    states = [found for name in present if (found := _OPTIMIZER.fullmatch(name))]
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
        return _Names([name for rank, _, name in ranked if rank == 0], [], others, is_universal)
    parallel = {mp for _, mp, _ in ranked} | {int(found[3]) for found in states}
    if len(parallel) > 1 or any(name.startswith(("layer_", "expp_rank_")) for name in others):
        what = "tensor or pipeline parallelism" if len(parallel) > 1 else "layers or experts in files of their own"
        raise UnsupportedFormatError(f"{directory} was saved with {what}", next=_TO_UNIVERSAL)
    kinds = {found[1] for found in states}
    ranks = sorted(int(found[2]) for found in states)
    if len(kinds) > 1 or ranks != list(range(len(ranks))):
        called = " and ".join(sorted(f"{kind}zero_*" for kind in kinds))
        raise DamagedError(
            f"{directory} lacks optimizer states, or mixes those of different jobs",
            found=f"ranks {ranks}, in files called {called}"[:300], expected="one file of each rank",
            next="copy the whole directory again",
        )
    ordered = sorted(states, key=lambda found: int(found[2]))
    return _Names([name for *_, name in ranked], [found[0] for found in ordered], others, is_universal)


def _model_states(files: DeepSpeedFiles, path: Path) -> dict[str, object]:
    value = files.read(path)
    module = value.get("module") if isinstance(value, dict) else None
    if not isinstance(module, dict) or not all(isinstance(name, str) for name in module):
        raise DamagedError(f"{path} has no module with tensors by name", next="copy the whole directory again")
    return cast("dict[str, object]", value)


def _module(state: Mapping[str, object]) -> dict[str, object]:
    return cast("dict[str, object]", state["module"])


def _shapes(state: Mapping[str, object], files: DeepSpeedFiles) -> Shapes | None:
    found = state.get("param_shapes")
    return None if found is None else read_shapes(found, files.location)


def _is_reordered(state: Mapping[str, object]) -> bool:
    """Whether parameters were dealt to the ranks by turns before they were flattened."""
    config = state.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return isinstance(zero, dict) and zero.get("round_robin_gradients") is True


def _partitioned(
    directory: Path, names: _Names, models: Sequence[dict[str, object]], files: DeepSpeedFiles
) -> Partitioned:
    shapes = _shapes(models[0], files)
    if shapes is None:
        raise DamagedError(f"{directory / names.models[0]} has no param_shapes", next="copy the whole directory again")
    states: list[dict[str, object]] = []
    versions = {str(one.get("ds_version")): name for one, name in zip(models, names.models, strict=True)}
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
            next="copy the whole directory again, or remove what an older job has left there",
        )
    found = read_partitions(states, shapes, files, is_reordered=_is_reordered(models[0]))
    if found.stage == 3 and len(models) != len(states):
        raise DamagedError(
            f"{directory} has model states of {len(models)} ranks", expected=str(len(states)),
            next="copy those of all ranks",
        )
    return found


class _Assembly:
    """The sections of a checkpoint, out of what its files hold."""

    def __init__(
        self, models: Sequence[dict[str, object]], partitioned: Partitioned | None, files: DeepSpeedFiles
    ) -> None:
        self._models, self._state, self._files = models, models[0], files
        self._partitioned = partitioned
        self._parameters = {one.name: one for one in partitioned.parameters} if partitioned else {}
        self._tree = Tree(files.place, files.location)
        self._tensors: list[SourceTensor] = []
        self._aliases: list[Alias] = []

    def source(self) -> Source:
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
        return check_source(Source(
            "deepspeed", self._files.location, tuple(self._files.opened), ordered,
            (*self._aliases, *self._tree.aliases), objects, unmapped=tuple(self._tree.unmapped),
        ))

    def _engine(self) -> dict[str, object]:
        found = {key: self._state[key] for key in ENGINE_KEYS if self._state.get(key) is not None}
        if self._partitioned is not None:
            found |= {"zero_stage": self._partitioned.stage, "optimizer": self._partitioned.scalars}
        return found

    def _model(self) -> object:
        """The module's own tensors. Of ZeRO 3 it holds none: the master weights are the model's then."""
        shared = cast("dict[str, str]", self._state.get("shared_params") or {})
        shapes = self._state.get("frozen_param_shapes")
        frozen = read_shapes(shapes, self._files.location)[0] if shapes and self._stage == 3 else {}
        kept: dict[str, object] = {}
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
                kept[name] = self._tree.section(f"model.{name}", value)
        missing = sorted(self._parameters.keys() - _module(self._state).keys())
        if missing:
            raise DamagedError(
                f"{self._files.location}: the optimizer has parameters that the model lacks",
                found=", ".join(missing[:4]), next="copy the whole directory again",
            )
        for parameter in self._parameters.values():
            self._tensors.append(self._whole(f"master.{parameter.name}", parameter.shape, parameter.slots[MASTER]))
        return {name: value for name, value in kept.items() if value is not None}

    @property
    def _stage(self) -> int:
        return 0 if self._partitioned is None else self._partitioned.stage

    def _check_placeholder(self, name: str, value: TensorView, parameter: Parameter) -> None:
        """A tensor of another shape than its parameter's has to be the empty one that ZeRO 3 leaves."""
        is_part = self._files_have_parts and math.prod(value.shape) <= math.prod(parameter.shape)
        if math.prod(value.shape) and not is_part:
            raise DamagedError(
                f"{self._files.location}: {name!r:.200} has another shape in the model than in the optimizer",
                found=str(value.shape), expected=str(parameter.shape), next="copy the whole directory again",
            )

    @property
    def _files_have_parts(self) -> bool:
        """Whether a model's tensors are those of one model-parallel rank: of a Universal Checkpoint."""
        dimensions = self._state.get("mp_world_size")
        return isinstance(dimensions, int) and dimensions > 1

    def _frozen(self, name: str, owner: str, shape: tuple[int, ...]) -> SourceTensor:
        """A parameter that no optimizer owns, of which each rank of ZeRO 3 has a part."""
        runs, left, dtype = [], math.prod(shape), None
        for state in self._models:
            view = cast("dict[str, object]", state.get("frozen_param_fragments") or {}).get(owner)
            if not isinstance(view, TensorView):
                raise DamagedError(
                    f"{self._files.location}: a rank lacks its part of {owner!r:.200}", next="copy it again"
                )
            run = self._files.run(view, owner)
            runs.append(Run(run.file, run.offset_bytes, min(left, run.elements)))
            left -= runs[-1].elements
            dtype = view.dtype
        assert dtype is not None, "there is a model's state"
        return self._whole(f"model.{name}", shape, Slot(dtype, tuple(runs)))

    def _optimizer(self, partitioned: Partitioned) -> object:
        """The optimizer as a Checkpointer stores it, by its parameters' names in the section "model"."""
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
                    kept = self._tree.section(f"optimizer.state.{path}.{slot}", value)
                    listed.setdefault(path, {})[slot] = kept
        groups = [
            {"options": self._tree.section(f"optimizer.param_groups.{number}.options", dict(group.options)),
             "params": [f"model.{name}" for name in group.names]}
            for number, group in enumerate(partitioned.groups)
        ]
        return {"param_groups": groups, "state": listed, "shared": {}, "extra": {}}

    def _whole(self, name: str, shape: tuple[int, ...], slot: Slot) -> SourceTensor:
        """A tensor of runs of its elements, each of which is a few boxes of it."""
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
                expected=f"{math.prod(shape)}, of shape {shape}", next="copy the files of all ranks again",
            )
        if not boxes and slot.runs:
            boxes.append(StoredBox(Box.whole(shape), slot.runs[0].file, slot.runs[0].offset_bytes))
        return SourceTensor(name, slot.dtype, shape, tuple(boxes))
