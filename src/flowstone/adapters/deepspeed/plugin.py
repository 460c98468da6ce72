"""The CheckpointEngine that DeepSpeed calls: files of all ranks become one checkpoint, committed in the background."""

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

from flowstone.adapters.deepspeed.other_ranks import for_this_rank, model_file_names, of_rank
from flowstone.adapters.deepspeed.pointers import Pointer, has_latest, publish, read_pointer, set_latest
from flowstone.adapters.deepspeed.stored_files import SECTIONS, file_names, read_file, section_of
from flowstone.adapters.deepspeed.values import encoded
from flowstone.adapters.deepspeed.whole_weights import reads_pointers
from flowstone.checkpoint import Checkpoint, open_checkpoint
from flowstone.checkpointer import Checkpointer
from flowstone.errors import DamagedError, FlowstoneError, SaveFailedError
from flowstone.runtime.ending import Ending, without_frames
from flowstone.state import PerRank

_JOB = "deepspeed"


@dataclass(eq=False)
class _Publication:
    """What follows a commit. `done` is set once it has, or has failed with `error`."""

    directory: Path
    tag: str
    step: int
    latest: bool
    done: threading.Event = field(default_factory=threading.Event)
    error: FlowstoneError | None = None


class FlowstoneCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """In the place of DeepSpeed's own: see `attach`.

    engine   the DeepSpeedEngine
    version  of DeepSpeed
    options  of the Checkpointer of each directory that is saved into
    former   the CheckpointEngine that reads and writes what is no checkpoint of ours

    `save_checkpoint` returns once the save has been planned, and small tensors are copied. Parameters and optimizer
    state are captured while training goes on; the engine's next step waits for that, and not for the disk.
    """

    def __init__(self, engine: Any, version: str, options: dict[str, Any], former: Any) -> None:
        super().__init__()
        self.name = "FlowstoneCheckpointEngine"
        self._engine, self._version, self._options = weakref.ref(engine), version, options
        self._former = former
        self._files: dict[str, dict[str, Any]] | None = None  # of the save that DeepSpeed is in
        self._checkpointer: Checkpointer | None = None
        self._directory: Path | None = None
        self._loaded: tuple[Path, Pointer] | None = None
        self._publications: list[_Publication] = []
        self._pid = os.getpid()
        self._end = Ending(self.cleanup)  # `latest` names the last checkpoint, even where the job has not waited for it
        self._end.before_threads_end()

    @property
    def engine(self) -> Any:
        """The engine, which holds this."""
        engine = self._engine()
        assert engine is not None, "an engine is there while it calls its plug-in"
        return engine

    # What DeepSpeed calls

    def create(self, info: Any) -> None:
        if self._files is None:
            self._former.create(info)

    def save(self, state_dict: Any, path: str) -> None:
        if self._files is None:  # save_16bit_model: a file for other programs
            self._former.save(state_dict, path)
            return
        self._files[Path(path).name] = encoded(state_dict)

    def load(self, path: str, map_location: Any = None) -> Any:
        """What a file holds for this rank: of a checkpoint of ours, verified; of DeepSpeed's own, as it reads it."""
        place = Path(path)
        known = place if place.exists() else of_rank(place, 0)  # fewer ranks may have saved
        if not known.exists() or read_pointer(known) is None:
            return self._former.load(path, map_location)
        return for_this_rank(self.engine, self._checkpoint_of(known), place.name)

    def _saved_file(self, path: str) -> Any:
        """What the rank that has saved a file of ours put there."""
        place = Path(path)
        return read_file(self._checkpoint_of(place), place.name)

    def _checkpoint_of(self, place: Path) -> Checkpoint:
        """The checkpoint that a file stands for. Raises DamagedError."""
        pointer = read_pointer(place)
        assert pointer is not None, "a file of ours"
        store = place.parent.parent
        checkpoint = open_checkpoint(store, pointer.step)
        job = checkpoint.objects.get(_JOB)
        if not isinstance(job, dict) or job.get("tag") != pointer.tag:
            raise DamagedError(
                f"step {pointer.step} of {store} is not what {place} was saved as", expected=f"tag {pointer.tag!r:.80}",
                next="load another tag",
            )
        self._loaded = store.resolve(), pointer
        return checkpoint

    def commit(self, info: Any) -> bool:
        return bool(self._former.commit(info))  # of save_16bit_model

    def get_commit_info(self) -> None:
        """DeepSpeed asks before an optimizer's step: the state may change once all of it is captured."""
        if self._checkpointer is not None:
            self._checkpointer.fence()

    def is_decoupled(self) -> bool:
        return True

    def preserves_storage_sharing(self) -> bool:
        return False

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return bool(self._former.is_data_parallel_writer(dp_rank))

    def cleanup(self) -> None:
        """Wait for saves in flight, and give the memory back; nothing in a forked process.

        raises  what `wait` raises
        """
        if os.getpid() != self._pid:
            return
        if self._checkpointer is not None:
            checkpointer, self._checkpointer, self._directory = self._checkpointer, None, None
            checkpointer.close()
        self._settle()

    # What a job may call

    def wait(self) -> None:
        """Wait until every save so far is durable, and `latest` names it. All ranks call this; a failure reaches all.

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
            raise SaveFailedError("another rank could not finish a save", next="see its error; save again")

    def finish(self) -> None:
        """Wait until every save so far is durable on all ranks. Raises the failures of this rank alone."""
        if self._checkpointer is not None:
            self._checkpointer.wait()
        self._settle()

    # What stands around the engine's own verbs

    def before(self, load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """The engine's `load_checkpoint`, once `latest` is the same for all ranks."""

        @functools.wraps(load_checkpoint)
        def loaded(*given: Any, **options: Any) -> Any:
            self.wait()
            with reads_pointers(self._saved_file), model_file_names(self.engine):
                return load_checkpoint(*given, **options)

        loaded.of_deepspeed = load_checkpoint  # type: ignore[attr-defined]
        return loaded

    def around(self, save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """The engine's `save_checkpoint`, after which what it has handed over is saved as one checkpoint."""

        @functools.wraps(save_checkpoint)
        def saved(save_dir: str, tag: Any = None, client_state: Any = None, save_latest: bool = True,
                  **options: Any) -> Any:
            self._raise_failure()
            directory = Path(os.path.abspath(save_dir))  # the job may change its directory before the commit
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
        checkpointer = self._opened(directory)
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

    def _opened(self, directory: Path) -> Checkpointer:
        """The Checkpointer of a directory; steps above the one that was loaded are set aside."""
        place = directory.resolve()
        if self._checkpointer is None or self._directory != place:
            self.cleanup()
            self._checkpointer, self._directory = Checkpointer(directory, **self._options), place
        if self._loaded is not None and self._loaded[0] == place:
            newest, pointer = self._checkpointer.latest(), self._loaded[1]
            if newest is not None and newest.step > pointer.step:
                if self.engine.global_rank == 0 and has_latest(place):
                    set_latest(place, pointer.tag)  # before the step that it names is set aside
                self._checkpointer.rewind(pointer.step)
        self._loaded = None
        return self._checkpointer

    def _settle(self) -> None:
        for publication in self._publications:
            publication.done.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise the first failure that was not raised yet; the next call raises the next one."""
        for one in [one for one in self._publications if one.done.is_set()]:
            self._publications.remove(one)
            if one.error is not None:
                raise one.error


def _steps_by_itself(engine: Any) -> bool:
    """Whether `engine.step()` is what updates, and asks `get_commit_info` before: a pipeline's schedule does not."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    return not isinstance(engine, PipelineEngine)


def _publish(future: Future[Checkpoint], publication: _Publication, *, publishes: bool) -> None:
    """After the commit, on the thread that made it: show the checkpoint to DeepSpeed. On rank 0 alone."""
    try:
        if publishes and not future.failed():  # type: ignore[attr-defined]
            files = [str(name) for own in file_names(future.result()) for name in own]
            publish(publication.directory, publication.tag, publication.step, files, latest=publication.latest)
    except Exception as error:
        publication.error = _failure(publication, without_frames(error))
    finally:
        publication.done.set()


def _failure(publication: _Publication, cause: BaseException) -> SaveFailedError:
    failure = SaveFailedError(
        f"step {publication.step} is committed, and DeepSpeed does not find it under the tag {publication.tag!r:.80} "
        f"in {publication.directory}", cause=str(cause), next="correct the cause, and save again",
    )
    failure.__cause__ = cause
    return failure
