"""Modules with their own way of loading: which do more than copy, and which entries nothing reads.

Torch loads a module by `load_state_dict()`, which calls `_load_from_state_dict()` of each module inside, with hooks
around it. Where a module overrides any of these, it may resize a buffer, convert an entry or note that it was loaded:
then torch's load is called too, with the tensors that are in place already.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache
from typing import cast

import torch

from flowstone.errors import StateError
from flowstone.log import log
from flowstone.state.fsdp import Wrapped
from flowstone.state.names import Place, strip_wrappers
from flowstone.state.own_loads import has_own_load_state_dict, own_load
from flowstone.state.records import Stored

EXTRA_STATE = "_extra_state"
"""Torch's key for get_extra_state(): a value of any type and changing shape."""

_HIDDEN_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")  # which state_dict() does not show
_BASE = torch.nn.Module


class OwnLoads:
    """The modules of a tree that do more than copy when they are loaded, by their names without wrappers.

    overridden  the outermost one has a load_state_dict() of its own
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.overridden = has_own_load_state_dict(module)
        self._names: Mapping[str, str] = {}
        if any(map(own_load, module.modules())):
            named = module.named_modules(remove_duplicate=False)
            self._names = {strip_wrappers(f"{name}.")[:-1]: name for name, one in named if own_load(one)}

    def __bool__(self) -> bool:
        return self.overridden or bool(self._names)

    def concern(self, name: str) -> bool:
        """Whether such a module is above the entry `name`, and may treat it in its own way."""
        return self.overridden or any(not one or name.startswith(f"{one}.") for one in self._names)

    def key(self, name: str) -> str | None:
        """The key in the module's state_dict() of an entry that is not there now; None if its module only copies."""
        owner, _, leaf = name.rpartition(".")
        if owner not in self._names:
            return None
        above = self._names[owner]
        for wrapper in _HIDDEN_WRAPPERS:
            above = f"{above}.".replace(wrapper, "")[:-1]
        return f"{above}.{leaf}" if above else leaf


def unread(module: torch.nn.Module, keys: Iterable[str]) -> Iterator[str]:
    """Keys of a state_dict() that torch's load finds unexpected. Calls nothing of the module."""
    if not has_own_load_state_dict(module):
        yield from (key for key in keys if not _may_be_read(module, key))


@cache
def warn_of_unread(module: str, keys: tuple[str, ...]) -> None:
    """Log once that a load will refuse these entries of a module."""
    log.warning(
        "nothing in the load_state_dict() of '%s' reads %s, which its state_dict() has: a load refuses them, as in "
        "torch. Read them in _load_from_state_dict(), or load with fs.Skip", module, _listed(keys),
    )


def load_entries(
    module: torch.nn.Module, entries: Mapping[str, object], metadata: object, place: Place, *,
    fsdp: Wrapped | None, shown: Collection[str], stored: Stored,
) -> None:
    """Load entries through the module's load_state_dict(). What it does not read, or misses, is an error.

    fsdp    its FSDP1 tables, if any
    shown   the names of all entries of its state_dict(): those that are not among `entries` are in place
    stored  what rules allow
    """
    def named(key: str) -> str:
        return f"{place.name}.{strip_wrappers(key)}"

    given = OrderedDict(entries)
    # Modules read their version from the metadata; without it they would treat the entries as an old version's.
    given._metadata = metadata  # type: ignore[attr-defined]
    decides = has_own_load_state_dict(module)  # also how strict it is
    try:
        with nullcontext() if fsdp is None else fsdp.alone():
            lenient = fsdp is not None or not decides
            result = module.load_state_dict(given, strict=False) if lenient else module.load_state_dict(given)
    except Exception as error:
        raise StateError(
            f"cannot restore '{place.name}'",
            found=f"load_state_dict() of {_listed(entries)} raised {type(error).__name__}: {error}",
            next="fix the module's hooks; its parameters and buffers are already restored",
        ) from error
    unexpected = [key for key in getattr(result, "unexpected_keys", None) or () if not stored.may_be_left(named(key))]
    missing = [] if fsdp is not None or decides else [
        key for key in getattr(result, "missing_keys", None) or ()
        if (key in entries or strip_wrappers(key) not in shown) and not stored.may_be_absent(named(key))
    ]
    check_read(unexpected, missing, place)


def check_read(unexpected: Collection[str] | None, missing: Collection[str] | None, place: Place) -> None:
    """Raise StateError for keys that a load_state_dict() has reported as not read, or not there."""
    if not unexpected and not missing:
        return
    found = [f"does not read {_listed(unexpected)}"] if unexpected else []
    found += [f"finds nothing for {_listed(missing)}"] if missing else []
    raise StateError(
        f"cannot restore '{place.name}': its load_state_dict() does not match its state_dict()",
        found=f"it {' and '.join(found)}",
        next="read each entry in _load_from_state_dict(), or allow the difference by a rule (fs.Skip, fs.Init); its "
        "parameters and buffers are already restored",
    )


def _listed(keys: Collection[str]) -> str:
    shown = ", ".join(f"'{key}'" for key in sorted(keys)[:8])
    return shown if len(keys) <= 8 else f"{shown} and {len(keys) - 8} more"


def _may_be_read(module: torch.nn.Module, key: str) -> bool:
    """Whether something takes that key in a load: a parameter or buffer, a module with a load of its own, or a hook."""
    while True:
        fields = vars(module)
        inside = fields.get("_modules")
        hooked = fields.get("_load_state_dict_pre_hooks") or fields.get("_load_state_dict_post_hooks")
        if type(inside) is not dict or hooked or own_load(module):
            return True
        first, _, below = key.partition(".")
        if not below:
            break
        if inside.get(first) is None:
            return False
        module, key = cast("torch.nn.Module", inside[first]), below
    if first == EXTRA_STATE:
        return type(module).set_extra_state is not _BASE.set_extra_state
    hidden = first in module._non_persistent_buffers_set
    return module._parameters.get(first) is not None or (module._buffers.get(first) is not None and not hidden)
