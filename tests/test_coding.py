"""Whether saves encode, with `compress="auto"`: what follows from what the last ones took."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from forge import content

import flowstone as fs
from flowstone import _native
from flowstone.config import MIB
from flowstone.format.manifest import IoRecord
from flowstone.pipeline.coding import Coding, Costs, compressed, costs_of, trial_s_per_byte
from flowstone.plan.write import Coded, WritePlan, plan_writes
from flowstone.store.base import Encoded, Receipt
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Piece, Pieces

WRITE, CAPTURE, ENCODE = (_native.PHASES.index(name) for name in ("write", "capture", "encode"))


def pieces(*dtypes: str) -> Pieces:
    """One of 8 MiB for each dtype."""
    shapes = [(8 * MIB // DTYPES[dtype].item_bytes,) for dtype in dtypes]
    return Pieces.of([
        Piece(f"{at}", DTYPES[dtype], shape, Box.whole(shape))
        for at, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True))
    ])


def receipt(
    plan: WritePlan, spans: Sequence[tuple[int, float, float]], stored: Sequence[float] = (), synced_s: float = 0.0
) -> Receipt:
    """Of a save with these spans (phase, begin and end in seconds). `stored`: the part of each piece that is."""
    columns = np.array(spans, np.float64).reshape(-1, 3)
    times = (columns[:, 1:] * 1e9).astype(np.int64)
    none = np.zeros(len(columns), np.uint64)
    found = columns[:, 0].astype(np.uint8), times[:, 0], times[:, 1], none, none.astype(np.uint32)
    encoded = None
    if stored:
        length = np.repeat([int(part * MIB) for part in stored], 8).astype(np.uint32)
        zeros = np.zeros(len(length), np.uint64)
        codec, same = (length < MIB).astype(np.uint8), np.zeros(len(length), np.bool_)
        encoded = Encoded(zeros, length, codec, same, zeros, np.zeros_like(same), [int(length.sum())])
    io = IoRecord("posix", 1, 8 * MIB, 4, plan.bytes, 0, workers=1)
    return Receipt(None, np.zeros(plan.chunks, np.uint64), io, encoded, [found], (10.0, 10.0 + synced_s))


def planned(coding: Coding, of: Pieces) -> WritePlan:
    coded = coding.chosen(of)
    return plan_writes(of, coded=Coded(() if coded is None else coded.tolist()))


def test_a_plan_that_is_made_in_the_background_keeps_chunks_in_the_same_budget() -> None:
    coding = Coding("max", kept_bytes=MIB)
    far = coding.from_afar()
    first, second = planned(coding, pieces("float32")), planned(coding, pieces("float32", "int64"))
    held = coding.kept_of(first)
    assert held is not None
    assert far.kept_of(first) is held
    other = far.kept_of(second)
    assert other is not None
    assert held.budget_bytes + other.budget_bytes == MIB
    assert coding.kept_of(second) is other


def test_off_encodes_nothing_and_max_everything_whatever_was_measured() -> None:
    of = pieces("float32", "int64")
    for mode, expected in (("off", None), ("max", [True, True])):
        coding = Coding(mode)  # type: ignore[arg-type]
        for seconds in (0.001, 100.0):
            found = coding.chosen(of)
            assert (None if found is None else found.tolist()) == expected
            coding.learn(1, planned(coding, of), receipt(planned(coding, of), [(WRITE, 0, seconds)]))


def test_a_slow_device_begins_it_and_a_fast_one_ends_it() -> None:
    coding, of = Coding("auto"), pieces("float32", "bfloat16", "int64")
    assert coding.chosen(of) is None, "nothing is known of the device yet"
    plan = planned(coding, of)
    coding.learn(1, plan, receipt(plan, [(CAPTURE, 0, 0.01), (WRITE, 0, 0.002)]))
    assert coding.chosen(of) is None, "the device waits for copies"
    coding.learn(1, plan, receipt(plan, [(CAPTURE, 0, 0.01), (WRITE, 0, 2.0)]))
    chosen = coding.chosen(of)
    assert chosen is not None
    assert chosen.tolist() == [True, True, False], "floats, until more is known"
    plan = planned(coding, of)
    spans = [(CAPTURE, 0, 0.01), (ENCODE, 0.01, 0.02), (WRITE, 0, 1.5)]
    coding.learn(1, plan, receipt(plan, spans, (0.99, 0.7, 1.0)))
    chosen = coding.chosen(of)
    assert chosen is not None
    assert chosen.tolist() == [False, True, False], "of the first nothing was gained"
    plan = planned(coding, of)
    coding.learn(1, plan, receipt(plan, [(CAPTURE, 0, 0.01), (ENCODE, 0.01, 0.4), (WRITE, 0, 0.1)], (1.0, 0.7, 1.0)))
    assert coding.chosen(of) is None, "processors are busy, and the device is not"


def test_a_little_gain_does_not_begin_it_but_keeps_it() -> None:
    costs = Costs(100, 100, 1.0, 0.1, 1)
    assert costs.gain(100, 20, 0.0) == pytest.approx(0.8)
    assert costs.gain(100, 20, 0.02) == pytest.approx(2.1), "encoding takes longer than writing"
    assert Costs(100, 100, 1.0, 0.1, 2).gain(100, 20, 0.01) == pytest.approx(0.8), "two threads share it"
    assert Costs(100, 80, 0.8, 0.1, 1).gain(100, 20, 0.0) == pytest.approx(0.8), "rates are of what was written"
    assert Costs(0, 0, 0.0, 0.0, 1).gain(0, 0, 0.0) == 1.0
    of = pieces("float32")
    for first, is_on in ((0.9, True), (0.86, True)):
        coding = Coding("auto")
        plan = planned(coding, of)
        coding.learn(1, plan, receipt(plan, [(WRITE, 0, 5.0)]))
        plan = planned(coding, of)
        coding.learn(1, plan, receipt(plan, [(ENCODE, 0, 0.001), (WRITE, 0, 5.0)], (first,)))
        assert (coding.chosen(of) is not None) == is_on


def test_costs_count_overlapping_requests_once_and_the_sync() -> None:
    plan = plan_writes(pieces("float32"))
    spans = [(WRITE, 1, 3), (WRITE, 2, 4), (WRITE, 6, 7), (CAPTURE, 0, 1), (CAPTURE, 0, 2)]
    found = costs_of(plan, receipt(plan, spans, synced_s=0.5))
    assert (found.device_s, found.copying_s, found.threads) == (pytest.approx(4.5), pytest.approx(3), 1)
    assert costs_of(plan, receipt(plan, [])).device_s == 0


def test_the_trial_tells_a_rate_of_this_machine() -> None:
    assert 1e-11 < trial_s_per_byte() < 1e-6


def test_the_event_tells_what_was_encoded_and_what_is_stored_of_it(tmp_path: Path) -> None:
    told: list[fs.Event] = []
    state = {"m": torch.randn(1 << 20), "small": torch.zeros(4)}
    with fs.Checkpointer(tmp_path, engine=fs.EngineOptions(compress="max"), on_event=told.append) as checkpointer:
        checkpointer.save(1, state)
    (found,) = (event for event in told if isinstance(event, fs.Compressed))
    assert found.data_bytes == 4 << 20
    assert 0.8 < found.stored_bytes / found.data_bytes < 0.9
    assert found.seconds > 0
    plan = plan_writes(pieces("float32"))
    assert compressed(1, plan, receipt(plan, [])) is None


def test_auto_saves_what_it_is_given_whichever_way_it_decides(tmp_path: Path) -> None:
    state = {"m": torch.randn(300_000), "n": 1}
    with fs.Checkpointer(tmp_path, engine=fs.EngineOptions(compress="auto")) as checkpointer:
        for step in (1, 2, 3):
            state["m"] += 1
            saved = checkpointer.save(step, state).committed.result()
            assert step > 1 or saved.manifest.critical == ()
        into = {"m": torch.zeros(300_000), "n": 0}
        checkpointer.load(into)
    assert content(into) == content(state)
