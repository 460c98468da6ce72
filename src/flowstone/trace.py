"""Spans: the phases of saves and loads, with times, bytes, rank and thread. Events are made from them.

Phases of a save while the caller of `save` waits, one after the other: *waited* (for an earlier save), *described*
(the state is listed), *planned* (which rank writes what), *begun* (files are created, capture has started), *encoded*
(values that are not tensors), *early* (capture of everything that must be captured before `save` returns). *blocked*
spans all these phases. In parallel or later: *captured* (until no tensor is read any more), *written* (until the store
has every byte), *synced* (until the bytes are durable), *agreed* (the ranks have one plan), *published* (all ranks have
written, and the checkpoint exists). *save* spans all of them. *fenced* is the time that an optimizer step waited for
captures. If the ranks have no plan yet, the caller waits only until the tensors that it will change are *copied*; the
other phases run in the background.

Phases of a load: *wanted* (list the tensors that the state needs), *planned* (compare with the checkpoint, on all
ranks), *read* (read, verify, copy into tensors), *finished* (restore objects), *agreed* (between ranks). *load* spans
all of them.

The engine's threads add spans for each part that they process. In a save: *capture* (copied into a block and digested),
*encode*, *write* (the device processes the requests). In a load: *read*, and *deliver* (verified and copied into
tensors). The engine records these spans, and returns them with its result (native/io/spans.h).
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
_ENGINE_PHASES = ("capture", "encode", "write", "read", "deliver")  # by the engine's numbers 0 to 4
_REQUESTS = ("write", "read")  # the device processes several at once, so they belong to no thread
_open_trace: ContextVar[Trace | None] = ContextVar("flowstone_trace", default=None)


@dataclass(frozen=True, slots=True)
class Span:
    """One phase of one save or load.

    begin, end  in seconds of the monotonic clock
    bytes       bytes moved in the span, or 0
    track       the thread, or another sequence of spans that do not overlap
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
    """The spans of one call of `save` or `load`. Any thread may add spans; they are stored only if a Trace is open."""

    __slots__ = ("_last", "_trace", "begin", "rank", "step", "verb")

    def __init__(self, verb: Verb, step: int, rank: int) -> None:
        """The call begins now; `lap` counts from here."""
        self.verb: Verb = verb
        self.step, self.rank = step, rank
        self.begin = self._last = time.monotonic()
        self._trace = _open_trace.get()

    def lap(self, phase: str, bytes_: int = 0) -> Span:
        """Record a span from the previous call of `lap`, or the beginning of the save or load, until now."""
        begin, self._last = self._last, time.monotonic()
        return self.between(phase, begin, self._last, bytes_)

    def since_begin(self, phase: str, bytes_: int = 0, *, track: str = "") -> Span:
        """Record the span from the beginning of the call until now."""
        return self.between(phase, self.begin, time.monotonic(), bytes_, track=track)

    def all_laps(self, phase: str) -> Span:
        """Record one span from the beginning of the save or load to the last call of `lap`."""
        return self.between(phase, self.begin, self._last)

    @contextmanager
    def phase(self, phase: str, bytes_: int = 0) -> Iterator[None]:
        """Record the `with` block as a span, even if it raises an exception."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.between(phase, begin, time.monotonic(), bytes_)

    def between(self, phase: str, begin: float, end: float, bytes_: int = 0, *, track: str = "") -> Span:
        """Record a span with a known begin and end."""
        span = Span(self.verb, phase, self.step, self.rank, begin, end, bytes_, track)
        if self._trace is not None:
            self._trace.add(span if track else replace(span, track=threading.current_thread().name))
        return span

    def since_call(self, span: Span) -> float:
        """Seconds from the beginning of the call to the end of a span."""
        return span.end - self.begin

    def add_engine_spans(self, jobs: Iterable[SpanColumns]) -> None:
        """Add the spans of the engine's threads for this call."""
        if self._trace is not None:
            for columns in jobs:
                self._trace.add_engine(self, columns)


class Trace:
    """Collects the spans of all saves and loads that this thread calls inside of the `with` block.

        with fs.Trace("trace.json"):
            ckpt.save(step, state)
            ckpt.wait()

    path  file to write when the block ends, in Chrome's trace format, which https://ui.perfetto.dev opens. Spans after
          the end of the block are missing: call `wait` in it. In a job of several ranks each rank needs its own path.
          None: no file
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
        """Add one span. Can be called on any thread."""
        self._spans.append(span)

    def add_engine(self, of: Spans, columns: SpanColumns) -> None:
        """Add the engine's spans for the save or load `of`. Can be called on any thread."""
        self._engine.append((of, columns))

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans so far, ordered by their begin. Of spans that begin together, the longest comes first."""
        engine = [span for of, columns in list(self._engine) for span in _engine_spans(of, columns)]
        return tuple(sorted([*self._spans, *engine], key=lambda span: (span.begin, -span.end)))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write all spans in Chrome's trace format. Raises StorageError."""
        text = json.dumps({"traceEvents": chrome_events(self.spans), "displayTimeUnit": "ms"})
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise StorageError(
                f"cannot write the trace {os.fspath(path)}", errno=error.errno or 0, reason=error.strerror,
                next="give a writable path",
            ) from error


def _engine_spans(of: Spans, columns: SpanColumns) -> Iterator[Span]:
    numbers: dict[int, int] = {}
    for number, begin, end, moved, thread in zip(*(column.tolist() for column in columns), strict=True):
        phase = _ENGINE_PHASES[number]
        thread_number = numbers.setdefault(thread, len(numbers))
        track = f"{phase} requests" if phase in _REQUESTS else f"engine {thread_number}"
        yield Span(of.verb, phase, of.step, of.rank, begin / 1e9, end / 1e9, moved, track)


def chrome_events(spans: Sequence[Span]) -> list[dict[str, object]]:
    """Events in Chrome's trace format: a process for each rank, and for each track as many lanes as needed."""
    events: list[dict[str, object]] = []
    lanes: dict[tuple[int, str], list[list[int]]] = {}  # (rank, track) -> the ends of the open spans in each lane
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
    """The number of the first lane in which this span does not overlap others: it lies inside them or follows them, as
    the viewer requires.
    """
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
