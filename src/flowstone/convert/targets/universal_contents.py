"""What of a checkpoint has a place in a Universal Checkpoint of DeepSpeed: parameters with their slots, groups, values.

The sections are those that an import of DeepSpeed's has; and those of a job without DeepSpeed, which has a module, an
optimizer, and what else it keeps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TypeAlias, cast

import msgspec

from flowstone.config import NAMES_TOLD
from flowstone.convert.cast import CASTABLE
from flowstone.convert.layout import Output
from flowstone.convert.mapping import Mapped, Rules, leaves
from flowstone.convert.source import Source
from flowstone.convert.sources.deepspeed import ENGINE_KEYS, OWN_KEYS
from flowstone.convert.sources.deepspeed_zero import MASTER
from flowstone.errors import MismatchError, UnsupportedFormatError
from flowstone.format.objects import Named, TensorRef
from flowstone.table.dtype import DTYPES

Value: TypeAlias = object
"""None, a truth value, a number, text, bytes, a `Named` of torch, an `Output`, or a tuple, list or dict of these."""

STEP = "step"
_MASTER_SECTION, _ENGINE_SECTION, _CLIENT_SECTION = "master", "deepspeed", "client_state"
_SCHEDULERS = ("lr_scheduler", "scheduler")
_OPTIMIZER_KEYS = frozenset({"param_groups", "state"})
_NAME_BYTES_MAX = 255  # of a directory on the common file systems
_DROPPED = object()
_PLAIN = (type(None), bool, int, float, str, bytes)
_NAMED = ("torch.dtype", "torch.Size", "torch.device")


class Parameter(msgspec.Struct, frozen=True, eq=False):
    """A parameter that the optimizer owns: its slots by their names, "fp32" first, and its count of steps."""

    name: str
    slots: Mapping[str, Output]
    step: Value = None


class Group(msgspec.Struct, frozen=True, eq=False):
    """A group of the optimizer: its settings, and its members."""

    options: Value
    parameters: tuple[Parameter, ...]


class Contents(msgspec.Struct, frozen=True, eq=False):
    """All that a Universal Checkpoint holds.

    module  tensors, and other values, by the names that the module has for them
    shared  further names of parameters, each with the name that the optimizer has for it
    engine  what DeepSpeed's engine keeps, by its own keys; `scalars`: the same of its optimizer
    client  what a job is given back besides, by its keys
    lost    names of values that rules leave out
    """

    groups: tuple[Group, ...]
    module: Mapping[str, Value]
    shared: Mapping[str, str]
    engine: Mapping[str, Value]
    scalars: Mapping[str, Value]
    lr_scheduler: Value
    client: Mapping[str, Value]
    lost: tuple[str, ...]


def universal_contents(source: Source, mapped: Mapped, rules: Rules, section: str) -> Contents:
    """Find the place of everything.

    mapped   all tensors, by their whole names
    section  of the module

    raises  MismatchError           values that have no place, and that no rule leaves out
            UnsupportedFormatError  a job of model parallelism, or with experts
    """
    return _Contents(source, mapped, rules, section).collect()


class _Contents:
    """Takes the sections apart, and notes which tensors have found a place, and which values none."""

    def __init__(self, source: Source, mapped: Mapped, rules: Rules, section: str) -> None:
        self._source, self._rules, self._section = source, rules, section
        self._outputs = {output.name: output for output in mapped.outputs}
        self._outputs |= {alias.name: self._outputs[alias.target] for alias in mapped.aliases}
        self._left = dict.fromkeys(self._outputs)  # names without a place so far
        self._unplaced: list[str] = []
        self._lost: list[str] = []

    def collect(self) -> Contents:
        objects = self._wanted()
        engine = self._engine(objects.pop(_ENGINE_SECTION, {}))
        scalars = cast("dict[str, Value]", engine.pop("optimizer", {}))
        optimizer = self._optimizer_section(objects)
        groups = self._groups(optimizer, cast("dict[str, object]", objects.pop(optimizer)))
        module, shared = self._module(objects.pop(self._section, {}), groups)
        scheduler = next((name for name in _SCHEDULERS if name in objects), None)
        found = self._value(scheduler, objects.pop(scheduler)) if scheduler else None
        client = self._client(objects)
        for name in self._source.per_rank:
            self._no_place(name)
        self._unplaced += self._left
        self._check(groups)
        return Contents(
            groups, module, shared, engine, scalars, None if found is _DROPPED else found, client, tuple(self._lost)
        )

    def _wanted(self) -> dict[str, object]:
        """The sections that no rule leaves out, but for what is no part of the training state."""
        found: dict[str, object] = {}
        for section, value in self._source.objects.items():
            if self._rules.skip(section):
                self._lost += [name for name, _ in leaves(section, value)]
            elif section != _MASTER_SECTION:
                found[section] = value
        return found

    def _take(self, name: str) -> Output | None:
        self._left.pop(name, None)
        return self._outputs.get(name)

    def _no_place(self, name: str, value: object = None) -> None:
        """Note a value that has none; of a container, all that is in it."""
        for leaf, inner in leaves(name, value):
            del inner
            if self._rules.skip(leaf):
                self._lost.append(leaf)
            else:
                self._unplaced.append(leaf)

    def _check(self, groups: tuple[Group, ...]) -> None:
        if self._unplaced:
            told = ", ".join(self._unplaced[:NAMES_TOLD]) + ", ..." * (len(self._unplaced) > NAMES_TOLD)
            raise MismatchError(
                f"a Universal Checkpoint has no place for {len(self._unplaced)} values of {self._source.location}",
                differences=tuple(self._unplaced), found=told, next="leave them out with --skip PATTERN (fs.Skip)",
            )
        if not any(one.step is not None or len(one.slots) > 1 for group in groups for one in group.parameters):
            raise MismatchError(
                f"the optimizer of {self._source.location} has no state yet", expected="exp_avg, exp_avg_sq, ...",
                next="export a later step",
            )

    def _optimizer_section(self, objects: Mapping[str, object]) -> str:
        """The section that is an optimizer, as a Checkpointer stores one."""
        found = [
            name for name, value in objects.items() if isinstance(value, dict) and value.keys() >= _OPTIMIZER_KEYS
            and isinstance(value["state"], dict) and isinstance(value["param_groups"], list)
            and all(isinstance(one, dict) and {"params", "options"} <= one.keys() for one in value["param_groups"])
        ]
        if len(found) != 1:
            raise MismatchError(
                f"{self._source.location} has {len(found) or 'no'} optimizers by the names of parameters",
                differences=tuple(found), expected="one, whose groups and state a Universal Checkpoint has",
                next="leave out all others with --skip SECTION, or export another step" if found
                else "save the optimizer with the model; a model alone goes out with --to hf or --to torch",
            )
        return found[0]

    def _groups(self, section: str, stored: Mapping[str, object]) -> tuple[Group, ...]:
        slots = self._slots(section, stored)
        for key in stored.keys() - _OPTIMIZER_KEYS:
            self._no_place(f"{section}.{key}", stored[key])
        groups = []
        for number, group in enumerate(cast("list[dict[str, object]]", stored["param_groups"])):
            options = self._value(f"{section}.param_groups.{number}.options", group["options"])
            paths = cast("list[str]", group["params"])
            members = [self._parameter(section, path, slots.pop(path, {})) for path in paths]
            groups.append(Group(options, tuple(one for one in members if one is not None)))
        for path, left in slots.items():  # of no member of a group
            for slot, value in left.items():
                self._no_place(f"{section}.state.{path}.{slot}", value)
        return tuple(groups)

    def _slots(self, section: str, stored: Mapping[str, object]) -> dict[str, dict[str, Value]]:
        """The slots of each path: tensors by their names, and what the optimizer's object lists."""
        found: dict[str, dict[str, Value]] = {}
        listed = {
            ref.name for slots in cast("dict[str, dict[str, object]]", stored["state"]).values()
            for ref in slots.values() if isinstance(ref, TensorRef)
        }
        prefix = f"{section}.state."
        for name in [name for name in self._left if name.startswith(prefix) and name not in listed]:
            path, _, slot = name.removeprefix(prefix).rpartition(".")
            found.setdefault(path, {})[slot] = self._take(name)
        for path, slots in cast("dict[str, dict[str, object]]", stored["state"]).items():
            for slot, value in slots.items():
                kept = self._value(f"{prefix}{path}.{slot}", value)
                if kept is not _DROPPED:
                    found.setdefault(path, {})[slot] = kept
        return found

    def _parameter(self, section: str, path: str, slots: dict[str, Value]) -> Parameter | None:
        """A member of a group, with its master weights; None where it has no place."""
        name = path.removeprefix(f"{self._section}.")
        weights = self._outputs.get(path)
        master = self._take(f"{_MASTER_SECTION}.{name}") or weights
        if name == path or master is None or not _names_a_directory(name) or master.dtype.name not in CASTABLE:
            self._no_place(path)
            return None
        found = {MASTER: msgspec.structs.replace(master, dtype=DTYPES["float32"])
                 if master.dtype.name != "float32" else master}
        step = slots.pop(STEP, None)
        for slot, value in slots.items():
            is_whole = isinstance(value, Output) and value.tensor.shape == master.tensor.shape
            if isinstance(value, Output) and is_whole and slot != MASTER and _names_a_directory(slot):
                found[slot] = value
            else:
                self._no_place(f"{section}.state.{path}.{slot}")
        return Parameter(name, found, step)

    def _module(self, stored: object, groups: tuple[Group, ...]) -> tuple[dict[str, Value], dict[str, str]]:
        """What the module holds, without the parameters whose master weights are all that there is of them."""
        prefix = f"{self._section}."
        module: dict[str, Value] = {}
        if isinstance(stored, dict):
            for key, value in stored.items():
                kept = self._value(f"{prefix}{key}", value)
                if kept is not _DROPPED:
                    module[str(key)] = kept
        elif stored is not None:
            self._no_place(self._section, stored)
        for name in [name for name in self._left if name.startswith(prefix)]:
            module[name.removeprefix(prefix)] = self._take(name)
        members = {one.name for group in groups for one in group.parameters}
        owners = {id(module[name]): name for name in module if name in members}
        shared = {
            name: owners[id(value)] for name, value in module.items() if name not in members and id(value) in owners
        }
        return module, shared

    def _engine(self, stored: object) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for key, value in (stored if isinstance(stored, dict) else {_ENGINE_SECTION: stored}).items():
            if key in ENGINE_KEYS or key in ("zero_stage", "optimizer"):
                kept = self._value(f"{_ENGINE_SECTION}.{key}", value)
                if kept is not _DROPPED:
                    found[str(key)] = kept
            else:
                self._no_place(f"{_ENGINE_SECTION}.{key}", value)
        experts = found.get("num_experts")
        ranks = found.get("mp_world_size", 1)
        if ranks != 1 or (isinstance(experts, list) and any(experts)):
            raise UnsupportedFormatError(
                f"{self._source.location} is of a job with " + ("experts" if ranks == 1 else "model parallelism"),
                next="convert it with python -m deepspeed.checkpoint.ds_to_universal, which knows how such a job cuts",
            )
        return found

    def _client(self, objects: Mapping[str, object]) -> dict[str, Value]:
        entries = {key: (key, value) for key, value in objects.items() if key != _CLIENT_SECTION}
        inner = objects.get(_CLIENT_SECTION, {})
        if not isinstance(inner, dict):
            entries[_CLIENT_SECTION] = _CLIENT_SECTION, inner
        else:
            entries |= {key: (f"{_CLIENT_SECTION}.{key}", value) for key, value in inner.items()}
        found: dict[str, Value] = {}
        for key, (name, value) in entries.items():
            if key in OWN_KEYS or key in ENGINE_KEYS:
                self._no_place(name, value)
                continue
            kept = self._value(name, value)
            if kept is not _DROPPED:
                found[key] = kept
        return found

    def _value(self, name: str, value: object) -> Value:
        """A value with its tensors in it, or _DROPPED; what has no place in it is noted."""
        if isinstance(value, TensorRef):
            found = self._take(value.name) if value.kind == "tensor" else None
            if found is None and not self._rules.skip(value.name):
                self._left.pop(value.name, None)
                self._unplaced.append(name)
            return _DROPPED if found is None else found
        if type(value) in (dict, OrderedDict):
            return self._dict(name, cast("dict[object, object]", value))
        if type(value) in (list, tuple):
            items = [self._value(f"{name}.{at}", one) for at, one in enumerate(cast("list[object]", value))]
            kept = [None if one is _DROPPED else one for one in items]
            return kept if type(value) is list else tuple(kept)
        is_known = type(value) in _PLAIN or (isinstance(value, Named) and value.kind in _NAMED)
        if is_known and not self._rules.skip(name):
            return value
        self._no_place(name)
        return _DROPPED

    def _dict(self, name: str, value: dict[object, object]) -> Value:
        kept: dict[object, object] = {}
        for key, inner in value.items():
            where = f"{name}.{key}"
            if type(key) not in _PLAIN:
                self._no_place(where)
                continue
            found = self._value(where, inner)
            if found is not _DROPPED:
                kept[key] = found
        return kept


def _names_a_directory(name: str) -> bool:
    """Whether a parameter's name is that of an entry below another one's, and of nothing else there."""
    is_entry = bool(name) and name not in (".", "..", "optimizer_state.pt") and "/" not in name and "\0" not in name
    return is_entry and len(f"{name}.pt".encode(errors="surrogatepass")) <= _NAME_BYTES_MAX
