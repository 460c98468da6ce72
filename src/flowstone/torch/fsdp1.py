"""FSDP1: the flat parameters that a FullyShardedDataParallel makes from the parameters of its module.

Only this module uses torch's private names of FSDP1 (as of torch 2.13). FSDP2 uses DTensors and does not need this
module. Which part of the parameters a rank has is read from the wrapper's own tables. Nothing is gathered: the
wrapper's state_dict() hooks, which would gather parameters, are disabled meanwhile.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from flowstone.errors import UnsupportedStateError
from flowstone.state.imported import class_if_imported
from flowstone.state.names import Place, strip_wrappers
from flowstone.torch.flat import FlatMember, FlatSlice

_HOOKS_OF = "torch.distributed.fsdp._state_dict_utils"
_HOOKS = (
    "_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"
)
_FLAT_PARAM = "_flat_param"  # the attribute under which a flat parameter replaces the originals


class FsdpUnit(msgspec.Struct, frozen=True, eq=False):
    """One flat parameter.

    flat       the flat parameter; its data is this rank's shard, or, during a pass, all gathered elements
    local      this rank's elements, which the optimizer changes, and from which every forward pass gathers
    spans      for each original parameter: its name in the module, and this rank's range of its elements
    originals  for each original parameter, the tensor that an optimizer has; None: optimizers have `flat`
               (use_orig_params=False)
    ties       further names of original parameters -> their names among the spans
    """

    flat: torch.Tensor
    local: torch.Tensor
    spans: tuple[FlatMember, ...]
    originals: Sequence[torch.Tensor] | None
    ties: Mapping[str, str]


class FsdpModule:
    """A module that contains one or more FullyShardedDataParallels.

    units  the flat parameters
    names  the names of all original parameters in them
    """

    def __init__(self, wrappers: Sequence[tuple[str, torch.nn.Module]], place: Place) -> None:
        """`wrappers`: FullyShardedDataParallels, each with its key in the module."""
        self._wrappers = {id(wrapper): wrapper for _, wrapper in wrappers}
        self._dtypes: dict[str, torch.dtype] = {}
        units: dict[int, FsdpUnit] = {}
        for key, wrapper in wrappers:
            prefix = f"{key}." if key else ""
            for name, dtype in _private(wrapper, "_buffer_name_to_orig_dtype").items():
                self._dtypes.setdefault(strip_wrappers(prefix + name), dtype)
            handle = _private(wrapper, "_handle")
            if handle is None:
                continue  # this wrapper has no parameter
            unit = _unit(handle, prefix, place)
            first = units.setdefault(id(handle), unit)
            if first is not unit:  # the module is at two places
                again = {mine.name: own.name for mine, own in zip(unit.spans, first.spans, strict=True)}
                again |= {name: again[target] for name, target in unit.ties.items()}
                units[id(handle)] = FsdpUnit(
                    first.flat, first.local, first.spans, first.originals, {**first.ties, **again}
                )
        self.units = tuple(units.values())
        self._handles = [_private(wrapper, "_handle") for wrapper in self._wrappers.values()]
        spans = [span.name for unit in self.units for span in unit.spans]
        self.names = frozenset([*spans, *(name for unit in self.units for name in unit.ties)])

    def holds(self, key: str, value: object, place: Place) -> bool:
        """Whether an entry of the module's state_dict() belongs to a parameter that is in a flat parameter."""
        if key.rpartition(".")[2] == _FLAT_PARAM or strip_wrappers(key) in self.names:
            return True
        if getattr(value, "_fsdp_flattened", False):
            raise _unknown(f"'{place.name}.{key}' is not in any flat parameter")
        return False

    def dtype_saved(self, name: str, value: object) -> torch.dtype | None:
        """The dtype of a buffer before mixed precision changed it; None if unchanged."""
        own = self._dtypes.get(name)
        cast = isinstance(value, torch.Tensor) and value.is_floating_point() and own not in (None, value.dtype)
        return own if cast else None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Disable, in the `with` block, the hooks by which a FullyShardedDataParallel gathers parameters around
        state_dict() and load_state_dict().
        """
        kept: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for wrapper in self._wrappers.values():
                fields = vars(wrapper)
                for table in _HOOKS:
                    hooks = _private(wrapper, table)
                    others = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_theirs(hook))
                    if len(others) == len(hooks):
                        raise _unknown(f"its hooks are not in {table}")
                    kept.append((fields, table, hooks))
                    fields[table] = others
            yield
        finally:
            for fields, table, hooks in kept:
                fields[table] = hooks

    def forget_gathered(self) -> None:
        """Free gathered parameters whose local shards have changed since; the next forward gathers them again."""
        for handle in self._handles:
            gathered = handle is not None and hasattr(handle.flat_param, "_full_param_padded")
            if gathered and handle.uses_sharded_strategy and not handle.needs_unshard():
                handle.reshard(True)
                handle.post_reshard()
                handle._prefetched = False


def fsdp_module_of(module: torch.nn.Module, place: Place) -> FsdpModule | None:
    """The flat parameters that FSDP1 made in a module; None if there are none. Costs nothing if FSDP1 was never
    imported.

    raises  UnsupportedStateError, by name: inside of summon_full_params(); for flat parameters that are shards of
            shards (FSDP1 over tensor parallelism); and if this torch has other tables than the known ones
    """
    wrapper = class_if_imported("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
    if wrapper is None:
        return None
    wrapped = [
        (key, submodule) for key, submodule in module.named_modules(remove_duplicate=False)
        if isinstance(submodule, wrapper)
    ]
    return FsdpModule(wrapped, place) if wrapped else None


def _unit(handle: Any, prefix: str, place: Place) -> FsdpUnit:
    """The flat parameter of FSDP1's `handle`. `prefix`: the wrapper's own key, with which all its names begin."""
    flat = _private(handle, "flat_param")
    names = [strip_wrappers(prefix + name) for name in _private(flat, "_fqns")]
    if _private(handle, "_training_state").name == "SUMMON_FULL_PARAMS":
        raise UnsupportedStateError(
            f"the parameters of '{place.name}' are gathered by summon_full_params()",
            next="save and load outside of summon_full_params()",
        )
    if any(extension is not None for extension in _private(flat, "_param_extensions")):
        raise UnsupportedStateError(
            f"'{place.name}.{names[0]}' is sharded twice, by FSDP1 and by tensor parallelism",
            next="use FSDP2 (torch.distributed.fsdp.fully_shard) for that",
        )
    columns = names, *(_private(flat, table) for table in ("_shapes", "_strides", "_shard_param_infos"))
    spans = []
    for name, shape, strides, info in zip(*columns, strict=True):
        start, begin, length = (
            (info.offset_in_shard, info.intra_param_start_idx, info.numel_in_shard) if info.in_shard else (0, 0, 0)
        )
        order = _order(shape, strides, f"{place.name}.{name}")
        spans.append(FlatMember(name, start, FlatSlice(tuple(shape), begin, length, order)))
    ties = {
        _name(prefix, tie.module_name, tie.param_name): _name(prefix, tie.prim_module_name, tie.prim_param_name)
        for tie in _private(flat, "_shared_param_infos")
    }
    local = getattr(flat, "_local_shard", None)  # exists from the first forward on
    unit = FsdpUnit(flat, flat.data if local is None else local, tuple(spans), _private(flat, "_params"), ties)
    _check_memory(unit, place)
    return unit


def _check_memory(unit: FsdpUnit, place: Place) -> None:
    """Refuse an original parameter that was given new, separate memory: FSDP copies such values only at the next
    forward.
    """
    own = unit.local.untyped_storage().data_ptr()
    for span, original in zip(unit.spans, unit.originals or unit.spans, strict=True):
        if isinstance(original, torch.Tensor) and original.numel() and original.untyped_storage().data_ptr() != own:
            raise UnsupportedStateError(
                f"'{place.name}.{span.name}' is no longer in its flat parameter",
                found="other memory, because the parameter or its data was replaced",
                next="change the parameter in place (copy_), or first run a forward pass, which takes the new values "
                "over",
            )


def _name(prefix: str, module: str, parameter: str) -> str:
    return strip_wrappers(f"{prefix}{module}.{parameter}" if module else f"{prefix}{parameter}")


def _order(shape: Sequence[int], strides: Sequence[int], name: str) -> tuple[int, ...]:
    """The order of a dense tensor's dimensions in memory, the outermost first. Flattening keeps this order."""
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    reach = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != reach and 0 not in shape:
            raise UnsupportedStateError(
                f"'{name}' was not a dense tensor when FSDP flattened it", found=f"strides {tuple(strides)}",
                next="make it contiguous() before the module is wrapped",
            )
        reach *= shape[dim]
    return tuple(order)


def _is_theirs(hook: object) -> bool:
    # The hook is identified by its module, as each version of torch wraps the functions that it registers differently.
    return getattr(hook, "__module__", None) == _HOOKS_OF


def _private(owner: object, name: str) -> Any:
    try:
        return vars(owner)[name]
    except KeyError:
        raise _unknown(f"{type(owner).__name__} has no {name}") from None


def _unknown(problem: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        f"FullyShardedDataParallel of torch {torch.__version__} has an unknown internal structure: {problem}",
        next="use FSDP2 (torch.distributed.fsdp.fully_shard), or torch 2.13",
    )
