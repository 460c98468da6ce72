"""Spans: kept while a trace is open, nested, and written in Chrome's trace format."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flowstone as fs
from flowstone import _native
from flowstone import trace as tracing
from flowstone.trace import Span, Spans, Trace, chrome_events


def columns(*rows: tuple[int, int, int, int, int]) -> _native.SpanColumns:
    phase, begin, end, moved, thread = map(list, zip(*rows, strict=True))
    return (
        np.array(phase, np.uint8), np.array(begin, np.int64), np.array(end, np.int64), np.array(moved, np.uint64),
        np.array(thread, np.uint32),
    )


def check_nested(events: list[dict[str, Any]]) -> None:
    """In one lane each event ends before the next begins, or holds it."""
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((round(event["ts"] * 1e3), round(event["dur"] * 1e3)))
    assert lanes
    for lane in lanes.values():
        open_ends: list[int] = []
        for begin, duration in sorted(lane, key=lambda value: (value[0], -value[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or begin + duration <= open_ends[-1]
            open_ends.append(begin + duration)


def test_the_engine_and_python_name_phases_alike() -> None:
    assert tuple(_native.PHASES) == tracing._ENGINE_PHASES


def test_laps_tile_the_time_since_the_call() -> None:
    spans = Spans("save", 3, 0)
    laps = [spans.lap("described"), spans.lap("planned"), spans.lap("begun")]
    assert laps[0].begin == spans.begin
    assert [lap.end for lap in laps[:-1]] == [lap.begin for lap in laps[1:]]
    whole = spans.since_begin("blocked")
    assert whole.begin == spans.begin
    assert whole.end >= laps[-1].end
    assert spans.since_call(laps[-1]) == laps[-1].end - spans.begin


def test_spans_are_kept_where_a_trace_was_open_when_the_call_began() -> None:
    Spans("save", 1, 0).lap("described")
    with Trace() as trace:
        inside = Spans("save", 2, 1)
        inside.lap("described")
    inside.lap("planned")
    Spans("save", 3, 0).lap("described")
    assert [(span.step, span.rank, span.phase) for span in trace.spans] == [(2, 1, "described"), (2, 1, "planned")]


def test_a_trace_inside_of_a_trace_has_its_own_spans() -> None:
    with Trace() as outer:
        with Trace() as inner:
            Spans("load", 1, 0).lap("wanted")
        Spans("load", 2, 0).lap("wanted")
    assert [span.step for span in inner.spans] == [1]
    assert [span.step for span in outer.spans] == [2]


def test_a_phase_that_fails_has_its_span() -> None:
    with Trace() as trace:
        spans = Spans("load", 1, 0)
        with pytest.raises(KeyError), spans.phase("read", 7):
            raise KeyError
    assert [(span.phase, span.bytes) for span in trace.spans] == [("read", 7)]


def test_what_another_thread_calls_is_not_in_the_trace() -> None:
    with Trace() as trace:
        thread = threading.Thread(target=lambda: Spans("save", 1, 0).lap("described"))
        thread.start()
        thread.join()
    assert trace.spans == ()


def test_windows_of_the_engine_become_spans_of_their_threads() -> None:
    with Trace() as trace:
        Spans("save", 5, 2).add_engine_spans([columns((0, 10, 20, 8, 77), (2, 20, 90, 9, 78), (0, 12, 30, 7, 78))])
    assert trace.spans == (
        Span("save", "capture", 5, 2, 10 / 1e9, 20 / 1e9, 8, "engine 0"),
        Span("save", "capture", 5, 2, 12 / 1e9, 30 / 1e9, 7, "engine 1"),
        Span("save", "write", 5, 2, 20 / 1e9, 90 / 1e9, 9, "write requests"),
    )


def test_what_overlaps_is_drawn_in_lanes_of_its_own() -> None:
    times = [(0, 10), (2, 5), (5, 9), (4, 12), (11, 13), (1, 20), (3, 25)]
    spans = [Span("save", "write", 1, 0, begin * 1e-6, end * 1e-6, track="write requests") for begin, end in times]
    events = chrome_events(spans)
    check_nested(events)
    assert sum(event["ph"] == "X" for event in events) == len(times)
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]  # type: ignore[index]
    assert names == ["write requests", "write requests (2)", "write requests (3)"]


def test_a_trace_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(fs.StorageError, match="cannot write the trace"), Trace(tmp_path / "missing" / "trace.json"):
        pass
    with pytest.raises(ZeroDivisionError), Trace(tmp_path / "missing" / "trace.json"):
        _ = 1 // 0


def test_the_file_is_chromes_trace_format(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Trace(path):
        spans = Spans("save", 1, 3)
        spans.lap("described")
        spans.since_begin("save", 12)
    document = json.loads(path.read_text())
    kinds = {event["ph"] for event in document["traceEvents"]}
    assert kinds == {"X", "M"}
    complete = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"} == set(complete[0])
    assert {event["pid"] for event in complete} == {3}
    assert complete[0]["name"] == "save"
    assert complete[0]["args"] == {"step": 1, "bytes": 12}
    check_nested(document["traceEvents"])
