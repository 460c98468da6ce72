"""bench.codecs: its states are as documented, and its process measures a save and a load."""

from __future__ import annotations

import itertools
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import flowstone as fs
from bench import codec_states, fio
from bench.codec_states import CHUNK, change, mixed_of
from bench.codec_turns import options_of, turns
from bench.codecs import codecs, near_saves, one_process, successions
from bench.fio import MIB
from bench.records import FioSample
from flowstone_demo.sizes import Sizes

SIZES = Sizes(width=128, depth=2, heads=2, length=16, batch=2, corpus_bytes=1 << 16, steps=100, threads=1)


def test_a_changed_state_differs_in_each_chunk_and_is_still_of_mixed_precision() -> None:
    state = mixed_of(14 * CHUNK)
    before = {name: tensor.clone() for name, tensor in state.items()}
    change(state)
    for name, tensor in state.items():
        kind = torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32
        same = (tensor.view(kind) == before[name].view(kind)).numpy()
        width = tensor.element_size()
        assert not any(same[i : i + CHUNK // width].all() for i in range(0, len(same), CHUNK // width)), name
    assert torch.equal(state["0.weight"], state["0.master"].bfloat16())


def test_a_process_tells_what_a_save_and_a_cold_load_take_and_what_is_stored(tmp_path: Path) -> None:
    total = 4_000_000
    saving, loading, stored, used, step = one_process(tmp_path, "derived", total, 0.0, 3, training=False)
    assert 0 < saving < 60
    assert 0 < loading < 60
    assert 0.85 * total < stored < 0.95 * total, "12 of 14 bytes, an index and padding"
    assert used > 0
    assert step == 0
    assert not list(tmp_path.iterdir())


def test_the_codec_of_rates_gives_back_what_it_encodes() -> None:
    encode, decode = dict(codecs())["flowstone planes"]
    chunk = mixed_of(14 * CHUNK)["0.master"].numpy().view(np.uint8)[:CHUNK]
    stored = encode(chunk, 4)
    assert stored is not None
    assert len(stored) < CHUNK
    assert decode(stored, 4) == chunk.tobytes()


def test_ways_that_take_turns_are_all_measured(tmp_path: Path) -> None:
    actual, others = turns(tmp_path, ["off:1", "derived:0"], total=4_000_000, saves=2, training=False)
    written = {way: [row[3] / 4_000_000 for row in rows] for way, rows in actual.items()}
    assert all(share > 0.99 for share in written["off:1"]), "raw writes the working weights as well, each time"
    assert all(share < 0.9 for share in written["derived:0"])
    assert others > -1
    assert not list(tmp_path.iterdir())


def test_a_way_names_the_options_of_an_engine() -> None:
    assert options_of("off") == options_of("off:0") == fs.EngineOptions()
    assert options_of("auto:2") == fs.EngineOptions(compress="auto", workers=2)
    expected = fs.EngineOptions(compress="max", queue_depth=32, request_bytes=4 * MIB)
    assert options_of("max:0:32:4") == expected


@pytest.mark.skipif(not fio.is_installed(), reason="fio is not installed")
def test_fio_takes_its_turn_with_the_settings_that_were_the_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fio, "CANDIDATES", (fio.Setting(fio.PLAIN, MIB, 2), fio.Setting(fio.PLAIN, MIB, 8)))
    asked, write = list[fio.Setting](), fio.write
    best = fio.Setting(fio.PLAIN, MIB, 8)

    def noted(directory: Path, total: int, setting: fio.Setting) -> FioSample:
        asked.append(setting)
        return replace(write(directory, total, setting), seconds=1.0 if setting == best else 2.0)

    monkeypatch.setattr(fio, "write", noted)
    result, _ = turns(tmp_path, ["off:1", "fio"], total=4 * MIB, saves=3, training=False)
    assert [row[0] for row in result["fio"]] == [1.0] * 3, "seconds for as many bytes as the state has"
    assert [row[3] for row in result["fio"]] == [4 * MIB] * 3
    assert asked == [*fio.CANDIDATES * fio.PASSES, *[best] * 3]
    assert not list(tmp_path.iterdir())


def test_a_near_base_is_as_many_steps_before_as_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_states, "SIZES", SIZES)
    options = Namespace(steps=3, saves=4, distances=[1, 5], lr=1e-4)
    sizes = {}
    for distance, states, runs in successions(options):
        assert (len(states), runs) == (2, 2)
        assert not all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        torch.save(states, tmp_path / "states")
        seconds, written, used = near_saves(tmp_path, "max", 1 << 30, str(tmp_path / "states"), 0.0, runs)
        assert seconds > 0
        assert used > 0
        sizes[distance] = written
    assert sizes["1"] < sizes["5"]


def test_states_without_a_distance_are_a_step_after_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_states, "SIZES", SIZES)
    ((_, states, runs),) = successions(Namespace(steps=2, saves=3, distances=[], lr=None))
    assert (len(states), runs) == (3, 1)
    for first, other in itertools.pairwise(states):
        assert any(not torch.equal(first[name], other[name]) for name in first)
