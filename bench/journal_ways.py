"""Ways to write a journal of every step: with a part left out, or done elsewhere (bench/journal_parts.py).

What is left out makes a journal worthless. Each way is what it replaces in the library.
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
from flowstone.pipeline.every_step import EveryStep
from flowstone.pipeline.journaling import Journaling
from flowstone.stage.journal_frames import StepContent
from flowstone.stage.optimizer_steps import Gradient
from flowstone.store.system import System

Part = tuple[int, int]
"""Memory of this process: its address, and its length in bytes."""

_DIGESTS_OF = ("flowstone.stage.journal_frames.digests_of", "flowstone.stage.fingerprints.digests_of")
_write_waiting, _content, _write_at = Journaling._write_waiting, EveryStep._content, System.write_at


def _idle_write(self: Journaling) -> None:
    """The journal's thread runs only where a processor would idle."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _write_waiting(self)


def _nice_write(self: Journaling) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    _write_waiting(self)


def _other_processor_write(self: Journaling) -> None:
    """The journal's thread runs on the processors that the training's main thread was not on last."""
    main = Path(f"/proc/self/task/{threading.main_thread().native_id}/stat").read_text().rpartition(")")[2].split()[36]
    os.sched_setaffinity(0, os.sched_getaffinity(threading.main_thread().native_id or 0) - {int(main)})
    _write_waiting(self)


@cache
def _huge_pages() -> torch.Tensor:
    memory = mmap.mmap(-1, 1 << 28)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def _other_bytes(system: System, fd: int, parts: Sequence[memoryview], offset_bytes: int) -> None:
    """Bytes in huge pages are written, as many as the gradients are."""
    room = memoryview(_huge_pages().numpy())
    _write_at(system, fd, [room[: sum(map(len, parts))]], offset_bytes)


class _InSave:
    """What `save` has done of the thread's work, on the training's main thread.

    copies     gradients are copied into huge pages, by all of torch's threads, and digested while they are in the cache
    is_halved  a second thread digests half of them
    """

    def __init__(self, *, copies: bool = False, is_halved: bool = False) -> None:
        self._digests: dict[Part, int] = {}
        self._room = _huge_pages() if copies else None
        self._other = ThreadPoolExecutor(1) if is_halved else None

    def content(self, self_: EveryStep, *arguments: Any) -> tuple[StepContent | None, str]:
        content, why = _content(self_, *arguments)
        if content is None:
            return None, why
        self._digests.clear()
        content = content if self._room is None else self._copied(content, self._room)
        gradients = [one.tensor for act in content.acts for one in act.gradients]
        self._read([(one.data_ptr(), one.nbytes) for one in gradients])
        self._read(content.window.parts if content.window is not None else ())
        return content, why

    def digests(self, addresses: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """In place of the thread's."""
        parts = list(zip(addresses, lengths, strict=True))
        self._read([part for part in parts if part not in self._digests])
        return [self._digests[part] for part in parts]

    def _copied(self, content: StepContent, room: torch.Tensor) -> StepContent:
        used, acts = 0, []
        for act in content.acts:
            gradients = []
            for one in act.gradients:
                copy = room[used : used + one.tensor.nbytes].view(one.tensor.dtype).view(one.tensor.shape)
                gradients.append(Gradient(one.parameter, copy.copy_(one.tensor), None))
                self._read([(copy.data_ptr(), copy.nbytes)])
                used += -(-copy.nbytes // BLOCK_BYTES) * BLOCK_BYTES
            acts.append(msgspec.structs.replace(act, gradients=tuple(gradients)))
        return msgspec.structs.replace(content, acts=acts)

    def _read(self, parts: Sequence[Part]) -> None:
        due = [part for part in parts if part not in self._digests]
        halves = [due] if self._other is None else [due[0::2], due[1::2]]
        running = [self._other.submit(_digests, half) for half in halves[1:] if self._other is not None]
        self._digests.update(_digests(halves[0]))
        for one in running:
            self._digests.update(one.result())


def _digests(parts: Sequence[Part]) -> dict[Part, int]:
    if not parts:
        return {}
    found = _native.digest_memory(*np.array(parts, np.uint64).T.copy())
    return dict(zip(parts, found.tolist(), strict=True))


def _in_save(**how: bool) -> dict[str, Any]:
    kept: list[_InSave] = []  # made when it is used first: it takes memory

    def one() -> _InSave:
        if not kept:
            kept.append(_InSave(**how))
        return kept[0]

    return {
        "flowstone.pipeline.every_step.EveryStep._content": lambda *given: one().content(*given),
        **dict.fromkeys(_DIGESTS_OF, lambda *given: one().digests(*given)),
    }


def _no_digests(address: NDArray[np.uint64], _: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return np.zeros(len(address), np.uint64)


def _only_ended(self: Journaling) -> None:
    """The journal's thread does nothing; what is left are the hooks around the step, and `save`."""
    one = self._waiting.popleft()
    one.fingerprinted.open()
    step = one.step
    if step.save is not None:
        step.save.captured.tell()
    for act in step.content.acts if isinstance(step.content, StepContent) else ():
        act.copies()
    one.over.open()
    step.end(None)
    one.let_go()


def _not_written(*_: object, confirm: Callable[[], None] = lambda: None, **__: object) -> None:
    confirm()


def _nothing(*_: object) -> None: ...


_DIGESTS = {"flowstone._native.digest_memory": _no_digests}
_FINGERPRINT = {"flowstone.pipeline.journaling.Journaling._fingerprint": lambda *_: ""}
_WRITE = {
    "flowstone.store.appending.LocalAppending.append": _not_written,
    "flowstone.store.appending.LocalAppending.sync": _nothing,
}
_THREAD = "flowstone.pipeline.journaling.Journaling._write_waiting"
PARTS: Mapping[str, Mapping[str, Any]] = {
    "whole": {}, "no fingerprint": _FINGERPRINT, "no digests": _DIGESTS, "no write": _WRITE,
    "no sync": {"flowstone.store.appending.LocalAppending.sync": _nothing},
    "digests in save": _in_save(), "digests in save, by two threads": _in_save(is_halved=True),
    "copied into large pages in save": _in_save(copies=True),
    "other bytes, in large pages": {"flowstone.store.system.System.write_at": _other_bytes},
    "a 32nd in each fingerprint": {
        "flowstone.pipeline.every_step.JOURNAL_WINDOWS": 32, "flowstone.pipeline.journaling.JOURNAL_WINDOWS": 32,
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
