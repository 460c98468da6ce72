"""load, report and run_store: what a training function of Ray calls."""

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
from flowstone.checkpoint import Checkpoint, open_checkpoint
from flowstone.checkpointer import Checkpointer
from flowstone.commit.entries import step_directory
from flowstone.commit.writer import set_aside
from flowstone.errors import ArgumentError, NoCheckpointError, NotAStoreError, StorageError
from flowstone.log import log
from flowstone.pipeline.futures import Save
from flowstone.pipeline.load_outcome import LoadReport
from flowstone.store.local import LocalStore


def run_store() -> Path:
    """The directory of this run in Ray's storage, for a Checkpointer: what it saves there is not uploaded again.

    raises  ArgumentError   the storage is no directory; then give the Checkpointer one that all workers share
            FrameworkError  Ray is not installed, or its interface is unknown
    """
    storage = ray_train().get_context().get_storage()
    run = local_run(storage)
    if run is None:
        raise ArgumentError(
            f"Ray's storage is no directory: {storage.experiment_fs_path}",
            next="save to a directory that all workers share; `report` uploads from there",
        )
    return run


def report(
    metrics: Mapping[str, Any], save: Save, *, background: bool = False, validation: Any = False
) -> None:
    """Report metrics and a save, in the place of `ray.train.report`. Every worker calls it.

    The save is one checkpoint of all workers, and becomes one of Ray's, called by its step: rank 0 uploads it, once it
    is durable on every rank.

    background  return at once: a thread of Ray's waits for the save and uploads it. Keep steps for as long as that
                takes
    validation  as ray.train.report has it

    raises  what the save failed of, the same on every worker, also in the background, where Ray raises it
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
    """Bring `state` back to the checkpoint that Ray resumes from; None where training begins. Every worker calls it,
    of any number, before the first save.

    Steps of the store that are newer than that, which Ray has never known, are set aside (`.superseded-*`). Where Ray
    knows none yet, the newest of the run's own store is loaded.

    raises  ArgumentError   the store is not the run's own, and holds steps though Ray knows no checkpoint
            NotAStoreError  what Ray resumes from was not saved by Flowstone
            what Checkpointer.load raises
    """
    context = ray_train().get_context()
    resumed, newest = ray_train().get_checkpoint(), checkpointer.latest()
    run = local_run(context.get_storage())
    if resumed is None:
        return _load_newest(checkpointer, state, newest, run)
    with resumed.as_directory() as place:
        try:
            found = open_checkpoint(place)
        except (NoCheckpointError, NotAStoreError) as error:
            if newest is not None and Path(newest.path).parent == run and not os.path.exists(place):
                return checkpointer.load(state)  # retention has removed what Ray knew
            raise NotAStoreError(
                f"Ray resumes from {resumed.path}, which is no checkpoint of Flowstone", found=error.message,
                next="load it as it was saved, and report from then on with flowstone.adapters.ray.report",
            ) from error
        if newest is not None and newest.step > found.step and context.get_world_rank() == 0:
            _set_aside(Path(newest.path).parent, found.step)
        if newest is not None and _has(Path(newest.path).parent, found):
            return checkpointer.load(state, step=found.step)
        with _as_store(found) as store, Checkpointer(store) as theirs:
            return theirs.load(state, step=found.step)


def _load_newest(
    checkpointer: Checkpointer, state: Mapping[str, object], newest: Checkpoint | None, run: Path | None
) -> LoadReport | None:
    if newest is None:
        return None
    if Path(newest.path).parent != run:
        raise ArgumentError(
            f"{Path(newest.path).parent} holds step {newest.step}, and Ray knows no checkpoint of this run",
            next="give each run a store of its own, or save to run_store(); to go on from that step, load it by "
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
            "training resumes from step %d, the last that Ray knows; set aside in %s: %s", step, place,
            ", ".join(map(str, moved)),
        )


def _has(place: Path, wanted: Checkpoint) -> bool:
    """Whether a store has that very checkpoint."""
    try:
        return open_checkpoint(place, wanted.step).manifest.id == wanted.manifest.id
    except NoCheckpointError:
        return False


@contextmanager
def _as_store(checkpoint: Checkpoint) -> Iterator[Path]:
    """A directory in which the checkpoint has its step's name: the one where it lies, or one with links."""
    place = Path(checkpoint.path)
    if place.name == step_directory(checkpoint.step):
        yield place.parent
        return
    with tempfile.TemporaryDirectory(prefix=".flowstone-", dir=place.parent) as made:
        (Path(made) / step_directory(checkpoint.step)).mkdir()
        for name in os.listdir(place):
            os.link(place / name, Path(made) / step_directory(checkpoint.step) / name)
        yield Path(made)
