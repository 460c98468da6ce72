"""A committed checkpoint into Ray's storage: whole, and checked there; what is torn never has a checkpoint's name."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowstone.adapters.ray.package import local_run, ray_train
from flowstone.checkpoint import Checkpoint, open_checkpoint
from flowstone.commit.entries import new_superseded_directory, saving_directory, step_directory
from flowstone.config import MIB
from flowstone.errors import FlowstoneError, StorageError
from flowstone.format.manifest import MANIFEST_NAME
from flowstone.log import log
from flowstone.store.os_errors import translated
from flowstone.store.system import System

_PIECE_BYTES = 16 * MIB  # of a file on its way to a remote file system


def upload(checkpoint: Checkpoint, storage: Any) -> Any:
    """The same in Ray's storage, as a ray.train.Checkpoint. Durable on return.

    In the run's own directory it stays where it is. On the same file system as that, its files get a second name there;
    on another one, they are copied, and the copy is verified.

    storage  a StorageContext of Ray

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
    """The files of a checkpoint, its manifest last: what is interrupted before it is none."""
    manifest = checkpoint.manifest
    segments = (row.name for row in manifest.segments)
    return (*segments, manifest.index.name, manifest.objects.name, MANIFEST_NAME)


def _copy(checkpoint: Checkpoint, target: Path) -> None:
    run, source, system = target.parent, Path(checkpoint.path), System()
    if _is_there(checkpoint, target):
        return
    draft = run / saving_directory(checkpoint.step, f"ray-{secrets.token_hex(8)}")
    for left in run.glob(saving_directory(checkpoint.step, "ray-*")):  # of an upload that was killed
        shutil.rmtree(left)
    with translated(run, "upload", draft.name, needed_bytes=checkpoint.manifest.data_bytes):
        system.make_directory(draft)
        linked = [_link(source / name, draft / name, system) for name in _names(checkpoint)]
        system.sync_directory(draft)
    if not all(linked):
        open_checkpoint(draft).verify()  # read back, past the page cache where that works
    with translated(run, "rename", draft.name):
        if target.exists():  # an earlier try of this run came to this step, and Ray never knew it
            aside = new_superseded_directory(checkpoint.step)
            system.rename(target, run / aside)
            log.warning("%s held what Ray does not know of; it is in %s now", target, aside)
        system.rename(draft, target)
        system.sync_directory(run)


def _is_there(checkpoint: Checkpoint, target: Path) -> bool:
    try:
        return open_checkpoint(target).manifest.id == checkpoint.manifest.id
    except FlowstoneError:
        return False  # safe: it is copied again, and what is there is set aside


def _link(source: Path, target: Path, system: System) -> bool:
    """A second name for a file, which never changes; else a copy, durable. Whether it is the same file."""
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
    """Into a file system of pyarrow's. The source is verified before; what arrived is known by its length."""
    checkpoint.verify()
    files.create_dir(place)
    files.delete_dir_contents(place, missing_dir_ok=True)  # of an upload that was cut short
    for name in _names(checkpoint):
        path, length = Path(checkpoint.path) / name, 0
        with (
            translated(path.parent, "upload", name), path.open("rb") as source,
            files.open_output_stream(f"{place}/{name}") as target,
        ):
            while piece := source.read(_PIECE_BYTES):
                target.write(piece)
                length += len(piece)
        found = files.get_file_info(f"{place}/{name}").size
        if found != length:
            raise StorageError(
                f"{place}/{name} is not as long as what was uploaded", expected=f"{length} bytes",
                found=f"{found} bytes", next="check Ray's storage",
            )
