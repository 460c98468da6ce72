"""Read ranges of files from a bucket, by concurrent range requests into blocks of the arena (staging memory)."""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from flowstone._native import Engine, File, ReadJob, WriteJob
from flowstone.config import POLL_S
from flowstone.errors import FlowstoneError, StorageError
from flowstone.store.base import ReadReceipt
from flowstone.store.jobs import JobReadHandle
from flowstone.store.objects.client import Client
from flowstone.store.objects.failures import storage_error
from flowstone.store.os_errors import MORE_THREADS


def cancel_unserved(
    engine: Engine, job: WriteJob | ReadJob, direction: Literal["read", "write"],
    files: tuple[int, int],
) -> None:
    """Cancel a job, because no thread could be started for its requests. Returns once the job has ended."""
    job.cancel()
    while True:
        wakes = engine.wakes
        if job.wait(0):
            return
        for number, _, _, _, length, _ in engine.take(direction, files, 1, POLL_S, wakes):
            engine.complete(number, length)


class Downloads:
    """Threads that carry out the requests of a read job for objects, until the job has ended.

    paths    the objects' paths; the engine numbers them from `first_file` on
    refusal  the first error
    """

    def __init__(
        self, client: Client, engine: Engine, job: ReadJob, paths: Sequence[str], *, first_file: int,
        threads: int,
    ) -> None:
        self._client, self._engine, self._job, self._paths = client, engine, job, paths
        self._numbers = first_file, first_file + len(paths)
        self.refusal: FlowstoneError | None = None
        self._threads = [threading.Thread(target=self._run, name="flowstone-download") for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until the threads have ended. They end after the job."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            wakes = self._engine.wakes
            if self._job.wait(0):
                return
            for number, file, offset, address, length, _ in self._engine.take("read", self._numbers, 1, POLL_S, wakes):
                self._read(number, self._paths[file - self._numbers[0]], offset, address, length)
            if not threading.main_thread().is_alive():
                self._job.cancel()  # a job that reads ahead would wait for a load that never begins

    def _read(self, number: int, path: str, offset: int, address: int, length: int) -> None:
        """Carry out one request of the engine. If `address` is 0, the engine copies the bytes from obstore's memory
        before `complete` returns.
        """
        moved, code, lent = 0, 0, 0
        try:
            data = self._client.read_range(path, offset, length)
            moved, lent = data.nbytes, data.ctypes.data
            if address:
                ctypes.memmove(address, lent, moved)  # Python's global interpreter lock is released during this copy
        except FlowstoneError as error:
            self.refusal, code = self.refusal or error, errno.EIO
        except BaseException as error:
            self.refusal, code = self.refusal or storage_error(self._client.location, "read", path, error), errno.EIO
        self._engine.complete(number, moved, code, lent)


class ObjectReadHandle(JobReadHandle):
    """A ReadHandle of one job, with the threads that carry out its requests."""

    def __init__(
        self, client: Client, engine: Engine, job: ReadJob, paths: Sequence[str], *, first_file: int,
        threads: int,
    ) -> None:
        super().__init__(Path(client.location), job)
        self._downloads = Downloads(client, engine, job, paths, first_file=first_file, threads=threads)

    def receipt(self) -> ReadReceipt:
        receipt = super().receipt()
        self._downloads.join()
        return receipt

    def _error(self) -> FlowstoneError | None:
        return self._downloads.refusal or super()._error()


class ObjectOpenExtents:
    """Objects that a job of another store reads (see StripeMember)."""

    def __init__(
        self, client: Client, engine: Engine, paths: Sequence[str], *, first_file: int, threads: int,
        of_path: int,
    ) -> None:
        self._client, self._paths, self.engine = client, paths, engine
        self._first_file, self._count = first_file, threads
        self._downloads: Downloads | None = None
        self.natives = [
            File(fd=first_file + index, path=f"{client.location}/{path}", alignment=1, of_path=of_path)
            for index, path in enumerate(paths)
        ]

    def begin(self, job: ReadJob) -> None:
        try:
            self._downloads = Downloads(
                self._client, self.engine, job, self._paths, first_file=self._first_file, threads=self._count
            )
        except RuntimeError as error:
            cancel_unserved(self.engine, job, "read", (self._first_file, self._first_file + len(self._paths)))
            raise StorageError(
                f"cannot start the threads that read from {self._client.location}", errno=errno.EAGAIN,
                reason=str(error), next=MORE_THREADS,
            ) from error

    def error(self) -> FlowstoneError | None:
        return None if self._downloads is None else self._downloads.refusal

    def close(self) -> None:
        if self._downloads is not None:
            self._downloads.join()
