"""Modules with a load of their own: which modules do more than copy, and which entries no module reads.

Torch loads a module by `load_state_dict()`, which calls `_load_from_state_dict()` of each module inside, with hooks
around it. A module that overrides any of these methods, or has such hooks, may resize a buffer, convert an entry or
record that it was loaded. For such a module torch's load is called, too, with the tensors that were already read.
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
from flowstone.state.kinds.stateful import check_all_keys_read, listed_keys
from flowstone.state.names import Place, strip_wrappers
from flowstone.state.records import StoredState
from flowstone.torch.custom_loads import has_own_load_state_dict, own_load
from flowstone.torch.fsdp1 import FsdpModule

EXTRA_STATE = "_extra_state"
"""Torch's key for get_extra_state(): a value of any type and changing shape."""

_HIDDEN_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")  # prefixes that state_dict() removes
_BASE = torch.nn.Module


class CustomLoads:
    """The modules of a tree that do more than copy when they are loaded, by their names without wrappers.

    overridden  whether the outermost module overrides load_state_dict()
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.overridden = has_own_load_state_dict(module)
        self._names: Mapping[str, str] = {}
        if any(map(own_load, module.modules())):
            named = module.named_modules(remove_duplicate=False)
            self._names = {strip_wrappers(f"{name}.")[:-1]: name for name, inner in named if own_load(inner)}

    def __bool__(self) -> bool:
        return self.overridden or bool(self._names)

    def affects(self, name: str) -> bool:
        """Whether a module that does more than copy contains the entry `name`, and so may handle the entry itself."""
        return self.overridden or any(not own or name.startswith(f"{own}.") for own in self._names)

    def key(self, name: str) -> str | None:
        """For a stored entry that is not in the module's state_dict(): the key that it would have there. None if the
        module that directly contains the entry only copies when it is loaded.
        """
        owner, _, leaf = name.rpartition(".")
        if owner not in self._names:
            return None
        above = self._names[owner]
        for wrapper in _HIDDEN_WRAPPERS:
            above = f"{above}.".replace(wrapper, "")[:-1]
        return f"{above}.{leaf}" if above else leaf


def find_unread_keys(module: torch.nn.Module, keys: Iterable[str]) -> Iterator[str]:
    """Yield the keys of a state_dict() that torch's load would report as unexpected. Calls no method of the module."""
    if not has_own_load_state_dict(module):
        yield from (key for key in keys if not _may_be_read(module, key))


@cache
def warn_of_unread(module: str, keys: tuple[str, ...]) -> None:
    """Log once that a load will refuse these entries of a module."""
    log.warning(
        "the load_state_dict() of '%s' does not read %s, which its state_dict() returns: a load refuses them, as "
        "torch does. Read them in _load_from_state_dict(), or load with fs.Skip", module, listed_keys(keys),
    )


def load_entries(
    module: torch.nn.Module, entries: Mapping[str, object], metadata: object, place: Place, *,
    fsdp: FsdpModule | None, shown: Collection[str], stored: StoredState,
) -> None:
    """Load entries by the module's load_state_dict(). Raises for an unexpected entry, which the module does not
    read, and for a missing one.

    fsdp    the flat parameters that FSDP1 made in the module; None: there are none
    shown   the names of all entries of the module's state_dict(). All of them except `entries` have the loaded values
            already
    stored  the checkpoint's content, with the differences that rules allow
    """
    def named(key: str) -> str:
        return f"{place.name}.{strip_wrappers(key)}"

    given = OrderedDict(entries)
    # Modules read their version from the metadata; without it they would treat the entries as an old version's.
    given._metadata = metadata  # type: ignore[attr-defined]
    decides = has_own_load_state_dict(module)  # then the module itself decides which keys may be missing
    try:
        with nullcontext() if fsdp is None else fsdp.alone():
            lenient = fsdp is not None or not decides
            result = module.load_state_dict(given, strict=False) if lenient else module.load_state_dict(given)
    except Exception as error:
        raise StateError(
            f"cannot restore '{place.name}'",
            found=f"load_state_dict() of {listed_keys(entries)} raised {type(error).__name__}: {error}",
            next="fix the module's hooks; its parameters and buffers are already restored",
        ) from error
    unexpected = [key for key in getattr(result, "unexpected_keys", None) or () if not stored.may_be_left(named(key))]
    missing = [] if fsdp is not None or decides else [
        key for key in getattr(result, "missing_keys", None) or ()
        if (key in entries or strip_wrappers(key) not in shown) and not stored.may_be_absent(named(key))
    ]
    check_all_keys_read(unexpected, missing, place)


def _may_be_read(module: torch.nn.Module, key: str) -> bool:
    """Whether a load may read that key: a parameter or buffer, a module with its own load, or a hook."""
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
