"""The functions load, report and run_store, for the training functions of Ray."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from flowstone.adapters.ray.package import FRAMEWORK, local_run, ray_train
from flowstone.adapters.ray.upload import upload
from flowstone.checkpointer import Checkpointer
from flowstone.commit.entries import step_directory
from flowstone.commit.writer import set_aside
from flowstone.errors import ArgumentError, NoCheckpointError, NotAStoreError, StorageError
from flowstone.log import log
from flowstone.reading.checkpoint import Checkpoint, open_checkpoint
from flowstone.session.futures import Save
from flowstone.session.load_outcome import LoadReport
from flowstone.store.local import LocalStore


def run_store() -> Path:
    """The directory of this run in Ray's storage, for a Checkpointer. Checkpoints that are saved there need no upload.

    raises  ArgumentError   the storage is not a directory; in that case, give the Checkpointer a directory that all
                            workers share
            FrameworkError  Ray is not installed, or has an unknown interface
    """
    storage = ray_train().get_context().get_storage()
    run = local_run(storage)
    if run is None:
        raise ArgumentError(
            f"Ray's storage is not a directory: {storage.experiment_fs_path}",
            next="save to a directory that all workers share; `report` uploads from there",
        )
    return run


def report(
    metrics: Mapping[str, Any], save: Save, *, background: bool = False, validation: Any = False
) -> None:
    """Report metrics and a save. Use this instead of `ray.train.report`. Every worker calls it.

    The save is one checkpoint of all workers. It becomes Ray's checkpoint, which is named after the step. Rank 0
    uploads the checkpoint once it is durable on every rank.

    background  True: return immediately, and let a thread of Ray wait for the save and upload it. Retention must keep
                the step until then
    validation  as in ray.train.report

    raises  the error of the save, which is the same on every worker; with `background`, Ray raises it
    """
    train = ray_train()
    context = train.get_context()
    if not background:
        save.committed.result()
    is_first = context.get_world_rank() == 0
    modes = FRAMEWORK.load("ray.train").CheckpointUploadMode
    train.report(
        dict(metrics), checkpoint=train.Checkpoint.from_directory(step_directory(save.step)) if is_first else None,
        checkpoint_dir_name=step_directory(save.step),
        checkpoint_upload_mode=modes.ASYNC if background else modes.SYNC,
        delete_local_checkpoint_after_upload=False,
        checkpoint_upload_fn=partial(_upload_committed, save, context.get_storage()), validation=validation,
    )


def _upload_committed(save: Save, storage: Any, _: Any, name: str) -> Any:
    committed = save.committed.result()
    try:
        return upload(committed, storage)
    except (StorageError, FileNotFoundError, NoCheckpointError) as error:
        if Path(committed.path).exists():
            raise
        raise StorageError(
            f"{name} was removed before it was uploaded", found=str(error).partition("\n")[0],
            next="keep more steps (keep=), report without background=True, or save to run_store()",
        ) from error


def load(checkpointer: Checkpointer, state: Mapping[str, object]) -> LoadReport | None:
    """Restore `state` from the checkpoint from which Ray resumes. Returns None if training starts from the beginning.
    Every worker calls this before the first save. The number of workers may have changed.

    Newer steps in the store, which Ray does not know, are set aside (renamed to `.superseded-*`). If Ray knows no
    checkpoint yet, the newest one in the run's own store is loaded.

    raises  ArgumentError   the store is not the run's own, and has steps although Ray knows no checkpoint
            NotAStoreError  Ray's checkpoint was not saved by Flowstone
            and the errors of Checkpointer.load
    """
    context = ray_train().get_context()
    resumed, newest = ray_train().get_checkpoint(), checkpointer.latest()
    run = local_run(context.get_storage())
    if resumed is None:
        return _load_newest(checkpointer, state, newest, run)
    with resumed.as_directory() as place:
        try:
            resumed_from = open_checkpoint(place)
        except (NoCheckpointError, NotAStoreError) as error:
            if newest is not None and Path(newest.path).parent == run and not os.path.exists(place):
                return checkpointer.load(state)  # if retention has removed Ray's checkpoint, the newest one is loaded
            raise NotAStoreError(
                f"Ray resumes from {resumed.path}, which is not a Flowstone checkpoint",
                found=error.message,
                next="load this checkpoint the way it was saved, and report later ones with "
                "flowstone.adapters.ray.report",
            ) from error
        if newest is not None and newest.step > resumed_from.step and context.get_world_rank() == 0:
            _set_aside(Path(newest.path).parent, resumed_from.step)
        if newest is not None and _holds_checkpoint(Path(newest.path).parent, resumed_from):
            return checkpointer.load(state, step=resumed_from.step)
        with _store_with(resumed_from) as store, Checkpointer(store) as theirs:
            return theirs.load(state, step=resumed_from.step)


def _load_newest(
    checkpointer: Checkpointer, state: Mapping[str, object], newest: Checkpoint | None, run: Path | None
) -> LoadReport | None:
    if newest is None:
        return None
    if Path(newest.path).parent != run:
        raise ArgumentError(
            f"{Path(newest.path).parent} holds step {newest.step}, but Ray knows no checkpoint of this run",
            next="give each run its own store, or save to run_store(); to resume from that step, load it with "
            "Checkpointer.load",
        )
    return checkpointer.load(state)


def _set_aside(place: Path, step: int) -> None:
    store = LocalStore(place)
    try:
        store.lock(f"process {os.getpid()}, which resumes from step {step}")
        moved = set_aside(store, step)
    finally:
        store.close()
    if moved:
        log.warning(
            "training resumes from step %d, the last that Ray knows; newer steps were set aside in %s: %s", step, place,
            ", ".join(map(str, moved)),
        )


def _holds_checkpoint(place: Path, checkpoint: Checkpoint) -> bool:
    """Whether a store has this checkpoint."""
    try:
        return open_checkpoint(place, checkpoint.step).manifest.id == checkpoint.manifest.id
    except NoCheckpointError:
        return False


@contextmanager
def _store_with(checkpoint: Checkpoint) -> Iterator[Path]:
    """Context of a directory in which the checkpoint is named after its step: its parent directory, or a temporary one
    with links.
    """
    place = Path(checkpoint.path)
    if place.name == step_directory(checkpoint.step):
        yield place.parent
        return
    with tempfile.TemporaryDirectory(prefix=".flowstone-", dir=place.parent) as made:
        (Path(made) / step_directory(checkpoint.step)).mkdir()
        for name in os.listdir(place):
            os.link(place / name, Path(made) / step_directory(checkpoint.step) / name)
        yield Path(made)
