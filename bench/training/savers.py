"""How a training saves: Flowstone as its documentation says, and every rival of the bench with one thread."""

from __future__ import annotations

import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from bench.rivals import OURS, open_rival
from bench.rivals.base import Rival
from bench.training.records import SavedSample
from bench.training.trainer import Trainer


class Saver(Protocol):
    """A system that saves in a training. It keeps one checkpoint, beside those in flight."""

    def prepare(self, trainer: Trainer, /) -> None:
        """Done once by a job, before its first save. Not timed; its memory counts."""

    def save(self, trainer: Trainer, number: int, /) -> None:
        """Save the state after step `number`; return once training may continue. Never waits longer than necessary."""

    def drain(self) -> None:
        """Wait until every save so far is durable, or has failed."""

    def samples(self) -> list[SavedSample]:
        """The samples of every save since the last call; after `drain`."""

    def load(self, trainer: Trainer, number: int, /) -> None:
        """Load save `number`, the newest, into the trainer's model and optimizer."""

    def close(self) -> None:
        """Not timed."""


def open_saver(name: str, directory: Path) -> Saver:
    """The system of that name in bench/rivals; Flowstone is imported only for itself."""
    return Ours(directory / "store") if name == OURS else ByRival(open_rival(name, directory))


class _Log:
    """Records the events of each save, on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves: dict[int, SavedSample] = {}
        self._started: dict[int, float] = {}

    def call(self, number: int, save: Callable[[], None]) -> None:
        """Call and time `save`; its exception is a failed save, and does not end the training."""
        self._started[number] = time.monotonic()
        error = None
        try:
            save()
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        taken = time.monotonic() - self._started[number]
        with self._lock:
            self._saves[number] = SavedSample(number, taken, 0.0, None, error)

    def since(self, number: int) -> float:
        return time.monotonic() - self._started[number]

    def collect(
        self, durable_s: dict[int, float], fence_s: dict[int, float], errors: dict[int, str]
    ) -> list[SavedSample]:
        """All saves since the last call, with their outcomes."""
        with self._lock:
            saves, self._saves = self._saves, {}
        return [
            SavedSample(
                number, save.save_s, fence_s.get(number, 0.0), durable_s.get(number),
                save.error or errors.get(number) or (None if number in durable_s else "it never became durable"),
            )
            for number, save in saves.items()
        ]


class Ours:
    """One Checkpointer with its defaults; `fence="auto"`: the optimizer's next step waits for data not captured yet."""

    def __init__(self, store: Path) -> None:
        import flowstone
        from flowstone.events import phases as events

        self._committed, self._fenced = events.Committed, events.Fenced
        self._log = _Log()
        self._saves: list[flowstone.Save] = []
        self._durable_s: dict[int, float] = {}
        self._fence_s: dict[int, float] = defaultdict(float)
        self._checkpointer = flowstone.Checkpointer(
            store, keep=flowstone.Keep(last=1), on_error="continue", on_event=self._told
        )

    def prepare(self, _trainer: Trainer, /) -> None:
        pass

    def save(self, trainer: Trainer, number: int, /) -> None:
        self._log.call(number, lambda: self._save(trainer, number))

    def _save(self, trainer: Trainer, number: int) -> None:
        self._saves.append(self._checkpointer.save(number, _objects(trainer, number), fence="auto"))

    def drain(self) -> None:
        self._checkpointer.wait()

    def samples(self) -> list[SavedSample]:
        saves, self._saves = self._saves, []
        failures = ((save.step, save.committed.exception()) for save in saves)
        errors = {step: f"{type(error).__name__}: {error}" for step, error in failures if error is not None}
        return self._log.collect(self._durable_s, self._fence_s, errors)

    def load(self, trainer: Trainer, number: int, /) -> None:
        report = self._checkpointer.load(_objects(trainer, 0))
        if report.step != number:
            raise AssertionError(f"step {report.step} was loaded, not {number}")

    def close(self) -> None:
        self._checkpointer.close()

    def _told(self, event: object) -> None:
        """Called on the thread of the event: the training's or the one that commits."""
        if isinstance(event, self._committed):
            self._durable_s[event.step] = self._log.since(event.step)
        elif isinstance(event, self._fenced):
            self._fence_s[event.step] += event.waited_s


def _objects(trainer: Trainer, number: int) -> dict[str, object]:
    return {"model": trainer.model, "optimizer": trainer.optimizer, "step": number}


class ByRival:
    """A rival of bench/rivals. A thread of ours makes a save durable, and the next save waits for it.

    So a synchronous save is durable when `save` returns, and an asynchronous rival has one save in flight at a time,
    because the documentation of DCP and of TorchSnapshot requires to wait for the last save before the next.
    """

    def __init__(self, rival: Rival) -> None:
        self._rival, self._log = rival, _Log()
        self._thread = ThreadPoolExecutor(1)
        self._under_way: Future[None] | None = None
        self._kept: int | None = None  # the newest durable save
        self._durable_s: dict[int, float] = {}
        self._errors: dict[int, str] = {}

    def prepare(self, trainer: Trainer, /) -> None:
        self._rival.prepare(trainer.state(), "save")

    def save(self, trainer: Trainer, number: int, /) -> None:
        self._log.call(number, lambda: self._save(trainer, number))

    def _save(self, trainer: Trainer, number: int) -> None:
        self.drain()
        until_durable = self._rival.save(trainer.state(), number)
        self._under_way = self._thread.submit(self._finish, number, until_durable)

    def _finish(self, number: int, until_durable: Callable[[], object]) -> None:
        try:
            until_durable()
        except Exception as error:
            self._errors[number] = f"{type(error).__name__}: {error}"
            return
        self._durable_s[number] = self._log.since(number)
        if self._kept is not None:
            shutil.rmtree(self._rival.place(self._kept))
        self._kept = number

    def drain(self) -> None:
        if self._under_way is not None:
            self._under_way.result()

    def samples(self) -> list[SavedSample]:
        return self._log.collect(self._durable_s, {}, self._errors)

    def load(self, trainer: Trainer, number: int, /) -> None:
        """In the first of its ways, into the live tensors."""
        self._rival.load(trainer.state(), number, "")

    def close(self) -> None:
        self._thread.shutdown()
        self._rival.close()
