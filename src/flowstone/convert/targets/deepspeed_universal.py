"""A Universal Checkpoint as a target, in the form of DeepSpeed's `ds_to_universal`: a directory for each parameter,
with a file for its fp32 values and one for each tensor of its optimizer state; and files with the states of optimizer
and engine.

ZeRO 1 and 2 read some values from other files than ZeRO 3, so both kinds of files are written.
"""

from __future__ import annotations

from collections.abc import Mapping

from flowstone.convert.layout import Extent, Output, TargetFile, TargetLayout
from flowstone.convert.sources.deepspeed_universal import OPTIMIZER_NAME, PARAMETERS_NAME
from flowstone.convert.targets.pickle_writer import Instance, Name, PickledCall, write_pickle
from flowstone.convert.targets.torch_archive import lay_out_archive
from flowstone.convert.targets.torch_file import archive_entries, size_call, tensor_call
from flowstone.convert.targets.universal_contents import STEP, UniversalContents, UniversalParameter, Value
from flowstone.format.objects import NamedConstant
from flowstone.table.stored import SourceTensor

_WRITTEN_AS = "0.19.8"  # the version of DeepSpeed that writes this layout
_LATEST = "latest_universal"
_MODEL_STATES = "mp_rank_00_model_states.pt"
_SCALERS = "deepspeed.runtime.fp16.loss_scaler"


def lay_out_universal(contents: UniversalContents, step: int | None) -> tuple[TargetLayout, Mapping[str, bytes]]:
    """The layout of the files, and the small file `latest_universal`, which names their directory.

    step  the job's step count; used if the state of DeepSpeed's engine has none
    """
    engine = {
        "global_steps": step or 0, "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 1,
        "ds_version": _WRITTEN_AS, **{key: value for key, value in contents.engine.items() if key != "zero_stage"},
    }
    tag = f"global_step{engine['global_steps']}_universal"
    files = _Files(tag)
    for group in contents.groups:
        for parameter in group.parameters:
            place = f"{PARAMETERS_NAME}/{parameter.name}"
            for slot, output in parameter.slots.items():
                files.add(f"{place}/{slot}.pt", {"cat_dim": 0, "param": output})
            if parameter.step is not None:
                files.add(f"{place}/{STEP}.pt", parameter.step)
    files.add(f"{PARAMETERS_NAME}/{OPTIMIZER_NAME}", _optimizer(contents, engine["ds_version"]))
    state = _model_state(contents, engine)
    files.add(_MODEL_STATES, state)
    files.add(f"zero_pp_rank_0_{_MODEL_STATES}", {**state, "module": {}})  # ZeRO 3 reads this file
    return files.layout(), {_LATEST: tag.encode()}


def _optimizer(contents: UniversalContents, version: Value) -> dict[str, Value]:
    """The state of the optimizer that belongs to no single parameter. ZeRO 3 reads the step count and the groups from
    it.
    """
    options = [group.options if isinstance(group.options, dict) else {} for group in contents.groups]
    groups = [{**group_options, "params": [number]} for number, group_options in enumerate(options)]
    steps = [next((p.step for p in group.parameters if p.step is not None), None) for group in contents.groups]
    states = {number: {STEP: step} for number, step in enumerate(steps) if step is not None}
    state = {name: _scaler(value) if name == "loss_scaler" else value for name, value in contents.scalars.items()}
    if "zero_stage" in contents.engine:
        state["zero_stage"] = contents.engine["zero_stage"]
    return {
        **state, "ds_version": version, "param_groups": groups,
        "optimizer_state_dict": {"state": states, "param_groups": groups},
    }


def _scaler(fields: Value) -> Value:
    """A loss scaler object of DeepSpeed with these fields."""
    if not isinstance(fields, dict):
        return fields
    return Instance(Name(_SCALERS, "DynamicLossScaler" if fields.get("dynamic") else "LossScaler"), fields)


def _model_state(contents: UniversalContents, engine: Mapping[str, Value]) -> dict[str, Value]:
    masters = {parameter.name: parameter.slots["fp32"] for group in contents.groups for parameter in group.parameters}
    module: dict[str, Value] = {}
    for name, value in contents.module.items():
        is_master = isinstance(value, Output) and value is masters.get(contents.shared.get(name, name))
        module[name] = _without_elements(value) if is_master and isinstance(value, Output) else value
    shapes = [
        PickledCall(Name("collections", "OrderedDict"), ([(p.name, size_call(_shape(p))) for p in group.parameters],))
        for group in contents.groups
    ]
    return {
        "module": module, "optimizer": None, "param_shapes": shapes, "shared_params": dict(contents.shared),
        "lr_scheduler": contents.lr_scheduler, "data_sampler": None, **engine, **contents.client,
    }


def _without_elements(output: Output) -> Output:
    """For a parameter whose elements are in other files: an empty tensor as a placeholder, as ZeRO 3 writes it."""
    return Output("", SourceTensor("", output.dtype, (0,), ()), output.dtype)


def _shape(parameter: UniversalParameter) -> tuple[int, ...]:
    return parameter.slots["fp32"].tensor.shape


class _Files:
    """Plans the layout of one archive after the other in the directory `tag`."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._outputs: list[Output] = []
        self._rows: dict[tuple[str, str], int] = {}
        self._files: list[TargetFile] = []
        self._checks = 0

    def add(self, name: str, value: Value) -> None:
        """Add a torch.save file that contains this value."""
        used: dict[int, None] = {}
        pickled = write_pickle(self._described(value, used))
        extents, end = lay_out_archive(archive_entries(pickled, self._outputs, list(used)), 0, self._checks)
        self._checks += sum(1 for extent in extents if extent.output is not None)
        self._files.append(TargetFile(f"{self._tag}/{name}", end, tuple[Extent, ...](extents)))

    def layout(self) -> TargetLayout:
        return TargetLayout(tuple(self._outputs), tuple(self._files), "crc32")

    def _described(self, value: Value, used: dict[int, None]) -> object:
        """Describe a value for a pickle. Adds the positions of its tensors to `used`."""
        if isinstance(value, Output):
            row = self._row(value)
            used[row] = None
            return tensor_call(value, row)
        if isinstance(value, dict):
            return {key: self._described(inner, used) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._described(inner, used) for inner in value)
        if isinstance(value, NamedConstant):
            if value.kind == "torch.Size":
                return size_call([int(side) for side in value.text.split(",") if side])
            return Name("torch", value.text) if value.kind == "torch.dtype" else PickledCall(
                Name("torch", "device"), (value.text,)
            )
        if isinstance(value, Instance):
            return Instance(value.kind, self._described(value.state, used))
        return value

    def _row(self, output: Output) -> int:
        key = output.name, output.dtype.name
        if key not in self._rows:
            self._rows[key] = len(self._outputs)
            self._outputs.append(output)
        return self._rows[key]
