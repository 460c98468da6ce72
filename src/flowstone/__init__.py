"""Flowstone: checkpoints for large-model training, saved while training continues, at the device's speed.

This module has the public names. Names that need torch or numpy are imported at first use: reading and verifying
checkpoints then works without torch, and listing checkpoints starts fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowstone._version import __version__
from flowstone.config import EngineOptions, Keep, KeepRule
from flowstone.errors import (
    ArgumentError,
    BudgetError,
    BusyError,
    CancelledError,
    ClosedError,
    CollisionError,
    CoverageError,
    DamagedError,
    FlowstoneError,
    FormatError,
    FrameworkError,
    FullError,
    LockedError,
    MemoryAgentError,
    MismatchError,
    NoCheckpointError,
    NotAStoreError,
    NoTensorError,
    PeerError,
    ProviderError,
    RankError,
    ReplayError,
    SaveFailedError,
    StateChangedError,
    StateError,
    StepExistsError,
    StorageError,
    UnsupportedFormatError,
    UnsupportedStateError,
)
from flowstone.events.phases import (
    Captured,
    Committed,
    Event,
    Fenced,
    LeftAlone,
    Loaded,
    LoadProgress,
    OnEvent,
    RemovalFailed,
    Removed,
    SaveFailed,
    SaveStarted,
    Written,
)
from flowstone.rules.load_rules import Cast, Init, Rename, Rule, Skip

if TYPE_CHECKING:
    from flowstone.checkpointer import Checkpointer
    from flowstone.codecs.quantize import Quantize
    from flowstone.convert.diff import DiffReport, TensorDiff, ValueDiff, diff
    from flowstone.convert.export import ExportReport, export
    from flowstone.convert.importing import ImportReport, import_checkpoint
    from flowstone.convert.pack import PackReport, pack
    from flowstone.convert.ready_rules import ready_rules
    from flowstone.convert.rule_files import read_rules
    from flowstone.events.rare_events import BuffersFromOneRank, Compressed, FellBack, PagesCollapsed, Prepared
    from flowstone.inspection.explain import Explanation, Source, explain
    from flowstone.journal.journal_events import Journaled, NotJournaled, NotReplayed, Replayed
    from flowstone.layouts.layout_rules import (
        Fuse,
        LayoutRule,
        LoadRule,
        Pad,
        RuleSet,
        Split,
        Stack,
        Transpose,
        Unpad,
        Unstack,
    )
    from flowstone.providers.provider import ObjectPart, Part, Provider
    from flowstone.providers.registration import Registration, register_provider
    from flowstone.reading.checkpoint import Checkpoint, StoredTensor
    from flowstone.reading.checkpoint import open_checkpoint as open
    from flowstone.replica.replica_events import Replica, ReplicaBehind, ReplicaEvent, ReplicaFollows, ReplicaLost
    from flowstone.session.futures import Save
    from flowstone.session.load_outcome import LoadReport, Replay
    from flowstone.state import PerRank, Shard
    from flowstone.state.classes import register_class
    from flowstone.state.kinds.generator import rng
    from flowstone.store.memory.node_memory import NodeMemory
    from flowstone.store.peers.store import PeerMemory
    from flowstone.stores.file_systems import Fsspec
    from flowstone.stores.striped import Striped
    from flowstone.table.box import Box
    from flowstone.tiered.policy import Tier
    from flowstone.tiered.tier_events import (
        FlushDropped,
        Flushed,
        Prefetched,
        TierEvent,
        TierFailed,
        TierPassedOver,
        TiersBehind,
    )
    from flowstone.torch.compressed import CompressedBucket, CompressedGradients
    from flowstone.torch.flat import Flat
    from flowstone.torch.tensor_subclasses import SplitTensor
    from flowstone.trace import Span, Trace

_LATER = {
    "Box": "flowstone.table.box",
    "Checkpoint": "flowstone.reading.checkpoint",
    "Checkpointer": "flowstone.checkpointer",
    "CompressedBucket": "flowstone.torch.compressed",
    "CompressedGradients": "flowstone.torch.compressed",
    "DiffReport": "flowstone.convert.diff",
    "ExportReport": "flowstone.convert.export",
    "Explanation": "flowstone.inspection.explain",
    "ImportReport": "flowstone.convert.importing",
    "Fsspec": "flowstone.stores.file_systems",
    "Fuse": "flowstone.layouts.layout_rules",
    "Journaled": "flowstone.journal.journal_events",
    "LayoutRule": "flowstone.layouts.layout_rules",
    "LoadRule": "flowstone.layouts.layout_rules",
    "NotJournaled": "flowstone.journal.journal_events",
    "NotReplayed": "flowstone.journal.journal_events",
    "PackReport": "flowstone.convert.pack",
    "Pad": "flowstone.layouts.layout_rules",
    "RuleSet": "flowstone.layouts.layout_rules",
    "Split": "flowstone.layouts.layout_rules",
    "Stack": "flowstone.layouts.layout_rules",
    "Striped": "flowstone.stores.striped",
    "Transpose": "flowstone.layouts.layout_rules",
    "Unpad": "flowstone.layouts.layout_rules",
    "Unstack": "flowstone.layouts.layout_rules",
    "LoadReport": "flowstone.session.load_outcome",
    "Replay": "flowstone.session.load_outcome",
    "Replayed": "flowstone.journal.journal_events",
    "Replica": "flowstone.replica.replica_events",
    "ReplicaBehind": "flowstone.replica.replica_events",
    "ReplicaEvent": "flowstone.replica.replica_events",
    "ReplicaFollows": "flowstone.replica.replica_events",
    "ReplicaLost": "flowstone.replica.replica_events",
    "Quantize": "flowstone.codecs.quantize",
    "Save": "flowstone.session.futures",
    "Flat": "flowstone.torch.flat",
    "NodeMemory": "flowstone.store.memory.node_memory",
    "PeerMemory": "flowstone.store.peers.store",
    "ObjectPart": "flowstone.providers.provider",
    "Part": "flowstone.providers.provider",
    "PerRank": "flowstone.state",
    "Provider": "flowstone.providers.provider",
    "Registration": "flowstone.providers.registration",
    "Shard": "flowstone.state",
    "Source": "flowstone.inspection.explain",
    "BuffersFromOneRank": "flowstone.events.rare_events",
    "Compressed": "flowstone.events.rare_events",
    "FellBack": "flowstone.events.rare_events",
    "PagesCollapsed": "flowstone.events.rare_events",
    "Prepared": "flowstone.events.rare_events",
    "StoredTensor": "flowstone.reading.checkpoint",
    "Span": "flowstone.trace",
    "Trace": "flowstone.trace",
    "SplitTensor": "flowstone.torch.tensor_subclasses",
    "TensorDiff": "flowstone.convert.diff",
    "FlushDropped": "flowstone.tiered.tier_events",
    "Flushed": "flowstone.tiered.tier_events",
    "Prefetched": "flowstone.tiered.tier_events",
    "Tier": "flowstone.tiered.policy",
    "TierEvent": "flowstone.tiered.tier_events",
    "TierFailed": "flowstone.tiered.tier_events",
    "TierPassedOver": "flowstone.tiered.tier_events",
    "TiersBehind": "flowstone.tiered.tier_events",
    "ValueDiff": "flowstone.convert.diff",
    "diff": "flowstone.convert.diff",
    "explain": "flowstone.inspection.explain",
    "export": "flowstone.convert.export",
    "import_checkpoint": "flowstone.convert.importing",
    "open": "flowstone.reading.checkpoint",
    "pack": "flowstone.convert.pack",
    "read_rules": "flowstone.convert.rule_files",
    "ready_rules": "flowstone.convert.ready_rules",
    "register_class": "flowstone.state.classes",
    "register_provider": "flowstone.providers.registration",
    "rng": "flowstone.state.kinds.generator",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'flowstone' has no attribute {name!r}")
    from importlib import import_module

    try:
        value = getattr(import_module(_LATER[name]), "open_checkpoint" if name == "open" else name)
    except ModuleNotFoundError as error:
        from flowstone.extensions import missing_module

        if missing := missing_module(error, f"flowstone.{name}"):
            raise missing from error
        raise
    globals()[name] = value  # later lookups find it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "ArgumentError",
    "Box",
    "BudgetError",
    "BuffersFromOneRank",
    "BusyError",
    "CancelledError",
    "Captured",
    "Cast",
    "Checkpoint",
    "Checkpointer",
    "ClosedError",
    "CollisionError",
    "Committed",
    "Compressed",
    "CompressedBucket",
    "CompressedGradients",
    "CoverageError",
    "DamagedError",
    "DiffReport",
    "EngineOptions",
    "Event",
    "Explanation",
    "ExportReport",
    "FellBack",
    "Fenced",
    "Flat",
    "FlowstoneError",
    "FlushDropped",
    "Flushed",
    "FormatError",
    "FrameworkError",
    "Fsspec",
    "FullError",
    "Fuse",
    "ImportReport",
    "Init",
    "Journaled",
    "Keep",
    "KeepRule",
    "LayoutRule",
    "LeftAlone",
    "LoadProgress",
    "LoadReport",
    "LoadRule",
    "Loaded",
    "LockedError",
    "MemoryAgentError",
    "MismatchError",
    "NoCheckpointError",
    "NoTensorError",
    "NodeMemory",
    "NotAStoreError",
    "NotJournaled",
    "NotReplayed",
    "ObjectPart",
    "OnEvent",
    "PackReport",
    "Pad",
    "PagesCollapsed",
    "Part",
    "PerRank",
    "Prefetched",
    "Prepared",
    "Provider",
    "PeerError",
    "PeerMemory",
    "ProviderError",
    "RankError",
    "Registration",
    "RemovalFailed",
    "Removed",
    "Quantize",
    "Rename",
    "Replay",
    "ReplayError",
    "Replayed",
    "Replica",
    "ReplicaBehind",
    "ReplicaEvent",
    "ReplicaFollows",
    "ReplicaLost",
    "Rule",
    "RuleSet",
    "Save",
    "SaveFailed",
    "SaveFailedError",
    "SaveStarted",
    "Shard",
    "Skip",
    "Source",
    "Span",
    "Split",
    "SplitTensor",
    "Stack",
    "Striped",
    "StateChangedError",
    "StateError",
    "StepExistsError",
    "StorageError",
    "StoredTensor",
    "TensorDiff",
    "Tier",
    "TierEvent",
    "TierFailed",
    "TierPassedOver",
    "TiersBehind",
    "Trace",
    "Transpose",
    "Unpad",
    "Unstack",
    "UnsupportedFormatError",
    "UnsupportedStateError",
    "ValueDiff",
    "Written",
    "__version__",
    "diff",
    "explain",
    "export",
    "import_checkpoint",
    "open",
    "pack",
    "read_rules",
    "ready_rules",
    "register_class",
    "register_provider",
    "rng",
]
