"""Provides the package `datastates`, which DeepSpeed imports if its configuration has `datastates_ckpt`."""

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
from flowstone.events.phases import OnEvent
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
"""Settings of DataStates for its own threads and memory, which are ignored."""


class CheckpointEngine:
    """The class that DeepSpeed creates with `datastates_ckpt` in its configuration, and calls for each file.

    config  DeepSpeed's configuration
    rank    this process's rank

    raises  ArgumentError  there is an unknown setting
    """

    def __init__(self, config: Any, rank: int) -> None:
        self.rank = rank
        self.budget_bytes = _budget_bytes(config.datastates_config.config)
        self._plugin: FlowstoneCheckpointEngine | None = None

    def attach_plugin(self, plugin: FlowstoneCheckpointEngine) -> None:
        """Use this plugin for all files from now on."""
        self._plugin = plugin

    @property
    def plugin(self) -> FlowstoneCheckpointEngine:
        if self._plugin is None:
            raise ArgumentError(
                "this CheckpointEngine is not attached to a DeepSpeed engine",
                next="call fill_datastates_slot() before deepspeed.initialize(...), or save with fs.Checkpointer",
            )
        return self._plugin

    def save(self, state_dict: Any, path: str) -> None:
        self.plugin.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        return self.plugin.load(path, map_location)

    def wait(self, persist: bool = False) -> None:
        """Wait until the state may change. With `persist`, wait until every save so far is durable on all ranks.

        raises  SaveFailedError, StorageError
        """
        if self._plugin is None:
            return  # nothing was saved yet
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
    """Let engines that are created after this call, with `"datastates_ckpt": {}` in their configuration, save through
    Flowstone.

    All ranks call this before `deepspeed.initialize`. A second call replaces the options.

    budget_bytes  the memory budget; None: `host_cache_size` of `datastates_ckpt`, which is in GiB, if it is set
    others        the other arguments are options of the Checkpointer

    raises  FrameworkError  DeepSpeed is not installed, or has an unknown interface
            ArgumentError   the package `datastates` is installed, so DeepSpeed would import that package
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
    """Register a package that exists only in memory, under the name that DeepSpeed imports."""
    existing = sys.modules.get(_PACKAGE)
    if getattr(existing, "CheckpointEngine", None) is CheckpointEngine:
        return
    spec = find_spec(_PACKAGE)
    if spec is not None:
        places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
        raise ArgumentError(
            "DeepSpeed would import the installed package `datastates` instead of Flowstone",
            found=", ".join(map(str, places)),
            next="uninstall it, or leave datastates_ckpt out and call flowstone.adapters.deepspeed.attach(engine)",
        )
    package = ModuleType(_PACKAGE, "Flowstone, where DeepSpeed looks for DataStates.")
    package.__spec__ = ModuleSpec(_PACKAGE, None)
    package.CheckpointEngine = CheckpointEngine  # type: ignore[attr-defined]
    sys.modules[_PACKAGE] = package


def _fill(engine: Any, slot_kind: type, version: str, options: Mapping[str, Any]) -> None:
    """Connect the CheckpointEngine that DeepSpeed has created for `datastates_ckpt` to its DeepSpeed engine.

    DeepSpeed 0.19.8 does not call that CheckpointEngine before an update, so the update would change the state during
    the capture. Neither does DeepSpeed call it to write `latest`. The plugin of `attach` handles both.
    """
    host = engine.checkpoint_engine
    own = getattr(host, "ckpt_engine", None) if isinstance(host, slot_kind) else None
    if not isinstance(own, CheckpointEngine):
        log.warning(
            "fill_datastates_slot() has no effect on a DeepSpeed engine that saves through a %s: "
            'its configuration needs "datastates_ckpt": {}', type(host).__name__,
        )
        return
    former = DEEPSPEED.load("deepspeed.runtime.checkpoint_engine").TorchCheckpointEngine(engine._config)
    budget_bytes = options["budget_bytes"] if options["budget_bytes"] is not None else own.budget_bytes
    plugin = adopt(engine, version, {**options, "budget_bytes": budget_bytes}, former)
    own.attach_plugin(plugin)
    host.get_commit_info = plugin.get_commit_info
    host.cleanup = plugin.cleanup


def _budget_bytes(settings: object) -> int | None:
    """The memory budget in bytes, from the settings of `datastates_ckpt`. None if it is not set. Raises ArgumentError.
    """
    if not isinstance(settings, Mapping):
        return None
    unknown = settings.keys() - _WITHOUT_MEANING - {"host_cache_size"}
    gibibytes = settings.get("host_cache_size")
    is_size = gibibytes is None or (type(gibibytes) in (int, float) and gibibytes > 0)
    if unknown or not is_size:
        name = "host_cache_size" if not is_size else min(map(str, unknown))
        raise ArgumentError(
            f"datastates_ckpt has an unknown or invalid setting: {name} {settings.get(name)!r:.60}",
            next='give "datastates_ckpt": {"host_cache_size": 16}, in GiB, or {}',
        )
    return None if gibibytes is None else int(gibibytes * (1 << 30))
