"""`attach`: makes a DeepSpeed engine save and load through Flowstone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowstone.adapters.framework import SupportedFramework
from flowstone.config import Keep
from flowstone.errors import ArgumentError
from flowstone.events.phases import OnEvent

if TYPE_CHECKING:
    from flowstone.adapters.deepspeed.plugin import FlowstoneCheckpointEngine


DEEPSPEED = SupportedFramework("deepspeed", "deepspeed==0.19.8", ("0.19.8",))
_METHODS = {
    "save_checkpoint": ("save_dir", "tag", "client_state", "save_latest"), "step": (),
    "load_checkpoint": ("load_dir", "tag"), "_commit_decoupled_checkpoint": (),
    "_get_all_ckpt_names": ("checkpoints_path", "tag"), "zero_nvme_offload_optimizer": (),
    "_get_ckpt_name": ("checkpoints_path", "tag", "mp_placeholder", "pp_placeholder"), "zero_optimization": (),
    "zero_optimization_stage": (), "zero_optimization_partition_weights": (), "zero_elastic_checkpoint": (),
}
_PLUGIN_METHODS = {
    "create": ("info",), "save": ("state_dict", "path"), "load": ("path", "map_location"), "commit": ("info",),
    "get_commit_info": (), "is_decoupled": (), "preserves_storage_sharing": (), "cleanup": (),
    "is_data_parallel_writer": ("dp_rank",),
}


def attach(
    engine: Any, *, keep: Keep | int | None = None, budget_bytes: int | None = None, saves_in_flight: int = 2,
    on_event: OnEvent | None = None,
) -> FlowstoneCheckpointEngine:
    """Make `engine.save_checkpoint` and `engine.load_checkpoint` use Flowstone. All ranks call this.

    engine   the DeepSpeed engine, which is the first value that `deepspeed.initialize` returns
    others   the other arguments are options of the Checkpointer

    returns  the engine's new `checkpoint_engine`; its `wait()` returns once all saves are durable
    raises   FrameworkError  DeepSpeed is not installed, or has an unknown interface
             ArgumentError   `engine` is not a DeepSpeed engine, or Flowstone cannot access its state
    """
    version, kind = check_interface({})
    if not isinstance(engine, kind):
        raise ArgumentError(
            f"engine must be a DeepSpeed engine, got {type(engine).__name__}",
            next="give the first value that deepspeed.initialize(...) returns",
        )
    if hasattr(engine.save_checkpoint, "of_deepspeed"):
        raise ArgumentError("this engine already saves through Flowstone", next="call attach once per engine")
    options = {
        "keep": keep, "budget_bytes": budget_bytes, "saves_in_flight": saves_in_flight, "on_event": on_event,
    }
    plugin = adopt(engine, version, options, engine.checkpoint_engine)
    engine.checkpoint_engine = plugin
    return plugin


def check_interface(more: Mapping[str, Sequence[str]]) -> tuple[str, Any]:
    """DeepSpeed's version, and its engine class. Raises FrameworkError if their interface is unknown.

    more  further methods of the engine that are replaced, with the names of their parameters
    """
    version = str(DEEPSPEED.load("deepspeed").__version__)
    kind = DEEPSPEED.load("deepspeed.runtime.engine").DeepSpeedEngine
    DEEPSPEED.check(version, {**_METHODS, **more}, kind)
    plugin_kind = DEEPSPEED.load("deepspeed.runtime.checkpoint_engine.checkpoint_engine").CheckpointEngine
    DEEPSPEED.check(version, _PLUGIN_METHODS, plugin_kind)
    return version, kind


def adopt(engine: Any, version: str, options: dict[str, Any], former: Any) -> FlowstoneCheckpointEngine:
    """Replace the engine's CheckpointEngine, and wrap its methods for saving and loading.

    former  DeepSpeed's own CheckpointEngine, which is still used for files that are not Flowstone's
    raises  ArgumentError  the engine has state that Flowstone cannot access
    """
    from flowstone.adapters.deepspeed.plugin import FlowstoneCheckpointEngine

    if engine.zero_nvme_offload_optimizer():
        raise ArgumentError(
            "the optimizer's state is offloaded to NVMe, in files that Flowstone cannot save",
            next="offload to the CPU, or let DeepSpeed save this job",
        )
    plugin = FlowstoneCheckpointEngine(engine, version, options, former)
    engine.save_checkpoint = plugin.wrap_save(engine.save_checkpoint)
    engine.load_checkpoint = plugin.wrap_load(engine.load_checkpoint)
    return plugin
