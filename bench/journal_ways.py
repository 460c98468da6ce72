"""Ways to write a journal of every step with a part left out, or done elsewhere (bench/journal_parts.py).

Leaving a part out makes a journal useless. Each way is a set of replacements in the library.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import BLOCK_BYTES
from flowstone.journal.every_step import EveryStep
from flowstone.journal.journal_frames import StepContent
from flowstone.journal.journaling import Journaling
from flowstone.journal.optimizer_steps import Gradient
from flowstone.store.system import System

Part = tuple[int, int]
"""Memory of this process: its address, and its length in bytes."""

_DIGESTS_OF = ("flowstone.journal.journal_frames.digests_of", "flowstone.journal.fingerprints.digests_of")
_write_waiting, _content, _write_at = Journaling._write_waiting, EveryStep._content, System.write_at


def _idle_write(self: Journaling) -> None:
    """The journal's thread runs only while a processor is idle."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _write_waiting(self)


def _nice_write(self: Journaling) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    _write_waiting(self)


def _other_processor_write(self: Journaling) -> None:
    """The journal's thread runs on the processors on which the training's main thread was not last."""
    main = Path(f"/proc/self/task/{threading.main_thread().native_id}/stat").read_text().rpartition(")")[2].split()[36]
    os.sched_setaffinity(0, os.sched_getaffinity(threading.main_thread().native_id or 0) - {int(main)})
    _write_waiting(self)


@cache
def _huge_pages() -> torch.Tensor:
    memory = mmap.mmap(-1, 1 << 28)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def _other_bytes(system: System, fd: int, parts: Sequence[memoryview], offset_bytes: int) -> None:
    """Bytes in huge pages are written, as many as the gradients have."""
    buffer = memoryview(_huge_pages().numpy())
    _write_at(system, fd, [buffer[: sum(map(len, parts))]], offset_bytes)


class _InSave:
    """The work that `save` has done for the thread, on the training's main thread.

    copies     gradients are copied into huge pages, by all of torch's threads, and digested while they are in the cache
    is_halved  a second thread digests half of them
    """

    def __init__(self, *, copies: bool = False, is_halved: bool = False) -> None:
        self._digests: dict[Part, int] = {}
        self._room = _huge_pages() if copies else None
        self._other = ThreadPoolExecutor(1) if is_halved else None

    def content(self, self_: EveryStep, *arguments: Any) -> StepContent | str:
        content = _content(self_, *arguments)
        if isinstance(content, str):
            return content
        self._digests.clear()
        content = content if self._room is None else self._copied(content, self._room)
        gradients = [gradient.tensor for record in content.records for gradient in record.gradients]
        self._read([(gradient.data_ptr(), gradient.nbytes) for gradient in gradients])
        self._read(content.window.parts if content.window is not None else ())
        return content

    def digests(self, addresses: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """In place of the thread's."""
        parts = list(zip(addresses, lengths, strict=True))
        self._read([part for part in parts if part not in self._digests])
        return [self._digests[part] for part in parts]

    def _copied(self, content: StepContent, tensor: torch.Tensor) -> StepContent:
        used, records = 0, []
        for record in content.records:
            gradients = []
            for grad in record.gradients:
                copy = tensor[used : used + grad.tensor.nbytes].view(grad.tensor.dtype).view(grad.tensor.shape)
                gradients.append(Gradient(grad.parameter, copy.copy_(grad.tensor), None))
                self._read([(copy.data_ptr(), copy.nbytes)])
                used += -(-copy.nbytes // BLOCK_BYTES) * BLOCK_BYTES
            records.append(msgspec.structs.replace(record, gradients=tuple(gradients)))
        return msgspec.structs.replace(content, records=records)

    def _read(self, parts: Sequence[Part]) -> None:
        due = [part for part in parts if part not in self._digests]
        halves = [due] if self._other is None else [due[0::2], due[1::2]]
        running = [self._other.submit(_digests, half) for half in halves[1:] if self._other is not None]
        self._digests.update(_digests(halves[0]))
        for future in running:
            self._digests.update(future.result())


def _digests(parts: Sequence[Part]) -> dict[Part, int]:
    if not parts:
        return {}
    array = _native.digest_memory(*np.array(parts, np.uint64).T.copy())
    return dict(zip(parts, array.tolist(), strict=True))


def _in_save(**how: bool) -> dict[str, Any]:
    kept: list[_InSave] = []  # created on first use, since it takes memory

    def one() -> _InSave:
        if not kept:
            kept.append(_InSave(**how))
        return kept[0]

    return {
        "flowstone.journal.every_step.EveryStep._content": lambda *given: one().content(*given),
        **dict.fromkeys(_DIGESTS_OF, lambda *given: one().digests(*given)),
    }


def _no_digests(address: NDArray[np.uint64], _: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return np.zeros(len(address), np.uint64)


def _only_ended(self: Journaling) -> None:
    """The journal's thread does nothing; only the hooks around the step and `save` remain."""
    frame = self._waiting.popleft()
    frame.fingerprinted.open()
    step = frame.step
    if step.save is not None:
        step.save.captured.complete()
    for record in step.content.records if isinstance(step.content, StepContent) else ():
        record.on_written()
    frame.over.open()
    step.hooks.on_end(None)
    frame.release()


def _not_written(*_: object, confirm: Callable[[], None] = lambda: None, **__: object) -> None:
    confirm()


def _nothing(*_: object) -> None: ...


_DIGESTS = {"flowstone._native.digest_memory": _no_digests}
_FINGERPRINT = {"flowstone.journal.journaling.Journaling._fingerprint": lambda *_: ""}
_WRITE = {
    "flowstone.store.local_append.LocalAppendFile.append": _not_written,
    "flowstone.store.local_append.LocalAppendFile.sync": _nothing,
}
_THREAD = "flowstone.journal.journaling.Journaling._write_waiting"
PARTS: Mapping[str, Mapping[str, Any]] = {
    "whole": {}, "no fingerprint": _FINGERPRINT, "no digests": _DIGESTS, "no write": _WRITE,
    "no sync": {"flowstone.store.local_append.LocalAppendFile.sync": _nothing},
    "digests in save": _in_save(), "digests in save, by two threads": _in_save(is_halved=True),
    "copied into large pages in save": _in_save(copies=True),
    "other bytes, in large pages": {"flowstone.store.system.System.write_at": _other_bytes},
    "a 32nd in each fingerprint": {
        "flowstone.journal.every_step.JOURNAL_WINDOWS": 32, "flowstone.journal.journaling.JOURNAL_WINDOWS": 32,
    },
    "another processor": {_THREAD: _other_processor_write},
    "frames only": {**_DIGESTS, **_FINGERPRINT, **_WRITE},
    "hooks and save only": {_THREAD: _only_ended},
    "idle class": {_THREAD: _idle_write}, "nice 19": {_THREAD: _nice_write},
}


@contextmanager
def journaling_by(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for target, by in PARTS[name].items():
            stack.enter_context(mock.patch(target, by))
        yield
