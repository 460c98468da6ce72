"""Extents on their way out of a bucket: ranged reads into blocks of the arena, many at once."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from flowstone import _native
from flowstone.config import POLL_S
from flowstone.errors import FlowstoneError
from flowstone.store.base import ReadReceipt
from flowstone.store.jobs import JobReading
from flowstone.store.objects.client import Client
from flowstone.store.objects.failures import storage_error


def give_up(
    engine: _native.Engine, job: _native.WriteJob | _native.ReadJob, direction: Literal["read", "write"],
    files: tuple[int, int],
) -> None:
    """End a job whose requests no thread carries out. Blocks until it has ended."""
    job.cancel()
    while not job.wait(0):
        for number, _, _, _, length, _ in engine.take(direction, files, 1, POLL_S):
            engine.complete(number, length)


class ObjectReading(JobReading):
    """A Reading of one job. Its threads carry out the engine's requests until the job has ended.

    paths   of the objects; the engine numbers them from `first_file` on
    """

    def __init__(
        self, client: Client, engine: _native.Engine, job: _native.ReadJob, paths: Sequence[str], *, first_file: int,
        threads: int,
    ) -> None:
        super().__init__(Path(client.location), job)
        self._client, self._engine, self._paths = client, engine, paths
        self._numbers = first_file, first_file + len(paths)
        self._refusal: FlowstoneError | None = None
        self._threads = [threading.Thread(target=self._run, name="flowstone-download") for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def receipt(self) -> ReadReceipt:
        receipt = super().receipt()
        for thread in self._threads:
            thread.join()  # the job has ended, and each looks for that
        return receipt

    def _error(self) -> FlowstoneError | None:
        return self._refusal or super()._error()

    def _run(self) -> None:
        while not self._job.wait(0):
            for number, file, offset, address, length, _ in self._engine.take("read", self._numbers, 1, POLL_S):
                self._read(number, self._paths[file - self._numbers[0]], offset, address, length)
            if not threading.main_thread().is_alive():
                self._job.cancel()  # what is read ahead waits for a load that will not come

    def _read(self, number: int, path: str, offset: int, address: int, length: int) -> None:
        moved, code = 0, 0
        try:
            moved = self._client.read_into(path, offset, length, address)
        except FlowstoneError as error:
            self._refusal, code = self._refusal or error, errno.EIO
        except BaseException as error:
            self._refusal, code = self._refusal or storage_error(self._client.location, "read", path, error), errno.EIO
        self._engine.complete(number, moved, code)
