"""Sort a checkpoint's values into the parts of a Universal Checkpoint: parameters with their slots (values of optimizer
state, such as exp_avg), parameter groups, and other values.

The source has the sections of an imported DeepSpeed checkpoint, or of a job without DeepSpeed: a module, an optimizer,
and other values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TypeAlias, cast

import msgspec

from flowstone.config import NAMES_LISTED_MAX
from flowstone.convert.cast import CASTABLE
from flowstone.convert.layout import Output
from flowstone.convert.mapping import ConversionRules, TensorMapping, non_tensor_leaves
from flowstone.convert.source import SourceCheckpoint
from flowstone.convert.sources.deepspeed import ENGINE_KEYS, OWN_KEYS
from flowstone.convert.sources.deepspeed_zero import MASTER
from flowstone.errors import MismatchError, UnsupportedFormatError
from flowstone.format.objects import NamedConstant, TensorRef
from flowstone.table.dtype import DTYPES

Value: TypeAlias = object
"""None, a boolean, number, string, bytes, `NamedConstant` of torch, `Output`, or a tuple, list or dict of these."""

STEP = "step"
_MASTER_SECTION, _ENGINE_SECTION, _CLIENT_SECTION = "master", "deepspeed", "client_state"
_SCHEDULERS = ("lr_scheduler", "scheduler")
_OPTIMIZER_KEYS = frozenset({"param_groups", "state"})
_NAME_BYTES_MAX = 255  # longest name of a directory on common file systems
_UNPLACED = object()
_PLAIN = (type(None), bool, int, float, str, bytes)
_NAMED = ("torch.dtype", "torch.Size", "torch.device")


class UniversalParameter(msgspec.Struct, frozen=True, eq=False):
    """A parameter of the optimizer. `slots`: its fp32 values ("fp32", which come first) and tensors of optimizer state,
    by name. `step`: its step count.
    """

    name: str
    slots: Mapping[str, Output]
    step: Value = None


class UniversalGroup(msgspec.Struct, frozen=True, eq=False):
    """A parameter group of the optimizer: its settings and its parameters."""

    options: Value
    parameters: tuple[UniversalParameter, ...]


class UniversalContents(msgspec.Struct, frozen=True, eq=False):
    """The content of a Universal Checkpoint.

    module  tensors and other values, by their names in the module
    shared  further name of a parameter -> the name that the optimizer uses for it
    engine  the state of DeepSpeed's engine, by its own keys
    scalars  the state of DeepSpeed's optimizer that belongs to no parameter
    client  the job's own values (client state), by its keys
    lost    names of the values that rules leave out
    """

    groups: tuple[UniversalGroup, ...]
    module: Mapping[str, Value]
    shared: Mapping[str, str]
    engine: Mapping[str, Value]
    scalars: Mapping[str, Value]
    lr_scheduler: Value
    client: Mapping[str, Value]
    lost: tuple[str, ...]


def universal_contents(
    source: SourceCheckpoint, mapped: TensorMapping, rules: ConversionRules, section: str
) -> UniversalContents:
    """Assign every tensor and value to a part of the target.

    mapped   all tensors, by their full names
    section  the name of the section that has the module

    raises  MismatchError           there are values that the target cannot hold, and that no rule leaves out
            UnsupportedFormatError  the checkpoint is of a job with model parallelism or experts
    """
    return _ContentsBuilder(source, mapped, rules, section).collect()


class _ContentsBuilder:
    """Assigns the values of all sections to the parts of a Universal Checkpoint. Records which tensors were assigned,
    and which values the target cannot hold.
    """

    def __init__(self, source: SourceCheckpoint, mapped: TensorMapping, rules: ConversionRules, section: str) -> None:
        self._source, self._rules, self._section = source, rules, section
        self._outputs = {output.name: output for output in mapped.outputs}
        self._outputs |= {alias.name: self._outputs[alias.target] for alias in mapped.aliases}
        self._unassigned = dict.fromkeys(self._outputs)  # names that are not assigned yet
        self._unplaced: list[str] = []
        self._lost: list[str] = []

    def collect(self) -> UniversalContents:
        objects = self._sections()
        engine = self._engine(objects.pop(_ENGINE_SECTION, {}))
        scalars = cast("dict[str, Value]", engine.pop("optimizer", {}))
        optimizer = self._optimizer_section(objects)
        groups = self._groups(optimizer, cast("dict[str, object]", objects.pop(optimizer)))
        module, shared = self._module(objects.pop(self._section, {}), groups)
        scheduler = next((name for name in _SCHEDULERS if name in objects), None)
        rates = self._value(scheduler, objects.pop(scheduler)) if scheduler else None
        client = self._client(objects)
        for name in self._source.per_rank:
            self._record_unplaced(name)
        self._unplaced += self._unassigned
        self._check(groups)
        return UniversalContents(
            groups, module, shared, engine, scalars, None if rates is _UNPLACED else rates, client, tuple(self._lost)
        )

    def _sections(self) -> dict[str, object]:
        """The sections of the training state that no rule leaves out."""
        sections: dict[str, object] = {}
        for section, value in self._source.objects.items():
            if self._rules.skip(section):
                self._lost += [name for name, _ in non_tensor_leaves(section, value)]
            elif section != _MASTER_SECTION:
                sections[section] = value
        return sections

    def _assign(self, name: str) -> Output | None:
        self._unassigned.pop(name, None)
        return self._outputs.get(name)

    def _record_unplaced(self, name: str, value: object = None) -> None:
        """Record a value that the target cannot hold. For a container, all values in it are recorded."""
        for leaf, inner in non_tensor_leaves(name, value):
            del inner
            if self._rules.skip(leaf):
                self._lost.append(leaf)
            else:
                self._unplaced.append(leaf)

    def _check(self, groups: tuple[UniversalGroup, ...]) -> None:
        if self._unplaced:
            shown = ", ".join(self._unplaced[:NAMES_LISTED_MAX]) + ", ..." * (len(self._unplaced) > NAMES_LISTED_MAX)
            raise MismatchError(
                f"a Universal Checkpoint cannot hold {len(self._unplaced)} values of {self._source.location}",
                differences=tuple(self._unplaced), found=shown, next="leave them out with --skip PATTERN (fs.Skip)",
            )
        if not any(p.step is not None or len(p.slots) > 1 for group in groups for p in group.parameters):
            raise MismatchError(
                f"the optimizer of {self._source.location} has no state yet", expected="exp_avg, exp_avg_sq, ...",
                next="export a later step",
            )

    def _optimizer_section(self, objects: Mapping[str, object]) -> str:
        """The name of the section that has an optimizer in the form in which a Checkpointer stores one."""
        optimizers = [
            name for name, value in objects.items() if isinstance(value, dict) and value.keys() >= _OPTIMIZER_KEYS
            and isinstance(value["state"], dict) and isinstance(value["param_groups"], list)
            and all(isinstance(g, dict) and {"params", "options"} <= g.keys() for g in value["param_groups"])
        ]
        if len(optimizers) != 1:
            raise MismatchError(
                f"{self._source.location} has {len(optimizers) or 'no'} optimizers with named parameters",
                differences=tuple(optimizers), expected="exactly one",
                next="leave out all but one of them with --skip SECTION, or export another step" if optimizers
                else "save the optimizer with the model; to export only a model, use --to hf or --to torch",
            )
        return optimizers[0]

    def _groups(self, section: str, stored: Mapping[str, object]) -> tuple[UniversalGroup, ...]:
        slots = self._slots(section, stored)
        for key in stored.keys() - _OPTIMIZER_KEYS:
            self._record_unplaced(f"{section}.{key}", stored[key])
        groups = []
        for number, group in enumerate(cast("list[dict[str, object]]", stored["param_groups"])):
            options = self._value(f"{section}.param_groups.{number}.options", group["options"])
            paths = cast("list[str]", group["params"])
            members = [self._parameter(section, path, slots.pop(path, {})) for path in paths]
            groups.append(UniversalGroup(options, tuple(member for member in members if member is not None)))
        for path, left in slots.items():  # slots of a parameter that is in no group
            for slot, value in left.items():
                self._record_unplaced(f"{section}.state.{path}.{slot}", value)
        return tuple(groups)

    def _slots(self, section: str, stored: Mapping[str, object]) -> dict[str, dict[str, Value]]:
        """name of a parameter -> its slots: its tensors of optimizer state, and other values in the optimizer's object.
        """
        result: dict[str, dict[str, Value]] = {}
        listed = {
            ref.name for slots in cast("dict[str, dict[str, object]]", stored["state"]).values()
            for ref in slots.values() if isinstance(ref, TensorRef)
        }
        prefix = f"{section}.state."
        for name in [name for name in self._unassigned if name.startswith(prefix) and name not in listed]:
            path, _, slot = name.removeprefix(prefix).rpartition(".")
            result.setdefault(path, {})[slot] = self._assign(name)
        for path, slots in cast("dict[str, dict[str, object]]", stored["state"]).items():
            for slot, value in slots.items():
                stored_value = self._value(f"{prefix}{path}.{slot}", value)
                if stored_value is not _UNPLACED:
                    result.setdefault(path, {})[slot] = stored_value
        return result

    def _parameter(self, section: str, path: str, slots: dict[str, Value]) -> UniversalParameter | None:
        """A parameter of a group, with its fp32 weights. None if the target cannot hold it."""
        name = path.removeprefix(f"{self._section}.")
        weights = self._outputs.get(path)
        master = self._assign(f"{_MASTER_SECTION}.{name}") or weights
        if name == path or master is None or not _names_a_directory(name) or master.dtype.name not in CASTABLE:
            self._record_unplaced(path)
            return None
        slot_outputs = {MASTER: msgspec.structs.replace(master, dtype=DTYPES["float32"])
                 if master.dtype.name != "float32" else master}
        step = slots.pop(STEP, None)
        for slot, value in slots.items():
            is_whole = isinstance(value, Output) and value.tensor.shape == master.tensor.shape
            if isinstance(value, Output) and is_whole and slot != MASTER and _names_a_directory(slot):
                slot_outputs[slot] = value
            else:
                self._record_unplaced(f"{section}.state.{path}.{slot}")
        return UniversalParameter(name, slot_outputs, step)

    def _module(self, stored: object, groups: tuple[UniversalGroup, ...]) -> tuple[dict[str, Value], dict[str, str]]:
        """The module's tensors and values, except parameters that exist only as the optimizer's fp32 weights; and
        further names of parameters.
        """
        prefix = f"{self._section}."
        module: dict[str, Value] = {}
        if isinstance(stored, dict):
            for key, value in stored.items():
                module_value = self._value(f"{prefix}{key}", value)
                if module_value is not _UNPLACED:
                    module[str(key)] = module_value
        elif stored is not None:
            self._record_unplaced(self._section, stored)
        for name in [name for name in self._unassigned if name.startswith(prefix)]:
            module[name.removeprefix(prefix)] = self._assign(name)
        members = {parameter.name for group in groups for parameter in group.parameters}
        owners = {id(module[name]): name for name in module if name in members}
        shared = {
            name: owners[id(value)] for name, value in module.items() if name not in members and id(value) in owners
        }
        return module, shared

    def _engine(self, stored: object) -> dict[str, Value]:
        entries: dict[str, Value] = {}
        for key, value in (stored if isinstance(stored, dict) else {_ENGINE_SECTION: stored}).items():
            if key in ENGINE_KEYS or key in ("zero_stage", "optimizer"):
                entry = self._value(f"{_ENGINE_SECTION}.{key}", value)
                if entry is not _UNPLACED:
                    entries[str(key)] = entry
            else:
                self._record_unplaced(f"{_ENGINE_SECTION}.{key}", value)
        experts = entries.get("num_experts")
        ranks = entries.get("mp_world_size", 1)
        if ranks != 1 or (isinstance(experts, list) and any(experts)):
            raise UnsupportedFormatError(
                f"{self._source.location} comes from a job with " + ("experts" if ranks == 1 else "model parallelism"),
                next="convert the original DeepSpeed checkpoint with python -m deepspeed.checkpoint.ds_to_universal",
            )
        return entries

    def _client(self, objects: Mapping[str, object]) -> dict[str, Value]:
        entries = {key: (key, value) for key, value in objects.items() if key != _CLIENT_SECTION}
        inner = objects.get(_CLIENT_SECTION, {})
        if not isinstance(inner, dict):
            entries[_CLIENT_SECTION] = _CLIENT_SECTION, inner
        else:
            entries |= {key: (f"{_CLIENT_SECTION}.{key}", value) for key, value in inner.items()}
        result: dict[str, Value] = {}
        for key, (name, value) in entries.items():
            if key in OWN_KEYS or key in ENGINE_KEYS:
                self._record_unplaced(name, value)
                continue
            entry = self._value(name, value)
            if entry is not _UNPLACED:
                result[key] = entry
        return result

    def _value(self, name: str, value: object) -> Value:
        """A value with its tensors; _UNPLACED if nothing of it is left. Parts that the target cannot hold are recorded.
        """
        if isinstance(value, TensorRef):
            output = self._assign(value.name) if value.kind == "tensor" else None
            if output is None and not self._rules.skip(value.name):
                self._unassigned.pop(value.name, None)
                self._unplaced.append(name)
            return _UNPLACED if output is None else output
        if type(value) in (dict, OrderedDict):
            return self._dict(name, cast("dict[object, object]", value))
        if type(value) in (list, tuple):
            items = [self._value(f"{name}.{number}", inner) for number, inner in enumerate(cast("list[object]", value))]
            kept_items = [None if item is _UNPLACED else item for item in items]
            return kept_items if type(value) is list else tuple(kept_items)
        is_known = type(value) in _PLAIN or (isinstance(value, NamedConstant) and value.kind in _NAMED)
        if is_known and not self._rules.skip(name):
            return value
        self._record_unplaced(name)
        return _UNPLACED

    def _dict(self, name: str, value: dict[object, object]) -> Value:
        entries: dict[object, object] = {}
        for key, inner in value.items():
            where = f"{name}.{key}"
            if type(key) not in _PLAIN:
                self._record_unplaced(where)
                continue
            entry = self._value(where, inner)
            if entry is not _UNPLACED:
                entries[key] = entry
        return entries


def _names_a_directory(name: str) -> bool:
    """Whether a name is valid as the name of a parameter's directory, or of a file in it."""
    is_entry = bool(name) and name not in (".", "..", "optimizer_state.pt") and "/" not in name and "\0" not in name
    return is_entry and len(f"{name}.pt".encode(errors="surrogatepass")) <= _NAME_BYTES_MAX
