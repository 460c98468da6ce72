"""Write segments (data files) to a bucket: each is a multipart upload, sent from blocks of the arena (staging memory).

A part of an upload is sent from the blocks into which the engine has captured it. The engine gets a block back once
nothing reads it any more. obstore needs a file's bytes in order, but some ranges of a file (windows) are captured
before ranges that precede them. Windows wait in a temporary file if they are captured out of order. All windows of a
segment wait there if an encoder decides the segment's size, because its header is then known last.

In a striped store, a segment that the bucket refuses may be written to another path. So the bytes of each segment are
kept until its object is complete: in blocks as long as the arena has free ones, otherwise in the temporary file.
"""

from __future__ import annotations

import ctypes
import errno
import threading
import traceback
import weakref
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from flowstone._native import Engine, File, WriteJob
from flowstone.config import MIB, POLL_S, Watch
from flowstone.errors import FlowstoneError, LockedError, StorageError
from flowstone.store.base import FilePlan, Receipt
from flowstone.store.jobs import WriteWaits, write_error
from flowstone.store.objects.client import Client, same_tag
from flowstone.store.objects.downloads import cancel_unserved
from flowstone.store.objects.failures import storage_error
from flowstone.store.objects.retry_buffer import HeldBlocks, RetryBuffer, Spool
from flowstone.store.os_errors import MORE_THREADS
from flowstone.store.settings import Settings

PART_BYTES_MIN = 8 * MIB  # S3 refuses parts under 5 MiB, except for the last part of an upload
PARTS_MAX = 9_000  # S3's limit is 10,000
_CONCURRENT_MAX = 16  # how many requests one upload makes at once
_TAKEN_AT_ONCE = 8


def part_bytes(file_bytes: int) -> int:
    """The length of the parts of a segment's upload in bytes: a whole number of MiB, so large that PARTS_MAX parts
    suffice.
    """
    return max(PART_BYTES_MIN, -(-file_bytes // PARTS_MAX // MIB) * MIB)


class UploadStoppedError(Exception):
    """The save has ended early, so the upload ends."""


def in_order(windows: Sequence[tuple[int, int, int]], file: int) -> tuple[list[tuple[int, int]], set[int]]:
    """Returns the ranges of one file in order, and the offsets of the ranges that are captured before a range that
    precedes them in the file.

    windows  the ranges of all files, as (file, begin, end), in the order of capture

    Blocks of the arena are assigned in the order of capture. Such an early range waits in the temporary file, because
    in memory it would keep its block until all preceding ranges of the file have got blocks and have been sent.
    """
    placed = sorted((begin, end, turn) for turn, (number, begin, end) in enumerate(windows) if number == file)
    early, last = set(), -1
    for begin, _, turn in placed:
        if turn < last:
            early.add(begin)
        last = max(last, turn)
    return [(begin, end) for begin, end, _ in placed], early


class Upload:
    """The upload of one segment. Its thread takes the engine's requests for the segment, and passes the bytes to
    obstore.

    numbers      the file's number in the save, and in the engine
    tags         ETags of this store's segments: first of the object that reserves the segment's name, then of the
                 segment
    held_blocks  counts the blocks that all uploads of this save keep until their objects are complete. They are kept so
                 that a segment whose upload fails can be written to another path of a striped store. None: no block is
                 kept, as the segment may not be written to another path
    error        why the upload has failed; set on the upload's thread
    """

    def __init__(
        self, client: Client, engine: Engine, job: WriteJob, plan: FilePlan, *,
        numbers: tuple[int, int], tags: dict[str, str | None], held_blocks: HeldBlocks | None = None,
    ) -> None:
        self._client, self._engine, self._job, self._plan = client, engine, job, plan
        self._number, self._token = numbers
        self._tags, self._claim = tags, tags[plan.path]
        self._spool = Spool("" if held_blocks is None else held_blocks.directory)
        self._kept = None if held_blocks is None else RetryBuffer(
            held_blocks, self._spool, f"{client.location}/{plan.path}"
        )
        self._ranges, self._early = in_order(job.windows, self._number)
        self._spooled: set[int] = set()  # offsets of the ranges that are in the temporary file
        # offset of a captured range -> number of its request, address, length
        self._arrived: dict[int, tuple[int, int, int]] = {}
        self._wakes = engine.wakes  # read before the first check of the job, so that no wake-up is missed
        self.error: FlowstoneError | None = None
        self._thread = threading.Thread(target=self._run, name="flowstone-upload")
        self._thread.start()

    @property
    def may_move(self) -> bool:
        """Whether the segment may be written to another path. False if the store has no other path, if not all bytes
        were kept, or if another job has removed or replaced the segment in the bucket.
        """
        return self._kept is not None and self._kept.is_whole and not isinstance(self.error, LockedError)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the upload. Returns False after `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def open_written(self) -> BinaryIO:
        """Open the bytes of the segment that were kept in the temporary file. Raises OSError."""
        return self._spool.opened(self._plan.bytes)

    def close(self) -> None:
        """Free the buffers. Call this once the upload has ended."""
        self._spool.close()

    def _run(self) -> None:
        try:
            self._send()
        except UploadStoppedError:
            pass  # the job reports the error
        except FlowstoneError as error:
            self.error = error
            _clear_frames(error)
        except OSError as error:
            self.error = self._spool.refusal(error, self._plan.path)
        except BaseException as error:
            self.error = storage_error(self._client.location, "upload", self._plan.path, error)
            _clear_frames(error)
        finally:
            if self._kept is not None:
                self._kept.release()
            self._release()

    def _release(self) -> None:
        """Answer the engine's remaining requests until the job ends, so that the engine gets its blocks back. After an
        error, first cancel the job, unless the segment may move to another path.
        """
        if self.error is not None and not self.may_move:
            self._job.cancel()
        for number, _, length in self._arrived.values():
            self._end_block(number, length)
        self._arrived.clear()
        while True:
            self._wakes = self._engine.wakes
            if self._job.wait(0):
                return
            for number, _, _, _, length, _ in self._requests():
                self._end_block(number, length)

    def _end_block(self, number: int, length: int) -> None:
        """Return to the engine a block that nothing reads any more. If the segment moves to another path, the requests
        of the block are reported as failed.
        """
        if self.error is not None and self.may_move:
            self._engine.complete(number, 0, errno.EIO)
        else:
            self._engine.complete(number, length)

    def _send(self) -> None:
        if self._plan.header is None:
            self._put(self._in_parts(self._pieces()), self._plan.bytes)
            return
        self._spool_all()
        size = self._job.file_ends[self._number]
        header = self._plan.header(size)
        pieces: Iterator[bytes] = iter([header] if size else [])
        self._put(self._then(pieces, self._spool.read(len(header), size)), size)

    def _then(self, *streams: Iterator[bytes]) -> Generator[bytes | memoryview, None, None]:
        for stream in streams:
            yield from stream
        self._check_claim()

    def _put(self, stream: Generator[bytes | memoryview, None, None], size: int) -> None:
        try:
            self._put_all(stream, size)
        finally:
            # an exception keeps this frame alive, and with the open stream it would keep the engine's blocks, too
            stream.close()

    def _put_all(self, stream: Iterator[bytes | memoryview], size: int) -> None:
        length = part_bytes(size)
        # the object is sent in one request, which must replace only the object with which this job reserved the name
        if size <= length:
            data = b"".join(stream)
            tag = self._client.replace(self._plan.path, data, self._claim)
            if tag is None:
                self._raise_lost()
            self._tags[self._plan.path] = tag
            return
        try:
            tag = self._client.repeating.put(
                self._plan.path, stream, use_multipart=True, chunk_size=length, max_concurrency=_CONCURRENT_MAX
            )["e_tag"]
        except (UploadStoppedError, FlowstoneError):
            raise
        except Exception as error:
            raise storage_error(self._client.location, "upload", self._plan.path, error) from error
        self._tags[self._plan.path] = tag or self._client.tag(self._plan.path)  # Ceph's gateway returns no ETag

    def _check_claim(self) -> None:
        """Raise LockedError if another job has removed or replaced the object that reserves the segment's name."""
        with ThreadPoolExecutor(1, thread_name_prefix="flowstone-heads") as executor:
            # The request is made on another thread: obstore allows no request on a thread from which it reads a stream.
            meta = executor.submit(self._client.head, self._plan.path).result()
        if meta is None or not same_tag(meta["e_tag"], self._claim):
            self._raise_lost()

    def _raise_lost(self) -> None:
        raise LockedError(
            f"cannot upload {self._client.location}/{self._plan.path}",
            found="another job has removed or replaced this file",
            next="stop the other job that writes there; the next save takes the lock again",
        )

    def _in_parts(self, pieces: Iterator[bytes | memoryview | None]) -> Generator[bytes | memoryview, None, None]:
        """Cut the pieces at the ends of the upload's parts. The pieces of a part are yielded once the part is complete;
        obstore then sends it.

        If the rest of a part is delayed, the pieces so far are copied, so that their blocks of the arena can be used
        for the rest.
        """
        length = part_bytes(self._plan.bytes)
        pieces_of_part: list[bytes | memoryview] = []
        missing_bytes = length
        for piece in pieces:
            if piece is None:
                pieces_of_part = [b"".join(pieces_of_part)]
                if self._kept is not None:
                    self._kept.free_blocks()
                continue
            rest = memoryview(piece)
            del piece
            while rest:
                pieces_of_part.append(rest[:missing_bytes])
                missing_bytes -= len(pieces_of_part[-1])
                rest = rest[len(pieces_of_part[-1]) :]
                if missing_bytes == 0:
                    yield from self._handed_over(pieces_of_part)
                    missing_bytes = length
            del rest
        yield from self._handed_over(pieces_of_part)
        self._check_claim()

    def _handed_over(self, pieces: list[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """Yield the pieces and empty the list, so that only the receiver has references to them."""
        pieces.reverse()
        while pieces:
            yield bytes(pieces.pop()) if self._client.keeps_buffers else pieces.pop()

    def _pieces(self) -> Iterator[bytes | memoryview | None]:
        """The file's bytes in order, in pieces. None means that the next piece is not captured yet."""
        offset = 0
        for begin, end in self._ranges:
            end = min(end, self._plan.bytes)  # the engine captures full blocks of 4096 bytes, also after the file's end
            yield from self._spool.read(offset, begin)  # bytes that are in no range are zeros
            if begin in self._early:
                while begin not in self._spooled:
                    if not self._take():
                        yield None
                yield from self._spool.read(begin, end)
            else:
                while begin not in self._arrived:
                    if not self._take():
                        yield None
                yield self._view(begin, *self._arrived.pop(begin))[: end - begin]
            offset = end
        yield from self._spool.read(offset, self._plan.bytes)

    def _requests(self) -> list[tuple[int, int, int, int, int, int]]:
        """The engine's next requests for this file. Empty if there was none within POLL_S."""
        return self._engine.take("write", (self._token, self._token + 1), _TAKEN_AT_ONCE, POLL_S, self._wakes)

    def _take(self) -> bool:
        """Receive the engine's requests for this file. Returns False if there are none. Raises UploadStoppedError once
        the job stops.
        """
        requests = self._requests()
        self._wakes = self._engine.wakes
        for number, _, offset, address, length, _ in requests:
            if offset in self._early or self._plan.header is not None:
                self._keep(number, offset, address, length)
            else:
                self._arrived[offset] = number, address, length
        if not requests and (self._job.cancelled or self._job.fault is not None):
            raise UploadStoppedError
        return bool(requests)

    def _keep(self, number: int, offset: int, address: int, length: int) -> None:
        try:
            self._spool.write(offset, _memory(address, length))
        except OSError as error:
            self._engine.complete(number, 0, error.errno or errno.EIO)
            raise
        self._spooled.add(offset)
        self._engine.complete(number, length)

    def _spool_all(self) -> None:
        while not self._job.wait(0):
            self._take()  # returns only after the job has ended
        if self._job.cancelled or self._job.fault is not None:
            raise UploadStoppedError

    def _view(self, offset: int, number: int, address: int, length: int) -> memoryview:
        """The bytes of a block of the arena. The engine gets the block back when the last reference to them is dropped.
        """
        block = (ctypes.c_ubyte * length).from_address(address)
        weakref.finalize(block, self._end_block, number, length).atexit = False
        if self._kept is not None:
            self._kept.add(offset, block)
        return memoryview(block).cast("B")


def _clear_frames(error: BaseException | None) -> None:
    """Clear the stack frames of an error before the error is stored, since their variables refer to the engine's
    blocks.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _memory(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


class ObjectWriteHandle(WriteWaits):
    """The write of one save's segments to a bucket."""

    def __init__(
        self, location: str, job: WriteJob, settings: Settings, watch: Watch, plans: Sequence[FilePlan],
        uploads: Sequence[Upload],
    ) -> None:
        self._root, self._job, self._settings, self._watch = Path(location), job, settings, watch
        self._plans, self._uploads = plans, uploads

    def reserve(self) -> None:
        """Does nothing, since a bucket reserves no space."""

    def receipt(self) -> Receipt:
        self._wait()
        for upload in self._uploads:
            while not upload.wait(POLL_S):
                pass
            upload.close()
        tuning = self._settings.tuning
        failed = next((upload.error for upload in self._uploads if upload.error is not None), None)
        io = self._io(
            "objects", self._settings, alignment=1, request_bytes=tuning.request_bytes, depth=tuning.queue_depth
        )
        return self._receipt(failed or write_error(self._root, self._job), io)


class ObjectOpenSegments:
    """Segments that a job of another store writes (see StripeMember). Their names are reserved by small objects."""

    def __init__(
        self, client: Client, engine: Engine, plans: Sequence[FilePlan], tokens: range,
        tags: dict[str, str | None], *, of_path: int, held_blocks: HeldBlocks | None,
    ) -> None:
        self._client, self._plans, self._tokens, self._tags, self.engine = client, plans, tokens, tags, engine
        self._held = held_blocks
        self._uploads: list[Upload] = []
        self.natives = [
            File(
                fd=token, path=f"{client.location}/{plan.path}", alignment=1, of_path=of_path,
                may_move=held_blocks is not None,
            )
            for token, plan in zip(tokens, plans, strict=True)
        ]

    def begin(self, job: WriteJob, numbers: Sequence[int]) -> None:
        try:
            for number, token, plan in zip(numbers, self._tokens, self._plans, strict=True):
                self._uploads.append(Upload(
                    self._client, self.engine, job, plan, numbers=(number, token), tags=self._tags,
                    held_blocks=self._held,
                ))
        except RuntimeError as error:
            cancel_unserved(self.engine, job, "write", (self._tokens.start, self._tokens.stop))
            raise StorageError(
                f"cannot start the threads that write into {self._client.location}", errno=errno.EAGAIN,
                reason=str(error), next=MORE_THREADS,
            ) from error

    def reserve(self) -> None:
        """Does nothing, since a bucket reserves no space."""

    def end(self, job: WriteJob, ends: Sequence[int]) -> FlowstoneError | None:  # noqa: ARG002  (uploads know)
        self._join()
        return self.error()

    def error(self) -> FlowstoneError | None:
        """The error of a failed upload whose segment must not move to another path. Such an error makes the job fail.
        None if there is none.
        """
        staying = (upload for upload in self._uploads if not upload.may_move)
        return next((upload.error for upload in staying if upload.error is not None), None)

    def refusal(self, index: int) -> FlowstoneError | None:
        upload = self._uploads[index]
        return upload.error if upload.may_move else None

    def open_written(self, index: int) -> BinaryIO:
        return self._uploads[index].open_written()

    def _join(self) -> None:
        for upload in self._uploads:
            while not upload.wait(POLL_S):
                pass

    def close(self) -> None:
        self._join()
        for upload in self._uploads:
            upload.close()
