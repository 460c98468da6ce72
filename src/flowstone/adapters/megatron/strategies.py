"""FlowstoneSaveStrategy and FlowstoneLoadStrategy: by what Megatron-core saves and loads sharded state dicts."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from flowstone.adapters.dcp import FlowstoneReader, FlowstoneStager, FlowstoneWriter
from flowstone.adapters.megatron.package import MEGATRON, strategies_base
from flowstone.adapters.megatron.translate import (
    Parts,
    ShardedObject,
    ShardedTensor,
    leaves_of,
    loaded,
    to_load,
    to_save,
)
from flowstone.adapters.step_names import step_at_end
from flowstone.config import EngineOptions
from flowstone.errors import FlowstoneError, UnsupportedStateError

_BASE: Any = strategies_base()
_PLANNER: Any = MEGATRON.load("megatron.core.dist_checkpointing.strategies.torch").MCoreLoadPlanner
_REQUEST: Any = MEGATRON.load("megatron.core.dist_checkpointing.strategies.async_utils").AsyncRequest
_COMMON = "common.pt"  # which Megatron writes beside ours, before it
_POLL_S = 0.02
BACKEND, VERSION = "flowstone", 1  # in Megatron's metadata.json
PLACE = "sharded"  # the Flowstone checkpoint, in the directory that Megatron is given


def register() -> None:
    """Let Megatron find these strategies by the name "flowstone", and load by it what was saved by it."""
    _BASE.register_default_strategy(_BASE.StrategyAction.SAVE_SHARDED, BACKEND, VERSION, FlowstoneSaveStrategy())
    _BASE.register_default_strategy(_BASE.StrategyAction.LOAD_SHARDED, BACKEND, VERSION, FlowstoneLoadStrategy())


class FlowstoneSaveStrategy(_BASE.AsyncSaveShardedStrategy):  # type: ignore[misc]
    """Saves sharded tensors and objects as a Flowstone checkpoint, `sharded` in the directory that Megatron is given.

    It is durable before Megatron writes `metadata.json`, without which Megatron takes a directory for no checkpoint;
    so is `common.pt`, which Megatron writes. `fs.open(directory / "sharded")` reads it. Keep one strategy for all
    saves: it keeps its memory and its plan, until `close`. Megatron calls it on every rank.

    engine  how bytes move
    """

    can_handle_sharded_objects = True

    def __init__(self, *, engine: EngineOptions | None = None) -> None:
        super().__init__(BACKEND, VERSION)
        self._writer, self._stager = _Writer(engine=engine), FlowstoneStager()
        self._thread: ThreadPoolExecutor | None = None
        self._group: Any = None  # of that thread's own
        self._last: Future[None] | None = None

    def save(self, sharded_state_dict: Mapping[str, Any], checkpoint_dir: str | os.PathLike[str]) -> None:
        """Durable when it returns.

        raises  what a rank has failed of, on all ranks: FlowstoneError, as UnsupportedStateError for a value that
                cannot be stored, by name
        """
        self._await_last()
        self._write(_Given.by(lambda: to_save(sharded_state_dict)), Path(checkpoint_dir), None)

    def async_save(self, sharded_state_dict: Mapping[str, Any], checkpoint_dir: str | os.PathLike[str]) -> Any:
        """Copy the state into memory that is kept from save to save; a thread of this process writes the copy.

        returns  Megatron's AsyncRequest. Its function, which Megatron runs in a process of its own, waits for that
                 thread; its last step raises what the save has failed of, as `save` does
        """
        self._await_last()
        if self._thread is None:
            self._group = dist.new_group(backend="gloo")
            self._thread = ThreadPoolExecutor(1, "flowstone-megatron")
        given = _Given.by(lambda: self._staged(to_save(sharded_state_dict)))
        under_way = _file_while_under_way()
        self._last = self._thread.submit(self._write_and_tell, given, Path(checkpoint_dir), under_way)
        return _REQUEST(_await_absence, (under_way, os.getpid()), [self._last.result])

    def close(self) -> None:
        """Give memory and threads back. The next save takes them anew."""
        self._await_last()
        self._writer.close()
        self._stager.close()
        self._stager = FlowstoneStager()
        if self._thread is not None:
            self._thread.shutdown()
            dist.destroy_process_group(self._group)
            self._thread = self._group = None

    def _await_last(self) -> None:
        """Until the save before has ended. What it has failed of is raised by its own request."""
        if self._last is not None:
            self._last.exception()

    def _staged(self, state: Mapping[str, object]) -> dict[str, object]:
        """A copy of what is to be saved."""
        copied = self._stager.stage({
            key: [one.data for one in value.of] if isinstance(value, Parts) else value for key, value in state.items()
        })
        assert isinstance(copied, dict), "it does not stage in the background"
        return {
            key: Parts([replace(one, data=data) for one, data in zip(value.of, copied[key], strict=True)])
            if isinstance(value, Parts) else copied[key]
            for key, value in state.items()
        }

    def _write_and_tell(self, given: _Given, directory: Path, under_way: str) -> None:
        try:
            self._write(given, directory, self._group)
        finally:
            with suppress(OSError):  # it is gone, and what waits for that has seen it
                os.unlink(under_way)

    def _write(self, given: _Given, directory: Path, group: Any) -> None:
        if given.error is None and dist.get_rank() == 0:
            given = _Given.by(lambda: _behind_what_megatron_wrote(directory, given.state))
        with _error_of_a_rank():
            save(
                given.state, checkpoint_id=directory / PLACE, storage_writer=self._writer, process_group=group,
                planner=_Planner(given.error),
            )


class FlowstoneLoadStrategy(_BASE.LoadShardedStrategy):  # type: ignore[misc]
    """Loads what FlowstoneSaveStrategy has saved, on any number of ranks and any parallelism; each byte is verified.

    engine  how bytes move
    """

    can_handle_sharded_objects = True

    def __init__(self, *, engine: EngineOptions | None = None) -> None:
        super().__init__()
        self._engine = engine

    def load(self, sharded_state_dict: Mapping[str, Any], checkpoint_dir: str | os.PathLike[str]) -> Any:
        """The state with its tensors and values. Tensors that it has are filled in place.

        raises  on all ranks, what a rank has failed of:
                FlowstoneError: NoCheckpointError, DamagedError, which names what has changed
                Megatron's CheckpointingException, KeyError: a tensor of another shape, or that is not stored
        """
        wanted = _Given.by(lambda: to_load(sharded_state_dict))
        leaves = [] if wanted.error else leaves_of(sharded_state_dict)
        tensors = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
        planner = _LoadPlanner(wanted.error, tensors)
        with _error_of_a_rank():
            load(wanted.state, storage_reader=self._reader(checkpoint_dir), planner=planner)
        return loaded(sharded_state_dict, wanted.state)

    def load_tensors_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
        """A ShardedTensor without data for each stored tensor: its global shape and dtype."""
        stored = self._reader(checkpoint_dir).read_metadata().state_dict_metadata
        return {
            key: ShardedTensor.from_rank_offsets(
                key, torch.empty(one.size, dtype=one.properties.dtype, device="meta")
            ).without_data()
            for key, one in stored.items() if isinstance(one, TensorStorageMetadata)
        }

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
        """The same, and a ShardedObject without data for each stored object."""
        stored = self._reader(checkpoint_dir).read_metadata().state_dict_metadata
        objects = [key for key, one in stored.items() if not isinstance(one, TensorStorageMetadata)]
        return {
            **{key: ShardedObject.empty_from_unique_key(key) for key in objects},
            **self.load_tensors_metadata(checkpoint_dir),
        }

    def remove_sharded_tensors(self, checkpoint_dir: str, key_prefix: str) -> None:
        """Raises UnsupportedStateError: a checkpoint does not change once it is committed."""
        raise UnsupportedStateError(
            f"tensors called {key_prefix!r}... cannot be taken out of a committed checkpoint",
            next="load what you want to keep, and save it to another directory",
        )

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != BACKEND:
            raise UnsupportedStateError(
                f"the checkpoint was saved by {loaded_backend!r}, not by {BACKEND!r}",
                next="leave sharded_strategy out: Megatron chooses by what is there",
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != VERSION:
            raise UnsupportedStateError(
                f"the checkpoint is of version {loaded_version} of this strategy, which knows {VERSION}",
                next="install the Flowstone that has saved it, or a newer one",
            )

    def _reader(self, directory: str | os.PathLike[str]) -> FlowstoneReader:
        return FlowstoneReader(Path(directory) / PLACE, engine=self._engine)


@dataclass(frozen=True, slots=True)
class _Given:
    """What this rank saves or loads, or why there is nothing: the other ranks are to learn that, not to wait for it."""

    state: dict[str, object]
    error: Exception | None = None

    @classmethod
    def by(cls, made: Callable[[], dict[str, object]]) -> _Given:
        try:
            return cls(made())
        except Exception as error:
            return cls({}, error)


class _Planner(DefaultSavePlanner):
    """Takes keys as they are. `error`: what to fail of where all ranks learn of it."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(flatten_state_dict=False)
        self._error = error

    def create_local_plan(self) -> SavePlan:
        if self._error is not None:
            raise self._error
        return super().create_local_plan()


class _LoadPlanner(_PLANNER):  # type: ignore[misc]
    """Megatron's, for these tensors. `error`: as above."""

    def __init__(self, error: Exception | None, tensors: Sequence[Any]) -> None:
        super().__init__(
            shapes_validation_sharded_tensors=[one for one in tensors if not one.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={one.key: one for one in tensors if one.allow_shape_mismatch},
        )
        self._error = error

    def create_local_plan(self) -> LoadPlan:
        if self._error is not None:
            raise self._error
        plan: LoadPlan = super().create_local_plan()
        return plan


class _Writer(FlowstoneWriter):
    """A writer that takes the step from Megatron's directory, `iter_0000100`."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        assert self.path is not None, "each save gives it one"
        step = step_at_end(Path(self.path).parent.name)
        self._options = msgspec.structs.replace(self._options, step=step)
        return super().prepare_local_plan(plan)


@contextmanager
def _error_of_a_rank() -> Iterator[None]:
    """Raise what a rank has failed of, Flowstone's errors first, in the place of DCP's CheckpointException.

    That is no Exception, so that nothing of Megatron's would see it.
    """
    try:
        yield
    except CheckpointException as error:
        failures = sorted(
            (failure for failure, _ in error.failures.values()),
            key=lambda failure: not isinstance(failure, FlowstoneError),
        )
        if not failures:
            raise
        raise failures[0] from error


def _sync(path: Path) -> None:
    """Make a file or a directory durable that others have written."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _behind_what_megatron_wrote(directory: Path, state: dict[str, object]) -> dict[str, object]:
    """The state, once the common part that Megatron has written before it is durable."""
    for written in (directory / _COMMON, directory):
        with suppress(FileNotFoundError):  # another strategy may write the common part later
            _sync(written)
    return state


def _file_while_under_way() -> str:
    """A file that is there until a save has ended; "" where none can be made, and nothing waits then for its end."""
    try:
        fd, path = tempfile.mkstemp(prefix="flowstone-save-")
    except OSError:
        return ""
    os.close(fd)
    return path


def _await_absence(path: str, trainer: int) -> None:
    """Wait until the file is gone, or the process that removes it is. Runs in a process of Megatron's."""
    while os.path.exists(path) and os.path.exists(f"/proc/{trainer}"):
        time.sleep(_POLL_S)
