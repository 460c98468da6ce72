"""Upload a committed checkpoint to Ray's storage, so that it appears atomically, and check it."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowstone.adapters.ray.package import local_run, ray_train
from flowstone.commit.entries import new_superseded_directory, saving_directory, step_directory
from flowstone.config import MIB
from flowstone.errors import FlowstoneError, StorageError
from flowstone.format.manifest import MANIFEST_NAME
from flowstone.log import log
from flowstone.reading.checkpoint import Checkpoint, open_checkpoint
from flowstone.store.os_errors import translated
from flowstone.store.system import System

_PIECE_BYTES = 16 * MIB  # bytes of one write to a remote file system


def upload(checkpoint: Checkpoint, storage: Any) -> Any:
    """Put a checkpoint into Ray's storage. Returns it as a ray.train.Checkpoint. Durable on return.

    A checkpoint in the run's own directory stays there. If the checkpoint is on the same file system, its files are
    hard-linked. Otherwise they are copied, and the copy is verified.

    storage  Ray's StorageContext

    raises  StorageError, DamagedError
    """
    run, source = local_run(storage), Path(checkpoint.path)
    name = step_directory(checkpoint.step)
    kind = ray_train().Checkpoint
    if run is None:
        place = storage.build_checkpoint_path_from_name(name)
        _send(checkpoint, storage.storage_filesystem, place)
        return kind(place, filesystem=storage.storage_filesystem)
    if source.resolve().parent != run:
        _copy(checkpoint, run / name)
    return kind(str(run / name), filesystem=storage.storage_filesystem)


def _names(checkpoint: Checkpoint) -> Sequence[str]:
    """The files of a checkpoint. The manifest comes last, so that an interrupted upload is not a checkpoint."""
    manifest = checkpoint.manifest
    segments = (row.name for row in manifest.segments)
    return (*segments, manifest.index.name, manifest.objects.name, MANIFEST_NAME)


def _copy(checkpoint: Checkpoint, target: Path) -> None:
    run, source, system = target.parent, Path(checkpoint.path), System()
    if _is_there(checkpoint, target):
        return
    draft = run / saving_directory(checkpoint.step, f"ray-{secrets.token_hex(8)}")
    for left in run.glob(saving_directory(checkpoint.step, "ray-*")):  # remove what a killed upload has left
        shutil.rmtree(left)
    with translated(run, "upload", draft.name, needed_bytes=checkpoint.manifest.data_bytes):
        system.make_directory(draft)
        linked = [_link(source / name, draft / name, system) for name in _names(checkpoint)]
        system.sync_directory(draft)
    if not all(linked):
        open_checkpoint(draft).verify()  # reads the files again, past the page cache if possible
    with translated(run, "rename", draft.name):
        if target.exists():  # an earlier attempt of this run has reached this step, but not reported it
            aside = new_superseded_directory(checkpoint.step)
            system.rename(target, run / aside)
            log.warning("%s was not known to Ray; it was renamed to %s", target, aside)
        system.rename(draft, target)
        system.sync_directory(run)


def _is_there(checkpoint: Checkpoint, target: Path) -> bool:
    try:
        return open_checkpoint(target).manifest.id == checkpoint.manifest.id
    except FlowstoneError:
        return False  # the checkpoint is copied again, and the existing directory is set aside


def _link(source: Path, target: Path, system: System) -> bool:
    """Hard-link a file, since it never changes. If that is not possible, copy it durably. Returns whether it was
    linked.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
            raise
    else:
        return True
    shutil.copyfile(source, target)
    fd = os.open(target, os.O_RDWR | os.O_CLOEXEC)
    try:
        system.sync(fd)
    finally:
        os.close(fd)
    return False


def _send(checkpoint: Checkpoint, files: Any, place: str) -> None:
    """Upload to a file system of pyarrow. The checkpoint is verified before the upload; of the uploaded files, only the
    lengths are checked.
    """
    checkpoint.verify()
    files.create_dir(place)
    files.delete_dir_contents(place, missing_dir_ok=True)  # removes what an interrupted upload has left
    for name in _names(checkpoint):
        path, length = Path(checkpoint.path) / name, 0
        with (
            translated(path.parent, "upload", name), path.open("rb") as source,
            files.open_output_stream(f"{place}/{name}") as target,
        ):
            while piece := source.read(_PIECE_BYTES):
                target.write(piece)
                length += len(piece)
        size = files.get_file_info(f"{place}/{name}").size
        if size != length:
            raise StorageError(
                f"{place}/{name} has another length than the uploaded file",
                expected=f"{length} bytes", found=f"{size} bytes",
                next="check that Ray's storage stores files completely, then save again",
            )
