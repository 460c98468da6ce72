"""Whether saves encode with `compress="auto"`: the decision follows from the times of the last saves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest
import torch

import flowstone as fs
from flowstone import _native
from flowstone.codecs.coding import EncodingChooser, compressed_event
from flowstone.codecs.coding_costs import Costs, measure_costs, new_bytes, trial_per_copy
from flowstone.config import MIB
from flowstone.coordination.messages import Assignment
from flowstone.format.manifest import IoRecord
from flowstone.plan.write import Derivations, PieceEncoding, WritePlan, plan_writes
from flowstone.store.base import EncodedChunks, Receipt
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Piece, Pieces
from forge import content

WRITE, CAPTURE, ENCODE = (_native.PHASES.index(name) for name in ("write", "capture", "encode"))


def pieces(*dtypes: str) -> Pieces:
    """One of 8 MiB for each dtype."""
    shapes = [(8 * MIB // DTYPES[dtype].item_bytes,) for dtype in dtypes]
    return Pieces.of([
        Piece(f"{index}", DTYPES[dtype], shape, Box.whole(shape))
        for index, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True))
    ])


def receipt(
    plan: WritePlan, spans: Sequence[tuple[int, float, float]], stored: Sequence[float] = (), synced_s: float = 0.0
) -> Receipt:
    """Of a save with these spans (phase, begin and end in seconds). `stored`: the part of each piece that is."""
    columns = np.array(spans, np.float64).reshape(-1, 3)
    times = (columns[:, 1:] * 1e9).astype(np.int64)
    none = np.zeros(len(columns), np.uint64)
    result = columns[:, 0].astype(np.uint8), times[:, 0], times[:, 1], none, none.astype(np.uint32)
    encoded = None
    if stored:
        length = np.repeat([int(part * MIB) for part in stored], 8).astype(np.uint32)
        zeros = np.zeros(len(length), np.uint64)
        codec, same = (length < MIB).astype(np.uint8), np.zeros(len(length), np.bool_)
        encoded = EncodedChunks(zeros, length, codec, same, zeros, np.zeros_like(same), [int(length.sum())])
    io = IoRecord("posix", 1, 8 * MIB, 4, plan.bytes, 0, workers=1)
    return Receipt(None, np.zeros(plan.chunks, np.uint64), io, encoded, [result], (10.0, 10.0 + synced_s))


def planned(coding: EncodingChooser, of: Pieces) -> WritePlan:
    coded = coding.chosen_pieces(of)
    return plan_writes(of, encoding=PieceEncoding(() if coded is None else coded.tolist()))


def test_a_plan_that_is_made_in_the_background_keeps_chunks_in_the_same_budget() -> None:
    coding = EncodingChooser("max", kept_bytes=MIB)
    far = coding.without_memory_access()
    first, second = planned(coding, pieces("float32")), planned(coding, pieces("float32", "int64"))
    held = coding.previous_chunks(first)
    assert held is not None
    assert far.previous_chunks(first) is held
    other = far.previous_chunks(second)
    assert other is not None
    assert held.budget_bytes + other.budget_bytes == MIB
    assert coding.previous_chunks(second) is other


def test_off_encodes_nothing_and_max_everything_whatever_was_measured() -> None:
    of = pieces("float32", "int64")
    for mode, expected in (("off", None), ("max", [True, True])):
        coding = EncodingChooser(mode)  # type: ignore[arg-type]
        for seconds in (0.001, 100.0):
            chosen = coding.chosen_pieces(of)
            assert (None if chosen is None else chosen.tolist()) == expected
            coding.learn_from_save(1, planned(coding, of), receipt(planned(coding, of), [(WRITE, 0, seconds)]))


def test_a_slow_device_begins_it_and_a_fast_one_ends_it() -> None:
    coding, of = EncodingChooser("auto"), pieces("float32", "bfloat16", "int64")
    assert coding.chosen_pieces(of) is None, "nothing is known of the device yet"
    plan = planned(coding, of)
    assert coding.why == "auto: no save has been measured yet"
    coding._coder_per_copy = 1.0
    coding.learn_from_save(1, plan, receipt(plan, [(CAPTURE, 0, 0.01), (WRITE, 0, 0.002)]))
    assert coding.chosen_pieces(of) is None, "the device waits for copies"
    message = "auto: the device takes 12.6 GB/s, the engine's threads copy 2.5 GB/s and encode 2.5 GB/s"
    assert coding.why == f"{message}: with tensors encoded, a save would take 133% of the time without encoding"
    coding.learn_from_save(1, plan, receipt(plan, [(CAPTURE, 0, 0.01), (WRITE, 0, 2.0)]))
    chosen = coding.chosen_pieces(of)
    assert chosen is not None
    assert chosen.tolist() == [True, True, False], "floats, until more is known"
    assert ": with 2 of 2 tensors encoded, a save takes 85% of the time" in coding.why
    plan = planned(coding, of)
    spans = [(CAPTURE, 0, 0.01), (ENCODE, 0.01, 0.02), (WRITE, 0, 1.5)]
    coding.learn_from_save(1, plan, receipt(plan, spans, (0.99, 0.7, 1.0)))
    chosen = coding.chosen_pieces(of)
    assert chosen is not None
    assert chosen.tolist() == [False, True, False], "of the first nothing was gained"
    plan = planned(coding, of)
    coding.learn_from_save(
        1, plan, receipt(plan, [(CAPTURE, 0, 0.01), (ENCODE, 0.01, 0.4), (WRITE, 0, 0.1)], (1.0, 0.7, 1.0))
    )
    assert coding.chosen_pieces(of) is None, "processors are busy, and the device is not"


def gain(costs: Costs, saved_bytes: float, coder_s_per_byte: float) -> float:
    """Of encoding 100 bytes."""
    return float(costs.gain(np.array([100.0]), np.array([saved_bytes]), coder_s_per_byte)[0])


def test_a_little_gain_does_not_begin_it_but_keeps_it() -> None:
    costs = Costs(100, 100, 1.0, 0.1, 1)
    assert gain(costs, 20, 0.0) == pytest.approx(0.8)
    assert gain(costs, 20, 0.02) == pytest.approx(2.1), "encoding takes longer than writing"
    assert gain(Costs(100, 100, 1.0, 0.1, 2), 20, 0.01) == pytest.approx(0.8), "two threads share it"
    assert gain(Costs(100, 80, 0.8, 0.1, 1), 20, 0.0) == pytest.approx(0.8), "rates are of what was written"
    assert gain(Costs(0, 0, 0.0, 0.0, 1), 0, 0.0) == 1.0
    of = pieces("float32")
    for first, is_on in ((0.9, True), (0.86, True)):
        coding = EncodingChooser("auto")
        plan = planned(coding, of)
        coding.learn_from_save(1, plan, receipt(plan, [(WRITE, 0, 5.0)]))
        plan = planned(coding, of)
        coding.learn_from_save(1, plan, receipt(plan, [(ENCODE, 0, 0.001), (WRITE, 0, 5.0)], (first,)))
        assert (coding.chosen_pieces(of) is not None) == is_on


def test_costs_count_overlapping_requests_once_and_the_sync() -> None:
    plan = plan_writes(pieces("float32"))
    spans = [(WRITE, 1, 3), (WRITE, 2, 4), (WRITE, 6, 7), (CAPTURE, 0, 1), (CAPTURE, 0, 2)]
    actual = measure_costs(plan, receipt(plan, spans, synced_s=0.5))
    assert (actual.device_s, actual.copying_s, actual.threads) == (pytest.approx(4.5), pytest.approx(3), 1)
    assert measure_costs(plan, receipt(plan, [])).device_s == 0


def test_as_many_pieces_are_encoded_as_leave_the_device_the_slowest() -> None:
    """Those first that get shortest. All of them would take 0.04 + 4 * 0.05 s of a thread."""
    coding, of = EncodingChooser("auto"), pieces("float32", "bfloat16", "float32", "bfloat16")
    coding._coder_per_copy = 5.0
    plan = planned(coding, of)
    coding.learn_from_save(1, plan, receipt(plan, [(CAPTURE, 0, 0.04), (WRITE, 0, 0.2)]))
    chosen = coding.chosen_pieces(of)
    assert chosen is not None
    assert chosen.tolist() == [False, True, False, True]
    assert "with 2 of 4 tensors encoded, a save takes 85% of the time" in coding.why


def test_processors_that_are_free_again_are_noticed_though_nothing_is_encoded() -> None:
    """What encoding takes is known as a multiple of what copying takes, which every save tells."""
    coding, of = EncodingChooser("auto"), pieces("float32")
    coding._coder_per_copy = 2.0
    for copying_s, is_on in ((0.2, False), (0.01, True)):
        plan = planned(coding, of)
        coding.learn_from_save(1, plan, receipt(plan, [(CAPTURE, 0, copying_s), (WRITE, 0, 0.2)]))
        assert (coding.chosen_pieces(of) is not None) == is_on


def test_what_follows_from_others_is_stored_while_threads_are_busy() -> None:
    """Beside training they copy most of the time. One save alone decides nothing."""
    coding, of = EncodingChooser("auto"), pieces("float32", "bfloat16")
    follows = Derivations(np.array([0, 1], np.uint8), np.zeros(2, np.int64))
    assignment = cast(Assignment, None)  # of pieces that were looked at before
    coding._deriving._last = of, follows
    for copying_s, derives in (
        (0.7, True), (0.3, True), (0.7, True), (0.55, True), (0.7, True), (0.8, False),
        (0.55, False), (0.4, False), (0.3, True),
    ):
        plan = planned(coding, of)
        coding.learn_from_save(1, plan, receipt(plan, [(CAPTURE, 0, copying_s), (WRITE, 0, 1.0)]))
        assert (coding.derivations_of(of, assignment, ()) is follows) == derives, copying_s
        assert ("derived tensors are stored in full" in coding.why) != derives


def test_what_the_base_has_and_what_follows_from_others_gains_nothing() -> None:
    coding, of = EncodingChooser("auto"), pieces("float32", "float32")
    plan = planned(EncodingChooser("max"), of)
    reported = receipt(plan, [(CAPTURE, 0, 0.01), (ENCODE, 0, 0.01), (WRITE, 0, 1.0)], (0.8, 0.8))
    assert reported.encoded is not None
    same = np.arange(16) < 8
    reported = msgspec.structs.replace(reported, encoded=msgspec.structs.replace(reported.encoded, same=same))
    assert new_bytes(plan, reported).tolist() == [0, 8 * MIB]
    assert measure_costs(plan, reported).data_bytes == 8 * MIB
    coding.learn_from_save(1, plan, reported)
    chosen = coding.chosen_pieces(of)
    assert chosen is not None
    assert chosen.tolist() == [False, True]


def test_the_trial_tells_how_many_times_as_long_as_copying_encoding_takes() -> None:
    assert 0.1 < trial_per_copy() < 1000


def test_the_event_tells_what_was_encoded_and_what_is_stored_of_it(tmp_path: Path) -> None:
    events: list[fs.Event] = []
    noise = torch.randint(256, (1 << 20, 4), dtype=torch.uint8)  # as floats, for which no codec has a shorter form
    state = {"m": torch.randn(1 << 20), "noise": noise.view(torch.float32), "small": torch.zeros(4)}
    with fs.Checkpointer(tmp_path, engine=fs.EngineOptions(compress="max"), on_event=events.append) as checkpointer:
        checkpointer.save(1, state)
    (actual,) = (event for event in events if isinstance(event, fs.Compressed))
    assert (actual.why, fs.open(tmp_path).manifest.io.compress) == ("max", "max")
    assert actual.data_bytes == 8 << 20
    assert actual.codecs.keys() == {"planes", "raw"}
    assert actual.codecs["raw"] == (4 << 20, 4 << 20)
    data, stored = actual.codecs["planes"]
    assert data == 4 << 20
    assert 0.8 < stored / data < 0.9
    assert actual.stored_bytes == stored + (4 << 20)
    assert actual.seconds > 0
    plan = plan_writes(pieces("float32"))
    assert compressed_event(1, plan, receipt(plan, []), "why") == fs.Compressed(1, 0, 0, 0.0, "why")


def test_auto_saves_what_it_is_given_whichever_way_it_decides(tmp_path: Path) -> None:
    state, event = {"m": torch.randn(300_000), "n": 1}, list[fs.Event]()
    engine = fs.EngineOptions(compress="auto")
    with fs.Checkpointer(tmp_path, engine=engine, on_event=event.append) as checkpointer:
        for step in (1, 2, 3):
            state["m"] += 1
            saved = checkpointer.save(step, state).committed.result()
            assert step > 1 or saved.manifest.critical == ()
            assert (saved.manifest.io.compress == "auto: no save has been measured yet") == (step == 1)
            assert [event.why for event in event if isinstance(event, fs.Compressed)][-1] == saved.manifest.io.compress
        into = {"m": torch.zeros(300_000), "n": 0}
        checkpointer.load(into)
    assert content(into) == content(state)


def test_a_save_is_committed_though_nothing_can_be_learnt_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no lesson")

    monkeypatch.setattr(EncodingChooser, "learn_from_save", fail)
    with fs.Checkpointer(tmp_path / "run", engine=fs.EngineOptions(compress="auto")) as checkpointer:
        for step in (1, 2):
            assert checkpointer.save(step, {"a": torch.ones(1000) * step}).committed.result(60).step == step
    assert fs.open(tmp_path / "run").verify().sound
    assert "no lesson" in caplog.text
