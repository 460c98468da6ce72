"""Spans: when a save or load did what, with how many bytes, on which rank and thread. Events are made from them.

The caller of `save` waits while what is before it is over (*waited*), the state is *described* and *planned*, the
draft is made and its capture is *begun*, what is no tensor is *encoded*, and what is not lazy is captured (*early*),
one behind the other: together they are *blocked*. Beside or after them come *captured* (until no source is read any
more), *written* (until every byte is with the store), *synced* (until it is durable), *agreed* (the ranks have one
plan), *published* (all have written, and there is a checkpoint); *save* spans all of them. *fenced* is what a step has
waited for captures. Where the ranks have no plan yet, the caller waits until what it needs is *copied*, and the rest is
done in the background.

A load is *wanted* (what the state wants is found), *planned* (compared with the checkpoint, by all ranks), *read*
(read, verified, scattered), *finished* (objects are restored), *agreed* (between ranks); *load* spans all of them.

The engine's threads add, for each window, *capture* (copied into a block and digested), *encode*, *write* (its
requests are with the device); and for a load *read* and *deliver* (verified and scattered). They are recorded by the
engine and come with the receipt (native/spans.h).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from flowstone.errors import StorageError

if TYPE_CHECKING:
    from flowstone._native import SpanColumns

Verb: TypeAlias = Literal["save", "load"]
_ENGINE_PHASES = ("capture", "encode", "write", "read", "deliver")  # as the engine numbers them
_REQUESTS = ("write", "read")  # by the device, several at once: on no thread
_open_trace: ContextVar[Trace | None] = ContextVar("flowstone_trace", default=None)


@dataclass(frozen=True, slots=True)
class Span:
    """One phase of one save or load.

    begin, end  in seconds of the monotonic clock
    bytes       that it moved, where it moved some
    track       the thread, or what else does one thing after the other
    """

    verb: Verb
    phase: str
    step: int
    rank: int
    begin: float
    end: float
    bytes: int = 0
    track: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Spans:
    """The spans of one call of `save` or `load`, from its begin on. Any thread; each is kept where a trace is open."""

    __slots__ = ("_last", "_trace", "begin", "rank", "step", "verb")

    def __init__(self, verb: Verb, step: int, rank: int) -> None:
        """The call begins now; `lap` counts from here."""
        self.verb: Verb = verb
        self.step, self.rank = step, rank
        self.begin = self._last = time.monotonic()
        self._trace = _open_trace.get()

    def lap(self, phase: str, bytes_: int = 0) -> Span:
        """What was done since the last lap; the next begins where this one ends."""
        begin, self._last = self._last, time.monotonic()
        return self.between(phase, begin, self._last, bytes_)

    def whole(self, phase: str, bytes_: int = 0, *, track: str = "") -> Span:
        """From the begin of the call until now."""
        return self.between(phase, self.begin, time.monotonic(), bytes_, track=track)

    def lapped(self, phase: str) -> Span:
        """All laps so far."""
        return self.between(phase, self.begin, self._last)

    @contextmanager
    def phase(self, phase: str, bytes_: int = 0) -> Iterator[None]:
        """What is done inside; also what fails."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.between(phase, begin, time.monotonic(), bytes_)

    def between(self, phase: str, begin: float, end: float, bytes_: int = 0, *, track: str = "") -> Span:
        """A span whose begin and end are known."""
        span = Span(self.verb, phase, self.step, self.rank, begin, end, bytes_, track)
        if self._trace is not None:
            self._trace.add(span if track else replace(span, track=threading.current_thread().name))
        return span

    def since_call(self, span: Span) -> float:
        """Seconds from the begin of the call to the end of a span."""
        return span.end - self.begin

    def engine(self, jobs: Iterable[SpanColumns]) -> None:
        """What the engine's threads have done for it."""
        if self._trace is not None:
            for columns in jobs:
                self._trace.add_engine(self, columns)


class Trace:
    """Keeps the spans of all saves and loads that are called inside of it, by this thread, whenever they end.

        with fs.Trace("trace.json"):
            ckpt.save(step, state)
            ckpt.wait()

    path  is written at the end, in Chrome's trace format, which https://ui.perfetto.dev opens. What a save does after
          that is missing: wait for it before. In a job of several ranks each has a path of its own; None: no file
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = path
        self._spans: list[Span] = []
        self._engine: list[tuple[Spans, SpanColumns]] = []
        self._before: Token[Trace | None] | None = None

    def __enter__(self) -> Trace:
        self._before = _open_trace.set(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if self._before is not None:
            _open_trace.reset(self._before)
        try:
            if self._path is not None:
                self.write(self._path)
        except StorageError:
            if error is None:
                raise

    def add(self, span: Span) -> None:
        """Any thread."""
        self._spans.append(span)

    def add_engine(self, of: Spans, columns: SpanColumns) -> None:
        """Any thread."""
        self._engine.append((of, columns))

    @property
    def spans(self) -> tuple[Span, ...]:
        """All so far, in the order of their begin, the longer before the shorter."""
        engine = [span for of, columns in list(self._engine) for span in _engine_spans(of, columns)]
        return tuple(sorted([*self._spans, *engine], key=lambda span: (span.begin, -span.end)))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write them in Chrome's trace format. Raises StorageError."""
        text = json.dumps({"traceEvents": chrome_events(self.spans), "displayTimeUnit": "ms"})
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise StorageError(
                f"cannot write the trace {os.fspath(path)}", errno=error.errno or 0, reason=error.strerror,
                next="give a path that can be written",
            ) from error


def _engine_spans(of: Spans, columns: SpanColumns) -> Iterator[Span]:
    numbers: dict[int, int] = {}
    for number, begin, end, moved, thread in zip(*(column.tolist() for column in columns), strict=True):
        phase = _ENGINE_PHASES[number]
        at = numbers.setdefault(thread, len(numbers))
        track = f"{phase} requests" if phase in _REQUESTS else f"engine {at}"
        yield Span(of.verb, phase, of.step, of.rank, begin / 1e9, end / 1e9, moved, track)


def chrome_events(spans: Sequence[Span]) -> list[dict[str, object]]:
    """Events of Chrome's trace format: a process for each rank, and for each track as many lanes as it needs."""
    events: list[dict[str, object]] = []
    lanes: dict[tuple[int, str], list[list[int]]] = {}  # of each track: the ends of what goes on in each lane
    numbers: dict[tuple[int, str, int], int] = {}
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        begin, end = round(span.begin * 1e9), round(span.end * 1e9)
        lane = _lane(lanes.setdefault((span.rank, span.track), []), begin, end)
        key = (span.rank, span.track, lane)
        if key not in numbers:
            numbers[key] = len(numbers) + 1
            events += _names(span.rank, numbers[key], span.track if lane == 0 else f"{span.track} ({lane + 1})")
        events.append({
            "name": span.phase, "cat": span.verb, "ph": "X", "ts": begin / 1e3, "dur": (end - begin) / 1e3,
            "pid": span.rank, "tid": numbers[key], "args": {"step": span.step, "bytes": span.bytes},
        })
    return events


def _lane(lanes: list[list[int]], begin: int, end: int) -> int:
    """The first lane in which this lies inside of what goes on there, or behind it; what is drawn in one must nest."""
    for number, ends in enumerate(lanes):
        while ends and ends[-1] <= begin:
            ends.pop()
        if not ends or ends[-1] >= end:
            ends.append(end)
            return number
    lanes.append([end])
    return len(lanes) - 1


def _names(rank: int, thread: int, track: str) -> list[dict[str, object]]:
    return [
        {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}},
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": track}},
    ]
