"""The CheckpointEngine for DeepSpeed. It saves the files of all ranks as one checkpoint, which is committed in the
background.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from flowstone.adapters.deepspeed.merged_weights import reads_pointers
from flowstone.adapters.deepspeed.other_ranks import file_for_this_rank, file_of_rank, model_file_names
from flowstone.adapters.deepspeed.pointers import Pointer, has_latest, publish, read_pointer, set_latest
from flowstone.adapters.deepspeed.stored_files import SECTIONS, file_names, read_file, section_of
from flowstone.adapters.deepspeed.values import encode_state
from flowstone.checkpointer import Checkpointer
from flowstone.errors import DamagedError, FlowstoneError, SaveFailedError
from flowstone.reading.checkpoint import Checkpoint, open_checkpoint
from flowstone.runtime.exit_hook import ExitHook, without_frames
from flowstone.state import PerRank

_JOB = "deepspeed"


@dataclass(eq=False)
class _Publication:
    """A checkpoint that becomes visible to DeepSpeed after its commit. At the end `done` is set; after a failure,
    `error` is set first.
    """

    directory: Path
    tag: str
    step: int
    latest: bool
    done: threading.Event = field(default_factory=threading.Event)
    error: FlowstoneError | None = None

    def end(self, error: FlowstoneError | None) -> None:
        self.error = error
        self.done.set()


class FlowstoneCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Replaces DeepSpeed's own CheckpointEngine: see `attach`.

    engine   the DeepSpeedEngine
    version  DeepSpeed's version
    options  options for the Checkpointers, of which each directory has one
    former   the CheckpointEngine that is used for files that are not Flowstone's

    `save_checkpoint` returns once the save is planned, and small tensors are copied. Parameters and optimizer state are
    captured while training continues; the engine's next step waits for the capture, not for the disk.
    """

    def __init__(self, engine: Any, version: str, options: dict[str, Any], former: Any) -> None:
        super().__init__()
        self.name = "FlowstoneCheckpointEngine"
        self._engine, self._version, self._options = weakref.ref(engine), version, options
        self._former = former
        self._files: dict[str, dict[str, Any]] | None = None  # the files of the running save; None: no save is running
        self._checkpointer: Checkpointer | None = None
        self._directory: Path | None = None
        self._loaded: tuple[Path, Pointer] | None = None
        self._publications: list[_Publication] = []
        self._pid = os.getpid()
        # closes at exit, so that `latest` names the last checkpoint, even if the job did not wait for it
        self._end = ExitHook(self.cleanup)
        self._end.before_threads_end()

    @property
    def engine(self) -> Any:
        """The DeepSpeed engine, to which this object has only a weak reference, since the engine refers to it."""
        engine = self._engine()
        assert engine is not None, "an engine is there while it calls its plug-in"
        return engine

    # Methods that DeepSpeed calls

    def create(self, info: Any) -> None:
        if self._files is None:
            self._former.create(info)

    def save(self, state_dict: Any, path: str) -> None:
        if self._files is None:  # a file for other programs, from save_16bit_model
            self._former.save(state_dict, path)
            return
        self._files[Path(path).name] = encode_state(state_dict)

    def load(self, path: str, map_location: Any = None) -> Any:
        """The content of a file for this rank. It is read from a Flowstone checkpoint, and verified; any other file is
        read by DeepSpeed.
        """
        place = Path(path)
        source = place if place.exists() else file_of_rank(place, 0)  # fewer ranks than now may have saved
        if not source.exists() or read_pointer(source) is None:
            return self._former.load(path, map_location)
        return file_for_this_rank(self.engine, self._checkpoint_of(source), place.name)

    def _saved_file(self, path: str) -> Any:
        """The content of a file in a Flowstone checkpoint, as its rank saved it."""
        place = Path(path)
        return read_file(self._checkpoint_of(place), place.name)

    def _checkpoint_of(self, place: Path) -> Checkpoint:
        """The checkpoint that a pointer file names. Raises DamagedError."""
        pointer = read_pointer(place)
        assert pointer is not None, "a pointer file"
        store = place.parent.parent
        checkpoint = open_checkpoint(store, pointer.step)
        job = checkpoint.objects.get(_JOB)
        if not isinstance(job, dict) or job.get("tag") != pointer.tag:
            raise DamagedError(
                f"{place} refers to step {pointer.step} of {store}, but this step was saved with another tag",
                expected=f"{pointer.tag!r:.80}", next="load another tag",
            )
        self._loaded = store.resolve(), pointer
        return checkpoint

    def commit(self, info: Any) -> bool:
        return bool(self._former.commit(info))  # a commit for save_16bit_model

    def get_commit_info(self) -> None:
        """Called by DeepSpeed before an optimizer's step. Returns once all of the state is captured, and may change."""
        if self._checkpointer is not None:
            self._checkpointer.fence()

    def is_decoupled(self) -> bool:
        return True

    def preserves_storage_sharing(self) -> bool:
        return False

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return bool(self._former.is_data_parallel_writer(dp_rank))

    def cleanup(self) -> None:
        """Wait for saves in flight, and release the memory. Does nothing in a forked child. Raises the errors of
        `wait`.
        """
        if os.getpid() != self._pid:
            return
        if self._checkpointer is not None:
            checkpointer, self._checkpointer, self._directory = self._checkpointer, None, None
            checkpointer.close()
        self._await_publications()

    # Methods that the job calls

    def wait(self) -> None:
        """Wait until all saves are durable, and `latest` names the last one. All ranks call this, and if a save has
        failed, all raise an error.

        raises  SaveFailedError, StorageError
        """
        failure: FlowstoneError | None = None
        try:
            self.finish()
        except FlowstoneError as error:
            failure = error
        failures = torch.tensor([float(failure is not None)], device=self.engine.device)
        torch.distributed.all_reduce(failures)
        if failure is not None:
            raise failure
        if failures.item():
            raise SaveFailedError("a save failed on another rank", next="see its error, then save again")

    def finish(self) -> None:
        """Wait until every save so far is durable on all ranks. Raises only failures of this rank."""
        if self._checkpointer is not None:
            self._checkpointer.wait()
        self._await_publications()

    # Wrappers of the engine's own methods

    def wrap_load(self, load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the engine's `load_checkpoint`, so that it first waits until all ranks see the same `latest`."""

        @functools.wraps(load_checkpoint)
        def loaded(*given: Any, **options: Any) -> Any:
            self.wait()
            with reads_pointers(self._saved_file), model_file_names(self.engine):
                return load_checkpoint(*given, **options)

        loaded.of_deepspeed = load_checkpoint  # type: ignore[attr-defined]
        return loaded

    def wrap_save(self, save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the engine's `save_checkpoint`, so that all files of one call are stored as one checkpoint."""

        @functools.wraps(save_checkpoint)
        def saved(save_dir: str, tag: Any = None, client_state: Any = None, save_latest: bool = True,
                  **options: Any) -> Any:
            self._raise_failure()
            # absolute, as the job may change its working directory before the commit
            directory = Path(os.path.abspath(save_dir))
            name = f"global_step{self.engine.global_steps}" if tag is None else str(tag)
            self._files = {}
            try:
                done = save_checkpoint(save_dir, name, client_state or {}, save_latest, **options)
                files = self._files
            finally:
                self._files = None
            self._start(directory, name, files, save_latest)
            return done

        saved.of_deepspeed = save_checkpoint  # type: ignore[attr-defined]
        return saved

    def _start(self, directory: Path, tag: str, files: dict[str, dict[str, Any]], save_latest: bool) -> None:
        engine = self.engine
        checkpointer = self._checkpointer_of(directory)
        state: dict[str, object] = {
            section: PerRank({name: content for name, content in files.items() if section_of(name) == section})
            for section in SECTIONS
        }
        state |= {"files": PerRank(sorted(files)), _JOB: {"tag": tag, "version": self._version}}
        save = checkpointer.save(engine.global_steps, state, fence="manual")
        publication = _Publication(directory, tag, engine.global_steps, save_latest)
        self._publications.append(publication)
        publishes = engine.global_rank == 0
        save.committed.add_done_callback(lambda future: _publish(future, publication, publishes=publishes))
        if not _steps_by_itself(engine):
            checkpointer.fence()

    def _checkpointer_of(self, directory: Path) -> Checkpointer:
        """The Checkpointer for a directory. If an earlier step was loaded, the steps above it are set aside."""
        place = directory.resolve()
        if self._checkpointer is None or self._directory != place:
            self.cleanup()
            self._checkpointer, self._directory = Checkpointer(directory, **self._options), place
        if self._loaded is not None and self._loaded[0] == place:
            newest, pointer = self._checkpointer.latest(), self._loaded[1]
            if newest is not None and newest.step > pointer.step:
                if self.engine.global_rank == 0 and has_latest(place):
                    set_latest(place, pointer.tag)  # done before the step that `latest` names is set aside
                self._checkpointer.rewind(pointer.step)
        self._loaded = None
        return self._checkpointer

    def _await_publications(self) -> None:
        for publication in self._publications:
            publication.done.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise the first failure that was not raised before. The next call raises the next failure."""
        for publication in [publication for publication in self._publications if publication.done.is_set()]:
            self._publications.remove(publication)
            if publication.error is not None:
                raise publication.error


def _steps_by_itself(engine: Any) -> bool:
    """Whether `engine.step()` calls `get_commit_info` before it updates the state. A pipeline engine's schedule does
    not call it.
    """
    from deepspeed.runtime.pipe.engine import PipelineEngine

    return not isinstance(engine, PipelineEngine)


def _publish(future: Future[Checkpoint], publication: _Publication, *, publishes: bool) -> None:
    """Called after the commit, on the thread that commits: make the checkpoint visible to DeepSpeed. Only rank 0 writes
    files.
    """
    failure: FlowstoneError | None = None
    try:
        if publishes and not future.failed():  # type: ignore[attr-defined]
            files = [str(name) for own in file_names(future.result()) for name in own]
            publish(publication.directory, publication.tag, publication.step, files, latest=publication.latest)
    except Exception as error:
        failure = _failure(publication, without_frames(error))
    finally:
        publication.end(failure)


def _failure(publication: _Publication, cause: BaseException) -> SaveFailedError:
    failure = SaveFailedError(
        f"step {publication.step} is committed, but could not be published to DeepSpeed under the tag "
        f"{publication.tag!r:.80} in {publication.directory}", cause=str(cause),
        next="correct the cause, and save again",
    )
    failure.__cause__ = cause
    return failure
