"""DeepSpeed's setting `datastates_ckpt`, which makes it import a package `datastates`: filled by Flowstone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flowstone.adapters.deepspeed.attaching import DEEPSPEED, adopt, check_interface
from flowstone.config import Keep
from flowstone.errors import ArgumentError
from flowstone.events import OnEvent
from flowstone.log import log

if TYPE_CHECKING:
    from flowstone.adapters.deepspeed.plugin import FlowstoneCheckpointEngine

_PACKAGE = "datastates"
_SLOT = "deepspeed.runtime.checkpoint_engine.datastates_checkpoint_engine"
_SLOT_METHODS = {
    "create": ("info",), "save": ("state_dict", "path"), "load": ("path", "map_location"), "commit": ("info",),
    "cleanup": (), "get_commit_info": (), "is_decoupled": (),
}
_WITHOUT_MEANING = frozenset({"parser_threads", "pin_host_cache"})
"""Settings of DataStates that say how its own threads and memory work."""


class CheckpointEngine:
    """What DeepSpeed makes where its configuration has `datastates_ckpt`, and calls for each file.

    config  DeepSpeed's
    rank    of this process

    raises  ArgumentError for a setting that is not known
    """

    def __init__(self, config: Any, rank: int) -> None:
        self.rank = rank
        self.budget_bytes = _budget_bytes(config.datastates_config.config)
        self._plugin: FlowstoneCheckpointEngine | None = None

    def belong_to(self, plugin: FlowstoneCheckpointEngine) -> None:
        """From now on, files are those of this plug-in's engine."""
        self._plugin = plugin

    @property
    def plugin(self) -> FlowstoneCheckpointEngine:
        if self._plugin is None:
            raise ArgumentError(
                "this CheckpointEngine belongs to no engine of DeepSpeed, so it does not know who saves what",
                next="call fill_datastates_slot() before deepspeed.initialize(...), or save by a fs.Checkpointer",
            )
        return self._plugin

    def save(self, state_dict: Any, path: str) -> None:
        self.plugin.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        return self.plugin.load(path, map_location)

    def wait(self, persist: bool = False) -> None:
        """Wait until the state may change; with `persist`, until every save so far is durable on all ranks.

        raises  SaveFailedError, StorageError
        """
        if self._plugin is None:
            return  # nothing was saved
        if persist:
            self._plugin.finish()
        else:
            self._plugin.get_commit_info()

    def commit(self, info: object = None) -> bool:
        self.wait(persist=True)
        return True


def fill_datastates_slot(
    *, keep: Keep | int | None = None, budget_bytes: int | None = None, saves_in_flight: int = 2,
    on_event: OnEvent | None = None,
) -> None:
    """Let engines whose configuration has `"datastates_ckpt": {}` save through Flowstone: those made from now on.

    All ranks call this before `deepspeed.initialize`. A second call replaces the options.

    budget_bytes  None: `host_cache_size` of `datastates_ckpt`, in GiB, where it is there
    others        those of a Checkpointer

    raises  FrameworkError  DeepSpeed is missing, or of a version with another interface
            ArgumentError   a package `datastates` is installed, which this would hide
    """
    version, kind = check_interface({"_configure_checkpointing": ()})
    slot_kind = DEEPSPEED.load(_SLOT).DataStatesCheckpointEngine
    DEEPSPEED.check(version, _SLOT_METHODS, slot_kind)
    _provide_package()
    options = {
        "keep": keep, "budget_bytes": budget_bytes, "saves_in_flight": saves_in_flight, "on_event": on_event,
    }
    own = getattr(kind._configure_checkpointing, "of_deepspeed", kind._configure_checkpointing)

    @functools.wraps(own)
    def configured(engine: Any) -> None:
        own(engine)
        _fill(engine, slot_kind, version, options)

    configured.of_deepspeed = own  # type: ignore[attr-defined]
    kind._configure_checkpointing = configured


def _provide_package() -> None:
    """Put a package into the process that DeepSpeed finds under that name. It is on no disk."""
    found = sys.modules.get(_PACKAGE)
    if getattr(found, "CheckpointEngine", None) is CheckpointEngine:
        return
    spec = find_spec(_PACKAGE)
    if spec is not None:
        places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
        raise ArgumentError(
            "a package `datastates` is there, which DeepSpeed would import", found=", ".join(map(str, places)),
            next="uninstall it, or leave datastates_ckpt out and call flowstone.adapters.deepspeed.attach(engine)",
        )
    package = ModuleType(_PACKAGE, "Flowstone, where DeepSpeed looks for DataStates.")
    package.__spec__ = ModuleSpec(_PACKAGE, None)
    package.CheckpointEngine = CheckpointEngine  # type: ignore[attr-defined]
    sys.modules[_PACKAGE] = package


def _fill(engine: Any, slot_kind: type, version: str, options: Mapping[str, Any]) -> None:
    """Give what DeepSpeed has made for `datastates_ckpt` the engine that it belongs to.

    DeepSpeed 0.19.8 calls nothing between a save and the end of a job, so that an update would change what is being
    captured, and never writes `latest`: the plug-in of `attach` does what is missing.
    """
    host = engine.checkpoint_engine
    own = getattr(host, "ckpt_engine", None) if isinstance(host, slot_kind) else None
    if not isinstance(own, CheckpointEngine):
        log.warning(
            "fill_datastates_slot() does nothing for an engine of DeepSpeed that saves through a %s: "
            'its configuration needs "datastates_ckpt": {}', type(host).__name__,
        )
        return
    former = DEEPSPEED.load("deepspeed.runtime.checkpoint_engine").TorchCheckpointEngine(engine._config)
    budget_bytes = options["budget_bytes"] if options["budget_bytes"] is not None else own.budget_bytes
    plugin = adopt(engine, version, {**options, "budget_bytes": budget_bytes}, former)
    own.belong_to(plugin)
    host.get_commit_info = plugin.get_commit_info
    host.cleanup = plugin.cleanup


def _budget_bytes(settings: object) -> int | None:
    """What `datastates_ckpt` says of memory. Raises ArgumentError."""
    if not isinstance(settings, Mapping):
        return None
    unknown = settings.keys() - _WITHOUT_MEANING - {"host_cache_size"}
    gibibytes = settings.get("host_cache_size")
    is_size = gibibytes is None or (type(gibibytes) in (int, float) and gibibytes > 0)
    if unknown or not is_size:
        name = "host_cache_size" if not is_size else min(map(str, unknown))
        raise ArgumentError(
            f"datastates_ckpt has a setting that is not known: {name} {settings.get(name)!r:.60}",
            next='give "datastates_ckpt": {"host_cache_size": 16}, in GiB, or {}',
        )
    return None if gibibytes is None else int(gibibytes * (1 << 30))
