"""FlowstoneSaveStrategy and FlowstoneLoadStrategy: save and load Megatron-core's sharded state dicts."""

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
    ShardedObject,
    ShardedTensor,
    TensorParts,
    leaves_of,
    to_load,
    to_save,
    with_loaded_values,
)
from flowstone.adapters.step_names import step_at_end
from flowstone.config import EngineOptions
from flowstone.errors import FlowstoneError, UnsupportedStateError

_BASE: Any = strategies_base()
_PLANNER: Any = MEGATRON.load("megatron.core.dist_checkpointing.strategies.torch").MCoreLoadPlanner
_REQUEST: Any = MEGATRON.load("megatron.core.dist_checkpointing.strategies.async_utils").AsyncRequest
_COMMON = "common.pt"  # a file that Megatron writes before the sharded part
_POLL_S = 0.02
BACKEND, VERSION = "flowstone", 1  # as written in Megatron's metadata.json
SHARDED_NAME = "sharded"  # the name of the Flowstone checkpoint's directory, inside of Megatron's directory


def register() -> None:
    """Register these strategies with Megatron as "flowstone", so that Megatron loads their checkpoints by itself."""
    _BASE.register_default_strategy(_BASE.StrategyAction.SAVE_SHARDED, BACKEND, VERSION, FlowstoneSaveStrategy())
    _BASE.register_default_strategy(_BASE.StrategyAction.LOAD_SHARDED, BACKEND, VERSION, FlowstoneLoadStrategy())


class FlowstoneSaveStrategy(_BASE.AsyncSaveShardedStrategy):  # type: ignore[misc]
    """Saves sharded tensors and objects as a Flowstone checkpoint, `sharded` in Megatron's directory.

    This checkpoint and Megatron's `common.pt` are durable before Megatron writes `metadata.json`, and Megatron ignores
    a directory without that file. `fs.open(directory / "sharded")` reads the checkpoint. Use one strategy for all
    saves, as it reuses its memory and plan until `close`. Megatron calls it on every rank.

    engine  options of the I/O engine
    """

    can_handle_sharded_objects = True

    def __init__(self, *, engine: EngineOptions | None = None) -> None:
        super().__init__(BACKEND, VERSION)
        self._writer, self._stager = _MegatronWriter(engine=engine), FlowstoneStager()
        self._thread: ThreadPoolExecutor | None = None
        self._group: Any = None  # the process group of that thread
        self._last: Future[None] | None = None

    def save(self, sharded_state_dict: Mapping[str, Any], checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save the state. The checkpoint is durable on return.

        raises  FlowstoneError  if a rank fails, its error is raised on all ranks; for example an UnsupportedStateError,
                                which names a value that cannot be stored
        """
        self._await_last()
        self._write(_RankInput.prepare(lambda: to_save(sharded_state_dict)), Path(checkpoint_dir), None)

    def async_save(self, sharded_state_dict: Mapping[str, Any], checkpoint_dir: str | os.PathLike[str]) -> Any:
        """Copy the state into reused memory; a thread of this process writes the copy.

        returns  Megatron's AsyncRequest. Megatron runs the request's function in another process, where the function
                 waits for that thread. The request's final step raises the errors of `save`
        """
        self._await_last()
        if self._thread is None:
            self._group = dist.new_group(backend="gloo")
            self._thread = ThreadPoolExecutor(1, "flowstone-megatron")
        given = _RankInput.prepare(lambda: self._staged(to_save(sharded_state_dict)))
        under_way = _create_progress_file()
        self._last = self._thread.submit(self._write_and_unlink, given, Path(checkpoint_dir), under_way)
        return _REQUEST(_await_removal, (under_way, os.getpid()), [self._last.result])

    def close(self) -> None:
        """Release the memory and the threads. The next save allocates them again."""
        self._await_last()
        self._writer.close()
        self._stager.close()
        self._stager = FlowstoneStager()
        if self._thread is not None:
            self._thread.shutdown()
            dist.destroy_process_group(self._group)
            self._thread = self._group = None

    def _await_last(self) -> None:
        """Wait for the previous save. Its error is raised by that save's own request."""
        if self._last is not None:
            self._last.exception()

    def _staged(self, state: Mapping[str, object]) -> dict[str, object]:
        """A copy of the state to save."""
        copied = self._stager.stage({
            key: [part.data for part in value.shards] if isinstance(value, TensorParts) else value
            for key, value in state.items()
        })
        assert isinstance(copied, dict), "it does not stage in the background"
        return {
            key: TensorParts([replace(shard, data=data) for shard, data in zip(value.shards, copied[key], strict=True)])
            if isinstance(value, TensorParts) else copied[key]
            for key, value in state.items()
        }

    def _write_and_unlink(self, given: _RankInput, directory: Path, under_way: str) -> None:
        try:
            self._write(given, directory, self._group)
        finally:
            with suppress(OSError):  # the file was removed already, and the process that waits has seen that
                os.unlink(under_way)

    def _write(self, given: _RankInput, directory: Path, group: Any) -> None:
        if given.error is None and dist.get_rank() == 0:
            given = _RankInput.prepare(lambda: _after_common_part(directory, given.state))
        with _error_of_a_rank():
            save(
                given.state, checkpoint_id=directory / SHARDED_NAME, storage_writer=self._writer, process_group=group,
                planner=_Planner(given.error),
            )


class FlowstoneLoadStrategy(_BASE.LoadShardedStrategy):  # type: ignore[misc]
    """Loads and verifies checkpoints of FlowstoneSaveStrategy, on any number of ranks and with any parallelism.

    engine  options of the I/O engine
    """

    can_handle_sharded_objects = True

    def __init__(self, *, engine: EngineOptions | None = None) -> None:
        super().__init__()
        self._engine = engine

    def load(self, sharded_state_dict: Mapping[str, Any], checkpoint_dir: str | os.PathLike[str]) -> Any:
        """Load the state's tensors and values. Existing tensors are filled in place.

        If a rank fails, its error is raised on all ranks.

        raises  NoCheckpointError, DamagedError  a DamagedError names the changed tensors
                CheckpointingException (of Megatron), KeyError  a tensor has another shape, or is not stored
        """
        requested = _RankInput.prepare(lambda: to_load(sharded_state_dict))
        leaves = [] if requested.error else leaves_of(sharded_state_dict)
        tensors = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
        planner = _LoadPlanner(requested.error, tensors)
        with _error_of_a_rank():
            load(requested.state, storage_reader=self._reader(checkpoint_dir), planner=planner)
        return with_loaded_values(sharded_state_dict, requested.state)

    def load_tensors_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
        """A ShardedTensor without data for each stored tensor, with its global shape and dtype."""
        stored = self._reader(checkpoint_dir).read_metadata().state_dict_metadata
        return {
            key: ShardedTensor.from_rank_offsets(
                key, torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            ).without_data()
            for key, entry in stored.items() if isinstance(entry, TensorStorageMetadata)
        }

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
        """Like `load_tensors_metadata`, with a ShardedObject without data for each stored object."""
        stored = self._reader(checkpoint_dir).read_metadata().state_dict_metadata
        objects = [key for key, entry in stored.items() if not isinstance(entry, TensorStorageMetadata)]
        return {
            **{key: ShardedObject.empty_from_unique_key(key) for key in objects},
            **self.load_tensors_metadata(checkpoint_dir),
        }

    def remove_sharded_tensors(self, checkpoint_dir: str, key_prefix: str) -> None:
        """Raises UnsupportedStateError, since a committed checkpoint cannot be changed."""
        raise UnsupportedStateError(
            f"cannot remove tensors with the prefix {key_prefix!r} from a committed checkpoint",
            next="load the tensors to keep, and save them to another directory",
        )

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != BACKEND:
            raise UnsupportedStateError(
                f"the checkpoint was saved by {loaded_backend!r}, not by {BACKEND!r}",
                next="leave sharded_strategy out: Megatron then chooses the right one",
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != VERSION:
            raise UnsupportedStateError(
                f"the checkpoint has version {loaded_version} of this strategy; this Flowstone knows {VERSION}",
                next="install the version of Flowstone that saved it, or a newer one",
            )

    def _reader(self, directory: str | os.PathLike[str]) -> FlowstoneReader:
        return FlowstoneReader(Path(directory) / SHARDED_NAME, engine=self._engine)


@dataclass(frozen=True, slots=True)
class _RankInput:
    """This rank's state to save or load. If preparing it has failed: the error, which all ranks then raise."""

    state: dict[str, object]
    error: Exception | None = None

    @classmethod
    def prepare(cls, made: Callable[[], dict[str, object]]) -> _RankInput:
        try:
            return cls(made())
        except Exception as error:
            return cls({}, error)


class _Planner(DefaultSavePlanner):
    """A planner that does not flatten keys. Its local plan raises `error`, if there is one, so that all ranks get it.
    """

    def __init__(self, error: Exception | None) -> None:
        super().__init__(flatten_state_dict=False)
        self._error = error

    def create_local_plan(self) -> SavePlan:
        if self._error is not None:
            raise self._error
        return super().create_local_plan()


class _LoadPlanner(_PLANNER):  # type: ignore[misc]
    """Megatron's planner for tensors. `error`: as in `_Planner`."""

    def __init__(self, error: Exception | None, tensors: Sequence[Any]) -> None:
        super().__init__(
            shapes_validation_sharded_tensors=[tensor for tensor in tensors if not tensor.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={t.key: t for t in tensors if t.allow_shape_mismatch},
        )
        self._error = error

    def create_local_plan(self) -> LoadPlan:
        if self._error is not None:
            raise self._error
        plan: LoadPlan = super().create_local_plan()
        return plan


class _MegatronWriter(FlowstoneWriter):
    """A writer that takes the step from the name of Megatron's directory, such as `iter_0000100`."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        assert self.path is not None, "each save gives it one"
        step = step_at_end(Path(self.path).parent.name)
        self._options = msgspec.structs.replace(self._options, step=step)
        return super().prepare_local_plan(plan)


@contextmanager
def _error_of_a_rank() -> Iterator[None]:
    """Context that raises a rank's error, preferably a FlowstoneError, instead of DCP's CheckpointException. The latter
    is a BaseException, which Megatron does not handle.
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
    """Make a file or directory durable that Megatron has written."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _after_common_part(directory: Path, state: dict[str, object]) -> dict[str, object]:
    """Make the common part durable; Megatron has already written it. Returns the state."""
    for written in (directory / _COMMON, directory):
        with suppress(FileNotFoundError):  # another strategy may write the common part later
            _sync(written)
    return state


def _create_progress_file() -> str:
    """Create a file whose removal marks the end of a save. Returns its path; "" if that fails, and then no process
    waits for the save.
    """
    try:
        fd, path = tempfile.mkstemp(prefix="flowstone-save-")
    except OSError:
        return ""
    os.close(fd)
    return path


def _await_removal(path: str, trainer: int) -> None:
    """Wait until the file is removed, or the training's process has ended. Runs in another process of Megatron."""
    while os.path.exists(path) and os.path.exists(f"/proc/{trainer}"):
        time.sleep(_POLL_S)
