"""The extension points: every call from the core of the package into its options.

An *option* is an optional part of this package: a folder that can be deleted. The core saves, loads and verifies
without it (docs/ARCHITECTURE.md, Core and options). The core imports options only here.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from flowstone.errors import FrameworkError

OPTIONS: dict[str, tuple[str, ...]] = {  # option -> the options that every part of it needs (tests/test_options.py)
    "providers": (), "torch": ("providers",), "delta": (), "codecs": ("delta",), "layouts": (), "node_reads": (),
    "journal": (), "replica": ("journal", "torch", "store.memory"), "inspection": (), "tiered": (), "store.memory": (),
    "store.wrap": (), "store.striped": (), "store.objects": ("store.wrap",), "store.peers": ("store.memory",),
    "agent": ("store.memory",), "convert": ("layouts",), "adapters": ("torch",), "cli": (),
}
POINTS = {  # extension point -> the module that implements it, and a name in that module; "": the module itself
    "agent": ("flowstone.agent", ""),
    "cli": ("flowstone.cli", "main"),
    "codecs.quantize": ("flowstone.codecs.quantize", "Quantize"),
    "codecs.unmatched_rules": ("flowstone.codecs.unmatched_rules", "UnmatchedRules"),
    "codecs": ("flowstone.codecs.coding", "EncodingChooser"),
    "delta": ("flowstone.delta.baselines", "Baselines"),
    "inspection.sections": ("flowstone.inspection.composition", "sections_of"),
    "journal": ("flowstone.journal.every_step", "JournalSetup"),
    "journal.of_store": ("flowstone.journal.store_journals", "StoreJournals"),
    "journal.resume": ("flowstone.journal.replaying", "replay_journals"),
    "layouts": ("flowstone.layouts.arrange", "arrange_for_load"),
    "layouts.kinds": ("flowstone.layouts.layout_rules", "kinds"),
    "memory": ("flowstone.store.memory.node_memory", "NodeMemory"),
    "node_reads": ("flowstone.node_reads.sharing", "share_reads"),
    "objects": ("flowstone.store.objects.store", "ObjectStore"),
    "providers.kind": ("flowstone.providers.provided_kind", "ProvidedKind"),
    "replica": ("flowstone.replica.replica_link", "create_replica_link"),
    "replica.settings": ("flowstone.replica.replica_events", "Replica"),
    "striped": ("flowstone.store.striped.store", "StripedStore"),
    "striped.note": ("flowstone.store.striped.records", "read_note"),
    "tiered": ("flowstone.tiered.tiering", "TierSetup"),
    "tiered.open_nearest": ("flowstone.tiered.restore", "open_nearest"),
    "tiered.stores": ("flowstone.tiered.policy", "stores_of"),
    "torch.device_memory": ("flowstone.torch.device_memory", ""),
    "torch.framework": ("flowstone.torch.framework", ""),
    "torch.has_step_hooks": ("flowstone.torch.inner_optimizers", "has_step_hooks"),
    "torch.kinds": ("flowstone.torch.kinds", ""),
    "torch.side_stream": ("flowstone.torch.cuda_stream", "CudaSideStream"),
    "torch.streaming": ("flowstone.torch.streaming", ""),
    "torch.unpack": ("flowstone.torch.unpacked", "unpack"),
}


@cache
def extension(point: str) -> Any:
    """The object that implements an extension point, from the table POINTS. It is imported at its first use, as most
    processes need few options.

    raises  FrameworkError  the folder of the point's option, or of another option that it needs, was deleted; or the
                            option needs torch, which is not installed
    """
    module, name = POINTS[point]
    option = _option_of_point(point)
    if _missing_folder(option) is not None:
        raise missing_option(option)
    try:
        implementation = import_module(module)
    except ModuleNotFoundError as error:
        if missing := missing_module(error, f"flowstone.{option}"):
            raise missing from error
        raise
    return getattr(implementation, name) if name else implementation


def find_extension(point: str) -> Any | None:
    """Like `extension`, but returns None if the folder of the point's option (an optional part of the package), or of
    another option that it needs, was deleted. The core then works without this option.
    """
    return extension(point) if _missing_folder(_option_of_point(point)) is None else None


def _option_of_point(point: str) -> str:
    option = option_of(POINTS[point][0])
    assert option is not None, "each point is in an option"
    return option


def option_of(module: str) -> str | None:
    """The option that contains `module`; None if no option contains it."""
    return next((option for option in OPTIONS if f"{module}.".startswith(f"flowstone.{option}.")), None)


def missing_option(option: str, **facts: str) -> FrameworkError:
    """The error for an option whose folder was deleted, or that needs another option whose folder was deleted."""
    return FrameworkError(
        f"this installation lacks flowstone.{_missing_folder(option) or option}", **facts,
        next="install the full package: pip install --force-reinstall flowstone",
    )


def missing_torch(feature: str) -> FrameworkError:
    """The error for a feature that needs torch, which is not installed."""
    return FrameworkError(f"{feature} needs torch, which is not installed", next="pip install 'flowstone[torch]'")


def missing_module(error: ModuleNotFoundError, feature: str) -> FrameworkError | None:
    """The error for a feature that could not import torch, or an option whose folder was deleted; None: another module
    is missing.
    """
    if error.name == "torch":
        return missing_torch(feature)
    option = option_of(error.name or "")
    return None if option is None or _missing_folder(option) is None else missing_option(option)


def _missing_folder(option: str) -> str | None:
    """The first option whose folder was deleted, or has no modules, among `option` and those that it needs, directly or
    indirectly. None if all folders exist.
    """
    spec = find_spec(f"flowstone.{option}")
    if spec is None or spec.origin is None:  # a folder without modules has a spec, but no origin
        return option
    return next(filter(None, map(_missing_folder, OPTIONS[option])), None)
