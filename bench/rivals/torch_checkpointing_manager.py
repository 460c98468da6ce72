"""torch_checkpointing's CheckpointManager: synchronous, and through its background process.

Direct I/O, its default, writes from Python's unaligned buffers, which ext4 refuses; its own advice is to switch it off.
It syncs nothing; `make_durable` is inside the timer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch_checkpointing import CheckpointManager
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from bench.meter import make_durable
from bench.rivals.base import SavesInDirectories
from bench.state import State


class TorchCheckpointing(SavesInDirectories):
    """Each section of the state is an item, and so a file."""

    def __init__(self, directory: Path, *, background: bool) -> None:
        super().__init__(directory)
        self._background = background

    def prepare(self, state: State, verb: str, /) -> None:
        """The manager, its process, and the shared memory that it stages in."""
        saver = (
            AsyncCheckpointSaverConfig(writer_config=CheckpointWriterConfig(file_write_max_threads=2))
            if self._background and verb == "save"
            else SyncCheckpointSaverConfig()
        )
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager(CheckpointManager.Config(save=saver, storage_config=storage))
        if self._background and verb == "save":
            self._manager.prewarm_staging(state)
            # Both go on in the background, and the first save would wait for them.
            self._manager._prewarm_staging_future.result()
            self._manager._saver._checkpoint_process.wait_for_init()

    def save(self, state: State, number: int, /) -> Callable[[], object]:
        path = self.place(number)
        written = self._manager.save(str(path), state)
        with self._manager.lock():  # what an optimizer step waits for: until then, the state is being copied
            pass

        def wait() -> None:
            if written is not None:
                written.result()
            make_durable(path)

        return wait

    def load(self, state: State, number: int, _how: str, /) -> None:
        self._manager.load(str(self.place(number)), into=state, strict=True)

    def close(self) -> None:
        self._manager.close()


def open_rival(name: str, directory: Path) -> TorchCheckpointing:
    return TorchCheckpointing(directory, background=name == "torch-checkpointing-async")
