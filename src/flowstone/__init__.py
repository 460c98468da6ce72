"""Flowstone: checkpoints for large-model training, saved while training goes on, at the device's speed.

The public names. Those that need torch are imported at first use, so that reading and checking checkpoints needs no
torch; those that need numpy too, so that listing checkpoints starts fast.
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
from flowstone.events import (
    BuffersFromOneRank,
    Captured,
    Committed,
    Event,
    FellBack,
    Fenced,
    LeftAlone,
    Loaded,
    LoadProgress,
    OnEvent,
    Prepared,
    RemovalFailed,
    Removed,
    SaveFailed,
    SaveStarted,
    Written,
)
from flowstone.rules import Cast, Init, Rename, Rule, Skip

if TYPE_CHECKING:
    from flowstone.checkpoint import Checkpoint, StoredTensor
    from flowstone.checkpoint import open_checkpoint as open
    from flowstone.checkpointer import Checkpointer
    from flowstone.convert.diff import DiffReport, TensorDiff, ValueDiff, diff
    from flowstone.convert.export import ExportReport, export
    from flowstone.convert.importing import ImportReport, import_checkpoint
    from flowstone.convert.pack import PackReport, pack
    from flowstone.convert.ready_rules import ready_rules
    from flowstone.convert.rule_files import read_rules
    from flowstone.file_systems import Fsspec
    from flowstone.journal_events import Journaled, NotJournaled, NotReplayed, Replayed
    from flowstone.layout_rules import (
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
    from flowstone.pipeline.explain import Explanation, Source, explain
    from flowstone.pipeline.futures import Save
    from flowstone.pipeline.load_outcome import LoadReport, Replay
    from flowstone.quantize import Quantize
    from flowstone.save_events import Compressed, PagesCollapsed
    from flowstone.state import (
        Flat,
        ObjectPart,
        Part,
        PerRank,
        Provider,
        Registration,
        Shard,
        SplitTensor,
        register_provider,
        rng,
    )
    from flowstone.state.classes import register_class
    from flowstone.state.compressed import CompressedBucket, CompressedGradients
    from flowstone.state_replica import Replica, ReplicaBehind, ReplicaEvent, ReplicaFollows, ReplicaLost
    from flowstone.store.node_memory import NodeMemory
    from flowstone.store.peers.store import PeerMemory
    from flowstone.striped import Striped
    from flowstone.table.box import Box
    from flowstone.tier_events import (
        FlushDropped,
        Flushed,
        Prefetched,
        TierEvent,
        TierFailed,
        TierPassedOver,
        TiersBehind,
    )
    from flowstone.tiers.policy import Tier
    from flowstone.trace import Span, Trace

_LATER = {
    "Box": "flowstone.table.box",
    "Checkpoint": "flowstone.checkpoint",
    "Checkpointer": "flowstone.checkpointer",
    "CompressedBucket": "flowstone.state.compressed",
    "CompressedGradients": "flowstone.state.compressed",
    "DiffReport": "flowstone.convert.diff",
    "ExportReport": "flowstone.convert.export",
    "Explanation": "flowstone.pipeline.explain",
    "ImportReport": "flowstone.convert.importing",
    "Fsspec": "flowstone.file_systems",
    "Fuse": "flowstone.layout_rules",
    "Journaled": "flowstone.journal_events",
    "LayoutRule": "flowstone.layout_rules",
    "LoadRule": "flowstone.layout_rules",
    "NotJournaled": "flowstone.journal_events",
    "NotReplayed": "flowstone.journal_events",
    "PackReport": "flowstone.convert.pack",
    "Pad": "flowstone.layout_rules",
    "RuleSet": "flowstone.layout_rules",
    "Split": "flowstone.layout_rules",
    "Stack": "flowstone.layout_rules",
    "Striped": "flowstone.striped",
    "Transpose": "flowstone.layout_rules",
    "Unpad": "flowstone.layout_rules",
    "Unstack": "flowstone.layout_rules",
    "LoadReport": "flowstone.pipeline.load_outcome",
    "Replay": "flowstone.pipeline.load_outcome",
    "Replayed": "flowstone.journal_events",
    "Replica": "flowstone.state_replica",
    "ReplicaBehind": "flowstone.state_replica",
    "ReplicaEvent": "flowstone.state_replica",
    "ReplicaFollows": "flowstone.state_replica",
    "ReplicaLost": "flowstone.state_replica",
    "Quantize": "flowstone.quantize",
    "Save": "flowstone.pipeline.futures",
    "Flat": "flowstone.state",
    "NodeMemory": "flowstone.store.node_memory",
    "PeerMemory": "flowstone.store.peers.store",
    "ObjectPart": "flowstone.state",
    "Part": "flowstone.state",
    "PerRank": "flowstone.state",
    "Provider": "flowstone.state",
    "Registration": "flowstone.state",
    "Shard": "flowstone.state",
    "Source": "flowstone.pipeline.explain",
    "Compressed": "flowstone.save_events",
    "PagesCollapsed": "flowstone.save_events",
    "StoredTensor": "flowstone.checkpoint",
    "Span": "flowstone.trace",
    "Trace": "flowstone.trace",
    "SplitTensor": "flowstone.state",
    "TensorDiff": "flowstone.convert.diff",
    "FlushDropped": "flowstone.tier_events",
    "Flushed": "flowstone.tier_events",
    "Prefetched": "flowstone.tier_events",
    "Tier": "flowstone.tiers.policy",
    "TierEvent": "flowstone.tier_events",
    "TierFailed": "flowstone.tier_events",
    "TierPassedOver": "flowstone.tier_events",
    "TiersBehind": "flowstone.tier_events",
    "ValueDiff": "flowstone.convert.diff",
    "diff": "flowstone.convert.diff",
    "explain": "flowstone.pipeline.explain",
    "export": "flowstone.convert.export",
    "import_checkpoint": "flowstone.convert.importing",
    "open": "flowstone.checkpoint",
    "pack": "flowstone.convert.pack",
    "read_rules": "flowstone.convert.rule_files",
    "ready_rules": "flowstone.convert.ready_rules",
    "register_class": "flowstone.state.classes",
    "register_provider": "flowstone.state",
    "rng": "flowstone.state",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'flowstone' has no attribute {name!r}")
    from importlib import import_module

    try:
        found = getattr(import_module(_LATER[name]), "open_checkpoint" if name == "open" else name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        next_step = "pip install 'flowstone[torch]'"
        raise FrameworkError(f"flowstone.{name} needs torch, which is not installed", next=next_step) from error
    globals()[name] = found  # later lookups find it without this function
    return found


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
