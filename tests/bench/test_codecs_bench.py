"""bench.codecs: its states are what it says, and a process of it measures a save and a load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from bench.codec_states import CHUNK, change, mixed_of
from bench.codec_turns import turns
from bench.codecs import codecs, one_process


def test_a_changed_state_differs_in_each_chunk_and_is_still_of_mixed_precision() -> None:
    state = mixed_of(14 * CHUNK)
    before = {name: tensor.clone() for name, tensor in state.items()}
    change(state)
    for name, tensor in state.items():
        kind = torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32
        same = (tensor.view(kind) == before[name].view(kind)).numpy()
        width = tensor.element_size()
        assert not any(same[at : at + CHUNK // width].all() for at in range(0, len(same), CHUNK // width)), name
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
    found, others = turns(tmp_path, ["off:1", "derived:0"], total=4_000_000, saves=2, training=False)
    written = {way: [row[3] / 4_000_000 for row in rows] for way, rows in found.items()}
    assert all(share > 0.99 for share in written["off:1"]), "raw writes the working weights as well, each time"
    assert all(share < 0.9 for share in written["derived:0"])
    assert others > -1
    assert not list(tmp_path.iterdir())
