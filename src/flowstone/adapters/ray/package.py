"""The package of Ray: whether it is one whose training functions are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowstone.adapters.framework import Framework
from flowstone.cluster import RAY

FRAMEWORK = Framework("ray", RAY, (RAY.rpartition("=")[2],))
_FUNCTIONS = {
    "report": (
        "metrics", "checkpoint", "checkpoint_dir_name", "checkpoint_upload_mode",
        "delete_local_checkpoint_after_upload", "checkpoint_upload_fn",
    ),
    "get_checkpoint": (), "get_context": (),
}
"""Of ray.train, with the names of their parameters: what is called."""


def ray_train() -> Any:
    """The module ray.train.

    raises  FrameworkError  Ray is missing, or of a version with another interface
    """
    version = str(FRAMEWORK.load("ray").__version__)
    train: Any = FRAMEWORK.load("ray.train")
    FRAMEWORK.check(version, _FUNCTIONS, train)
    return train


def local_run(storage: Any) -> Path | None:
    """The directory of this run in Ray's storage; None where that is no file system of this machine."""
    local = FRAMEWORK.load("pyarrow.fs").LocalFileSystem
    return Path(storage.experiment_fs_path).resolve() if isinstance(storage.storage_filesystem, local) else None
