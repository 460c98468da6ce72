"""Checks that the functions of Ray Train are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowstone.adapters.framework import SupportedFramework
from flowstone.cluster import RAY

FRAMEWORK = SupportedFramework("ray", RAY, (RAY.rpartition("=")[2],))
_FUNCTIONS = {
    "report": (
        "metrics", "checkpoint", "checkpoint_dir_name", "checkpoint_upload_mode",
        "delete_local_checkpoint_after_upload", "checkpoint_upload_fn",
    ),
    "get_checkpoint": (), "get_context": (),
}
"""Functions of ray.train that are called, with the names of their parameters."""


def ray_train() -> Any:
    """The module ray.train.

    raises  FrameworkError  Ray is not installed, or has an unknown interface
    """
    version = str(FRAMEWORK.load("ray").__version__)
    train: Any = FRAMEWORK.load("ray.train")
    FRAMEWORK.check(version, _FUNCTIONS, train)
    return train


def local_run(storage: Any) -> Path | None:
    """The directory of this run in Ray's storage. None if the storage is not a local file system."""
    local = FRAMEWORK.load("pyarrow.fs").LocalFileSystem
    return Path(storage.experiment_fs_path).resolve() if isinstance(storage.storage_filesystem, local) else None
