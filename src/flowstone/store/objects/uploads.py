"""Segments on their way to a bucket: each one a multipart upload, of parts straight from the blocks of the arena.

A part is sent from where the engine has captured and digested it; the engine gets its block back once nothing reads it
any more. obstore takes a file's bytes in their order. Windows that are captured in another order (early pieces lie
behind lazy ones), and segments whose beginning is known last (an encoder decides their size), wait in a temporary file.

Where another path is to take what the bucket refuses, a segment is kept until its object is complete: its blocks are
held as far as there is room, and the temporary file has the rest.
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

from flowstone import _native
from flowstone.config import MIB, POLL_S, Watch
from flowstone.errors import FlowstoneError, LockedError, StorageError
from flowstone.store.base import FilePlan, Receipt
from flowstone.store.jobs import WriteWaits, write_error
from flowstone.store.objects.client import Client, same_tag
from flowstone.store.objects.downloads import give_up
from flowstone.store.objects.failures import storage_error
from flowstone.store.objects.kept import Held, Kept, Spool
from flowstone.store.os_errors import MORE_THREADS
from flowstone.store.settings import Settings

PART_BYTES_MIN = 8 * MIB  # S3 refuses parts under 5 MiB but for the last one
PARTS_MAX = 9_000  # S3's limit is 10,000
_AT_ONCE_MAX = 16  # requests of one upload
_TAKEN_AT_ONCE = 8


def part_bytes(file_bytes: int) -> int:
    """How long the parts of a segment's upload are: few enough for any size, in whole MiB."""
    return max(PART_BYTES_MIN, -(-file_bytes // PARTS_MAX // MIB) * MIB)


class StoppedError(Exception):
    """The save ended early; the upload is given up."""


def in_order(windows: Sequence[tuple[int, int, int]], file: int) -> tuple[list[tuple[int, int]], set[int]]:
    """The ranges of one file in their order, and where those begin that are captured before one that lies before them.

    windows  file, begin and end, in the order of capture
    Windows get their blocks in that order. So one that lies behind another, and is captured before it, would hold its
    block for as long as that one waits for one. Pure.
    """
    placed = sorted((begin, end, turn) for turn, (number, begin, end) in enumerate(windows) if number == file)
    early, last = set(), -1
    for begin, _, turn in placed:
        if turn < last:
            early.add(begin)
        last = max(last, turn)
    return [(begin, end) for begin, end, _ in placed], early


class Upload:
    """One segment. Its thread takes the engine's requests for it, and hands their bytes to obstore.

    numbers  of the file in the save, and in the engine
    tags     of this store's segments: first of the object that keeps the segment's name, then of the segment itself
    held     by the uploads of this save; None: the segment stays there, whatever becomes of it
    error    why it failed; set on its thread
    """

    def __init__(
        self, client: Client, engine: _native.Engine, job: _native.WriteJob, plan: FilePlan, *,
        numbers: tuple[int, int], tags: dict[str, str | None], held: Held | None = None,
    ) -> None:
        self._client, self._engine, self._job, self._plan = client, engine, job, plan
        self._number, self._token = numbers
        self._tags, self._claim = tags, tags[plan.path]
        self._spool = Spool("" if held is None else held.directory)
        self._kept = None if held is None else Kept(held, self._spool, f"{client.location}/{plan.path}")
        self._ranges, self._early = in_order(job.windows, self._number)
        self._spooled: set[int] = set()  # offsets of what the spool has
        self._arrived: dict[int, tuple[int, int, int]] = {}  # by offset: number, address, length
        self._wakes = engine.wakes  # before anything is asked of the job
        self.error: FlowstoneError | None = None
        self._thread = threading.Thread(target=self._run, name="flowstone-upload")
        self._thread.start()

    @property
    def may_move(self) -> bool:
        """Whether what the bucket has refused is to be written elsewhere. What another job has taken is not."""
        return self._kept is not None and self._kept.is_whole and not isinstance(self.error, LockedError)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def open_written(self) -> BinaryIO:
        """What does not go through the engine again. Raises OSError."""
        return self._spool.opened(self._plan.bytes)

    def close(self) -> None:
        """Once it has ended."""
        self._spool.close()

    def _run(self) -> None:
        try:
            self._send()
        except StoppedError:
            pass  # the job has the reason
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
                self._kept.let_go()
            self._give_back()

    def _give_back(self) -> None:
        """Nothing more is sent. The job ends, and its blocks are free again; or what is not there moves."""
        if self.error is not None and not self.may_move:
            self._job.cancel()
        for number, _, length in self._arrived.values():
            self._end_block(number, length)
        self._arrived.clear()
        while True:
            self._wakes = self._engine.wakes
            if self._job.wait(0):
                return
            for number, _, _, _, length, _ in self._taken():
                self._end_block(number, length)

    def _end_block(self, number: int, length: int) -> None:
        """Nothing reads a block any more. Of a job that has stopped, nothing follows from it."""
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
            stream.close()  # an exception keeps this frame; the stream must not keep the engine's blocks with it

    def _put_all(self, stream: Iterator[bytes | memoryview], size: int) -> None:
        length = part_bytes(size)
        if size <= length:  # one request, which replaces nothing but our own claim
            data = b"".join(stream)
            tag = self._client.replace(self._plan.path, data, self._claim)
            if tag is None:
                self._raise_lost()
            self._tags[self._plan.path] = tag
            return
        try:
            tag = self._client.repeating.put(
                self._plan.path, stream, use_multipart=True, chunk_size=length, max_concurrency=_AT_ONCE_MAX
            )["e_tag"]
        except (StoppedError, FlowstoneError):
            raise
        except Exception as error:
            raise storage_error(self._client.location, "upload", self._plan.path, error) from error
        self._tags[self._plan.path] = tag or self._client.tag(self._plan.path)  # Ceph's gateway gives none here

    def _check_claim(self) -> None:
        """Raise LockedError if another job has removed or replaced what keeps the segment's name."""
        with ThreadPoolExecutor(1, thread_name_prefix="flowstone-heads") as executor:
            # Not on this thread: obstore takes no request on one from which it is asking for more of a stream.
            found = executor.submit(self._client.head, self._plan.path).result()
        if found is None or not same_tag(found["e_tag"], self._claim):
            self._raise_lost()

    def _raise_lost(self) -> None:
        raise LockedError(
            f"cannot upload {self._client.location}/{self._plan.path}", found="another job has removed or replaced it",
            next="stop the other job that writes there; the next save takes the lock again",
        )

    def _in_parts(self, pieces: Iterator[bytes | memoryview | None]) -> Generator[bytes | memoryview, None, None]:
        """The pieces, cut between parts. What belongs to a part is handed on together: once obstore has it, it is sent.

        Where the rest of a part does not come soon, what is there is copied, and its blocks are free for that rest.
        """
        length = part_bytes(self._plan.bytes)
        held: list[bytes | memoryview] = []
        room = length
        for piece in pieces:
            if piece is None:
                held = [b"".join(held)]
                if self._kept is not None:
                    self._kept.make_room()
                continue
            rest = memoryview(piece)
            del piece
            while rest:
                held.append(rest[:room])
                room -= len(held[-1])
                rest = rest[len(held[-1]) :]
                if room == 0:
                    yield from self._handed_over(held)
                    room = length
            del rest
        yield from self._handed_over(held)
        self._check_claim()

    def _handed_over(self, held: list[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """Empties `held`, so that only the receiver keeps what it has got."""
        held.reverse()
        while held:
            yield bytes(held.pop()) if self._client.keeps_buffers else held.pop()

    def _pieces(self) -> Iterator[bytes | memoryview | None]:
        """The file's bytes in their order; None: the next ones have not come for a while."""
        at = 0
        for begin, end in self._ranges:
            end = min(end, self._plan.bytes)  # the engine writes whole blocks of 4096 bytes
            yield from self._spool.read(at, begin)  # no window is there: zeros
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
            at = end
        yield from self._spool.read(at, self._plan.bytes)

    def _taken(self) -> list[tuple[int, int, int, int, int, int]]:
        return self._engine.take("write", (self._token, self._token + 1), _TAKEN_AT_ONCE, POLL_S, self._wakes)

    def _take(self) -> bool:
        """Take what the engine has for this file; whether there was something. Raises StoppedError once the job ends.
        """
        found = self._taken()
        self._wakes = self._engine.wakes
        for number, _, offset, address, length, _ in found:
            if offset in self._early or self._plan.header is not None:
                self._keep(number, offset, address, length)
            else:
                self._arrived[offset] = number, address, length
        if not found and (self._job.cancelled or self._job.fault is not None):
            raise StoppedError
        return bool(found)

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
            self._take()  # returns when it has ended
        if self._job.cancelled or self._job.fault is not None:
            raise StoppedError

    def _view(self, offset: int, number: int, address: int, length: int) -> memoryview:
        """A block's bytes; the engine gets the block back once nothing refers to them."""
        block = (ctypes.c_ubyte * length).from_address(address)
        weakref.finalize(block, self._end_block, number, length).atexit = False
        if self._kept is not None:
            self._kept.add(offset, block)
        return memoryview(block).cast("B")


def _clear_frames(error: BaseException | None) -> None:
    """Frames of an error that is kept would keep the engine's blocks."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _memory(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


class ObjectWriting(WriteWaits):
    """Segments of one save, on their way to a bucket."""

    def __init__(
        self, location: str, job: _native.WriteJob, settings: Settings, watch: Watch, plans: Sequence[FilePlan],
        uploads: Sequence[Upload],
    ) -> None:
        self._root, self._job, self._settings, self._watch = Path(location), job, settings, watch
        self._plans, self._uploads = plans, uploads

    def reserve(self) -> None:
        """Nothing to do: a bucket reserves no space."""

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


class ObjectPart:
    """Segments of a job of another store's (see Parts). Their names are claimed."""

    def __init__(
        self, client: Client, engine: _native.Engine, plans: Sequence[FilePlan], tokens: range,
        tags: dict[str, str | None], *, of_path: int, held: Held | None,
    ) -> None:
        self._client, self._plans, self._tokens, self._tags, self.engine = client, plans, tokens, tags, engine
        self._held = held
        self._uploads: list[Upload] = []
        self.natives = [
            _native.File(
                fd=token, path=f"{client.location}/{plan.path}", alignment=1, of_path=of_path,
                may_move=held is not None,
            )
            for token, plan in zip(tokens, plans, strict=True)
        ]

    def begin(self, job: _native.WriteJob, numbers: Sequence[int]) -> None:
        try:
            for number, token, plan in zip(numbers, self._tokens, self._plans, strict=True):
                self._uploads.append(Upload(
                    self._client, self.engine, job, plan, numbers=(number, token), tags=self._tags, held=self._held,
                ))
        except RuntimeError as error:
            give_up(self.engine, job, "write", (self._tokens.start, self._tokens.stop))
            raise StorageError(
                f"cannot start the threads that write into {self._client.location}", errno=errno.EAGAIN,
                reason=str(error), next=MORE_THREADS,
            ) from error

    def reserve(self) -> None:
        """Nothing to do: a bucket reserves no space."""

    def end(self, job: _native.WriteJob, ends: Sequence[int]) -> FlowstoneError | None:  # noqa: ARG002  (uploads know)
        self._join()
        return self.error()

    def error(self) -> FlowstoneError | None:
        """Why an upload has failed, and with it the job."""
        return next((one.error for one in self._uploads if one.error is not None and not one.may_move), None)

    def refusal(self, at: int) -> FlowstoneError | None:
        upload = self._uploads[at]
        return upload.error if upload.may_move else None

    def open_written(self, at: int) -> BinaryIO:
        return self._uploads[at].open_written()

    def _join(self) -> None:
        for upload in self._uploads:
            while not upload.wait(POLL_S):
                pass

    def close(self) -> None:
        self._join()
        for upload in self._uploads:
            upload.close()
