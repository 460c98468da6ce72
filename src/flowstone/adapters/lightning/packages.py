"""The packages of Lightning: `lightning`; and `pytorch_lightning` with `lightning_fabric`, whose classes are others."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from flowstone.adapters.framework import Framework

KNOWN = ("2.6.6",)
_METHODS = {
    "save_checkpoint": ("checkpoint", "path", "storage_options"),
    "load_checkpoint": ("path", "map_location", "weights_only"),
    "remove_checkpoint": ("path",),
    "teardown": (),
}
"""Of CheckpointIO, with the names of their parameters."""

_TRAINER_METHODS = {
    "save_checkpoint": ("checkpoint", "filepath", "storage_options"), "remove_checkpoint": ("filepath",),
    "load_checkpoint": ("checkpoint_path", "weights_only"), "teardown": (), "broadcast": ("obj", "src"),
}
_FABRIC_METHODS = {
    "save_checkpoint": ("path", "state", "storage_options", "filter"), "broadcast": ("obj", "src"),
    "load_checkpoint": ("path", "state", "strict", "weights_only"),
}
"""Of sharded strategies, likewise."""

LIGHTNING = Framework("lightning", "lightning", KNOWN)
_PYTORCH_LIGHTNING = Framework("pytorch_lightning", "pytorch-lightning", KNOWN)
_LIGHTNING_FABRIC = Framework("lightning_fabric", "lightning-fabric", KNOWN)


def checkpoint_io_classes() -> tuple[type, ...]:
    """CheckpointIO of each package that is installed: a plug-in has to be an instance of the one that it is given to.

    raises  FrameworkError where none is installed, or one has an interface that is not known
    """
    found: list[type] = []
    for framework, fabric in ((LIGHTNING, "lightning.fabric"), (_LIGHTNING_FABRIC, "lightning_fabric")):
        if find_spec(framework.package) is None:
            continue
        kind: type = framework.load(f"{fabric}.plugins").CheckpointIO
        framework.check(framework.load(fabric).__version__, _METHODS, kind)
        found.append(kind)
    if not found:
        LIGHTNING.load("lightning")  # says what is missing
    return tuple(found)


def torch_checkpoint_io() -> Any:
    """What Lightning itself reads and writes by."""
    fabric = "lightning.fabric" if find_spec("lightning") is not None else "lightning_fabric"
    return LIGHTNING.load(f"{fabric}.plugins").TorchCheckpointIO()


def callback_classes() -> tuple[type, ...]:
    """Callback of each package that is installed. Raises FrameworkError where none is: Fabric has no callbacks."""
    found = tuple(framework.load(package).Callback for framework, package in _trainers())
    if not found:
        LIGHTNING.load("lightning.pytorch")
    return found


def loads_through_plugins(strategy: object) -> bool:
    """Whether a strategy of a Trainer leaves loading to its CheckpointIO, as Strategy itself does."""
    kinds = [framework.load(f"{package}.strategies").Strategy for framework, package in _trainers()]
    own = getattr(type(strategy), "load_checkpoint", None)
    return any(isinstance(strategy, kind) and own is kind.load_checkpoint for kind in kinds)


def sharded_strategies() -> list[tuple[type, bool]]:
    """The strategies whose processes hold parts of a model, and whether each is a Trainer's; the others are Fabric's.

    raises  FrameworkError where no package is installed, or one has an interface that is not known
    """
    trainers = [(framework, package, _TRAINER_METHODS) for framework, package in _trainers()]
    fabrics = [
        (framework, package, _FABRIC_METHODS)
        for framework, package in ((LIGHTNING, "lightning.fabric"), (_LIGHTNING_FABRIC, "lightning_fabric"))
        if find_spec(framework.package) is not None
    ]
    if not fabrics:
        LIGHTNING.load("lightning")  # says what is missing
    found: list[tuple[type, bool]] = []
    for framework, package, methods in (*trainers, *fabrics):
        strategies, version = framework.load(f"{package}.strategies"), framework.load(package).__version__
        for kind in (strategies.FSDPStrategy, strategies.ModelParallelStrategy):
            framework.check(version, methods, kind)
            found.append((kind, methods is _TRAINER_METHODS))
    return found


def _trainers() -> list[tuple[Framework, str]]:
    known = (LIGHTNING, "lightning.pytorch"), (_PYTORCH_LIGHTNING, "pytorch_lightning")
    return [(framework, package) for framework, package in known if find_spec(framework.package) is not None]
