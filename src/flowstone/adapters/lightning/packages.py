"""The packages of Lightning: `lightning`; or `pytorch_lightning` with `lightning_fabric`, which have classes of their
own.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from flowstone.adapters.framework import SupportedFramework

KNOWN = ("2.6.6",)
_METHODS = {
    "save_checkpoint": ("checkpoint", "path", "storage_options"),
    "load_checkpoint": ("path", "map_location", "weights_only"),
    "remove_checkpoint": ("path",),
    "teardown": (),
}
"""Methods of CheckpointIO, with the names of their parameters."""

_TRAINER_METHODS = {
    "save_checkpoint": ("checkpoint", "filepath", "storage_options"), "remove_checkpoint": ("filepath",),
    "load_checkpoint": ("checkpoint_path", "weights_only"), "teardown": (), "broadcast": ("obj", "src"),
}
_FABRIC_METHODS = {
    "save_checkpoint": ("path", "state", "storage_options", "filter"), "broadcast": ("obj", "src"),
    "load_checkpoint": ("path", "state", "strict", "weights_only"),
}
"""Methods of sharded strategies, with the names of their parameters."""

LIGHTNING = SupportedFramework("lightning", "lightning", KNOWN)
_PYTORCH_LIGHTNING = SupportedFramework("pytorch_lightning", "pytorch-lightning", KNOWN)
_LIGHTNING_FABRIC = SupportedFramework("lightning_fabric", "lightning-fabric", KNOWN)


def checkpoint_io_classes() -> tuple[type, ...]:
    """The class CheckpointIO of each installed package, since a plugin has to be an instance of its package's class.

    raises  FrameworkError  no package is installed, or one has an unknown interface
    """
    kinds: list[type] = []
    for framework, fabric in ((LIGHTNING, "lightning.fabric"), (_LIGHTNING_FABRIC, "lightning_fabric")):
        if find_spec(framework.package) is None:
            continue
        kind: type = framework.load(f"{fabric}.plugins").CheckpointIO
        framework.check(framework.load(fabric).__version__, _METHODS, kind)
        kinds.append(kind)
    if not kinds:
        LIGHTNING.load("lightning")  # raises an error that names the missing package
    return tuple(kinds)


def torch_checkpoint_io() -> Any:
    """Lightning's own TorchCheckpointIO."""
    fabric = "lightning.fabric" if find_spec("lightning") is not None else "lightning_fabric"
    return LIGHTNING.load(f"{fabric}.plugins").TorchCheckpointIO()


def callback_classes() -> tuple[type, ...]:
    """The class Callback of each installed package. Raises FrameworkError if there is none, as Fabric alone has no
    callbacks.
    """
    callbacks = tuple(framework.load(package).Callback for framework, package in _trainers())
    if not callbacks:
        LIGHTNING.load("lightning.pytorch")
    return callbacks


def loads_through_plugins(strategy: object) -> bool:
    """Whether a Trainer's strategy loads through its CheckpointIO, as the base class Strategy does."""
    kinds = [framework.load(f"{package}.strategies").Strategy for framework, package in _trainers()]
    own = getattr(type(strategy), "load_checkpoint", None)
    return any(isinstance(strategy, kind) and own is kind.load_checkpoint for kind in kinds)


def sharded_strategies() -> list[tuple[type, bool]]:
    """The classes of sharded strategies. Each has a flag: True if it is a Trainer's, False if it is Fabric's.

    raises  FrameworkError  no package is installed, or one has an unknown interface
    """
    trainers = [(framework, package, _TRAINER_METHODS) for framework, package in _trainers()]
    fabrics = [
        (framework, package, _FABRIC_METHODS)
        for framework, package in ((LIGHTNING, "lightning.fabric"), (_LIGHTNING_FABRIC, "lightning_fabric"))
        if find_spec(framework.package) is not None
    ]
    if not fabrics:
        LIGHTNING.load("lightning")  # raises an error that names the missing package
    strategy_kinds: list[tuple[type, bool]] = []
    for framework, package, methods in (*trainers, *fabrics):
        strategies, version = framework.load(f"{package}.strategies"), framework.load(package).__version__
        for kind in (strategies.FSDPStrategy, strategies.ModelParallelStrategy):
            framework.check(version, methods, kind)
            strategy_kinds.append((kind, methods is _TRAINER_METHODS))
    return strategy_kinds


def _trainers() -> list[tuple[SupportedFramework, str]]:
    packages = (LIGHTNING, "lightning.pytorch"), (_PYTORCH_LIGHTNING, "pytorch_lightning")
    return [(framework, package) for framework, package in packages if find_spec(framework.package) is not None]
