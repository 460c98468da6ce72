"""The values of a Lightning checkpoint. They are checked before a save in the background, and rebuilt by a load."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch

from flowstone.errors import UnsupportedFormatError, UnsupportedStateError
from flowstone.reading.checkpoint import Checkpoint
from flowstone.state import describe
from flowstone.state.classes import register_class, unknown_classes
from flowstone.state.imported import class_if_imported

_SHOWN = 20
_LEAVES = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, range})
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_REGISTER = "or register its class, if it is a dataclass, named tuple or enumeration: fs.register_class()"
_IGNORE = f"leave it out: self.save_hyperparameters(ignore=[{{name!r}}]); {_REGISTER}"
_REMEDIES = {
    "hyper_parameters": _IGNORE,
    "datamodule_hyper_parameters": _IGNORE,
    "hparams_type": "give plain values: self.save_hyperparameters(OmegaConf.to_container(config))",
    "callbacks": "let the callback's state_dict() return tensors and plain values",
    "state_dict": "let the module's get_extra_state() return tensors and plain values",
}
_PARTS_REMEDY = "save the parts of all ranks with a Checkpointer, in a callback: docs/RECIPES.md, Lightning"
_REMEDY = f"convert it to tensors or plain values before the save, or leave it out; {_REGISTER}"


def validated(checkpoint: Mapping[str, object]) -> dict[str, object]:
    """Return a copy of Lightning's checkpoint that can be stored, and loaded again.

    Containers are copied, but tensors are not. Tensors that have the same memory become one object.

    raises  UnsupportedStateError  some values cannot be stored; the error names all of them
    """
    _register_attribute_dicts()
    walk = _Validation()
    sections = {key: walk.value(item, (key,)) for key, item in checkpoint.items()}
    if walk.refused:
        raise UnsupportedStateError(
            f"{len(walk.refused)} value(s) of the checkpoint cannot be stored: nothing is pickled",
            values="\n".join(walk.refused[:_SHOWN]), next=walk.remedy,
        )
    return sections


def values_of(checkpoint: Checkpoint, sections: Iterable[str]) -> dict[str, Any]:
    """The values of these sections, in new memory, after verification.

    raises  UnsupportedFormatError  a value's class is not registered in this process
    """
    _register_attribute_dicts()
    for section in sections:
        for name in unknown_classes(checkpoint.objects[section]):
            raise UnsupportedFormatError(
                f"section {section!r} of the checkpoint has an object whose class is not registered", found=name,
                next="register it with fs.register_class() before the load",
            )
    return {section: checkpoint.state_dict(section) for section in sections}


def _register_attribute_dicts() -> None:
    """Register the class AttributeDict of the Lightning packages that are imported, as hyperparameters can be such
    dicts.
    """
    for package in ("lightning.fabric", "lightning_fabric"):
        own = class_if_imported(f"{package}.utilities.data", "AttributeDict")
        if own is not None:
            register_class(own, fields=dict, create=own)


class _Validation:
    """One walk over a checkpoint, which checks and copies its values."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.remedy = ""
        self._shared: dict[tuple[object, ...], torch.Tensor] = {}

    def value(self, value: object, path: tuple[object, ...]) -> object:
        kind = type(value)
        if kind in _LEAVES:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind is OrderedDict or kind is dict:
            for key in cast("dict[object, object]", value):
                if type(key) not in _LEAVES:
                    self._check(key, (*path, key))
            made: Any = kind((key, self.value(item, (*path, key))) for key, item in cast("Any", value).items())
            if kind is OrderedDict:
                vars(made).update(vars(value))
            return made
        if kind in (list, tuple, deque):
            items = [self.value(item, (*path, number)) for number, item in enumerate(cast("list[object]", value))]
            return deque(items, value.maxlen) if isinstance(value, deque) else cast("Any", kind)(items)
        self._check(value, path)
        return value

    def _tensor(self, value: torch.Tensor, path: tuple[object, ...]) -> object:
        if type(value) not in _TENSORS:
            if hasattr(value, "placements"):
                self._refuse(value, path, _PARTS_REMEDY)
            else:
                self._check(value, path)
            return value
        if value.layout is not torch.strided or value.is_meta or value.is_quantized:
            self._refuse(value, path, "convert it to a dense tensor before the save, or leave it out")
        if value.layout is not torch.strided or not value.numel():
            return value
        # Makes tied tensors one object, as a state_dict() creates a new tensor for each name.
        key = (value.data_ptr(), value.dtype, value.shape, value.stride(), value.device)
        return self._shared.setdefault(key, value)

    def _check(self, value: object, path: tuple[object, ...]) -> None:
        try:
            describe({"value": value}, whole=True, anew=True)
        except UnsupportedStateError:
            self._refuse(value, path)

    def _refuse(self, value: object, path: tuple[object, ...], remedy: str = "") -> None:
        kind = type(value)
        self.refused.append(f"{'.'.join(map(str, path))}: {kind.__module__}.{kind.__qualname__}")
        name = path[1] if len(path) > 1 else path[0]
        self.remedy = self.remedy or remedy or _REMEDIES.get(str(path[0]), _REMEDY).format(name=name)
