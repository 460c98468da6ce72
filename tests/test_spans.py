"""The spans of real saves and loads: they nest, cover the caller's waits, and agree with events."""

from __future__ import annotations

import json
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import flowstone as fs
from flowstone.coordination.save_coordinator import SaveCoordinator
from flowstone.store.local_io import LocalWriteHandle
from flowstone.trace import Span, Trace
from test_trace import check_nested

MIB = 1 << 20
LAPS = ("waited", "described", "planned", "begun", "encoded", "early")
LOAD_LAPS = ("wanted", "planned", "read", "finished", "agreed")
ENGINE = ("capture", "encode", "write", "read", "deliver")


def training() -> dict[str, object]:
    """Some of it is captured after `save` has returned, some before."""
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 500))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "table": np.arange(6 * MIB), "step": 7}


def by_phase(trace: Trace, verb: str) -> dict[str, Span]:
    """Of each phase in Python, its one span."""
    spans = [span for span in trace.spans if span.verb == verb and not is_engines(span)]
    result = {span.phase: span for span in spans}
    assert len(result) == len(spans)
    return result


def is_engines(span: Span) -> bool:
    return span.phase in ENGINE and (span.track.startswith("engine") or span.track.endswith("requests"))


def engines(trace: Trace, verb: str, phase: str) -> list[Span]:
    return [span for span in trace.spans if span.verb == verb and span.phase == phase and is_engines(span)]


def check_tiled(laps: list[Span], whole: Span) -> None:
    """One lap behind the other, without a gap, from the begin of the whole on."""
    assert laps[0].begin == whole.begin
    assert [span.end for span in laps[:-1]] == [span.begin for span in laps[1:]]
    assert laps[-1].end <= whole.end


def holds(outer: Span, inner: Span) -> bool:
    return outer.begin <= inner.begin and inner.end <= outer.end


class Asked:
    """Says when it was described."""

    at = 0.0

    def state_dict(self) -> dict[str, object]:
        self.at = time.monotonic()
        return {}

    def load_state_dict(self, tree: dict[str, object]) -> None: ...


def test_spans_of_a_save_nest_and_cover_what_the_caller_waits_for(tmp_path: Path) -> None:
    asked, wait_early, waited_until = Asked(), LocalWriteHandle.wait_early, []

    def waits(writing: LocalWriteHandle) -> object:
        try:
            return wait_early(writing)
        finally:
            waited_until.append(time.monotonic())

    state = training() | {"asked": asked}
    with fs.Checkpointer(tmp_path / "run") as ckpt, Trace(tmp_path / "trace.json") as trace:
        before = time.monotonic()
        with mock.patch.object(LocalWriteHandle, "wait_early", waits):
            ckpt.save(1, state)
        after = time.monotonic()
        ckpt.wait()
    save = by_phase(trace, "save")
    assert all(holds(save["save"], span) for span in trace.spans)
    assert {span.rank for span in trace.spans} == {0}
    assert {span.step for span in trace.spans} == {1}
    check_tiled([save[phase] for phase in LAPS], save["blocked"])
    assert save["early"].end == save["blocked"].end
    blocked = save["blocked"]
    assert before <= blocked.begin <= asked.at <= waited_until[0] <= blocked.end <= after
    assert save["waited"].end <= asked.at <= save["described"].end
    order = [save[phase].end for phase in ("captured", "written", "synced", "published", "save")]
    assert order == sorted(order)
    assert all(holds(save["captured"], span) for span in engines(trace, "save", "capture"))
    assert all(holds(save["written"], span) for span in engines(trace, "save", "write"))
    check_nested(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])


def test_bytes_of_a_save_add_up(tmp_path: Path) -> None:
    events: list[fs.Event] = []
    with fs.Checkpointer(tmp_path, on_event=events.append) as ckpt, Trace() as trace:
        ckpt.save(1, training())
        ckpt.wait()
    save = by_phase(trace, "save")
    (started,) = (event for event in events if isinstance(event, fs.SaveStarted))
    (written,) = (event for event in events if isinstance(event, fs.Written))
    (committed,) = (event for event in events if isinstance(event, fs.Committed))
    moved = sum(span.bytes for span in engines(trace, "save", "capture"))
    assert save["captured"].bytes == started.bytes
    assert save["written"].bytes == written.copied_bytes == moved
    assert moved <= sum(span.bytes for span in engines(trace, "save", "write")) <= committed.bytes == save["save"].bytes
    assert engines(trace, "save", "encode") == []  # identity is never asked


def test_events_of_a_save_say_what_its_spans_say(tmp_path: Path) -> None:
    events: list[fs.Event] = []
    state = training()
    with fs.Checkpointer(tmp_path, on_event=events.append) as ckpt, Trace() as trace:
        ckpt.save(1, state)
        ckpt.fence()
        ckpt.wait()
    save = by_phase(trace, "save")
    begin = save["save"].begin
    record = {type(event): event for event in events}
    started, captured = record[fs.SaveStarted], record[fs.Captured]
    assert isinstance(started, fs.SaveStarted)
    assert isinstance(captured, fs.Captured)
    assert (started.waited_s, started.described_s, started.planned_s) == tuple(
        save[phase].seconds for phase in ("waited", "described", "planned")
    )
    assert captured.blocked_s == save["blocked"].seconds
    assert captured.captured_s == save["captured"].end - begin
    seconds = {kind: getattr(event, "seconds", getattr(event, "waited_s", 0.0)) for kind, event in record.items()}
    assert seconds[fs.Written] == save["synced"].end - begin
    assert seconds[fs.Committed] == save["save"].seconds
    assert seconds.get(fs.Fenced, 0.0) == (save["fenced"].seconds if "fenced" in save else 0.0)


def test_spans_of_a_load_tile_it_and_its_bytes_add_up(tmp_path: Path) -> None:
    state, events = training(), list[fs.Event]()
    with fs.Checkpointer(tmp_path, on_event=events.append) as ckpt:
        ckpt.save(1, state)
        with Trace() as trace:
            report = ckpt.load(state)
    load = by_phase(trace, "load")
    check_tiled([load[phase] for phase in LOAD_LAPS], load["load"])
    assert report.seconds == load["load"].seconds
    assert [event.seconds for event in events if isinstance(event, fs.Loaded)] == [report.seconds]
    assert sum(span.bytes for span in engines(trace, "load", "deliver")) == report.bytes == load["read"].bytes
    assert sum(span.bytes for span in engines(trace, "load", "read")) >= report.bytes
    moves = [*engines(trace, "load", "read"), *engines(trace, "load", "deliver")]
    assert all(holds(load["read"], span) for span in moves)


def test_a_save_that_fails_has_its_span_too(tmp_path: Path) -> None:
    with (
        mock.patch.object(SaveCoordinator, "commit", side_effect=fs.StorageError("no")),
        fs.Checkpointer(tmp_path, on_error="continue") as ckpt, Trace() as trace,
        pytest.raises(fs.StorageError),
    ):
        ckpt.save(1, training()).committed.result()
    save = by_phase(trace, "save")
    assert holds(save["save"], save["published"])
    assert save["save"].bytes == 0
