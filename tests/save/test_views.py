"""States with views of one memory: saved, and loaded into the same views, or refused with both names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import flowstone as fs
from flowstone.adapters.dcp import FlowstoneReader, FlowstoneWriter
from forge import content

State = dict[str, object]


class Half(nn.Module):
    """A layer with a buffer over the first rows of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("part", self.layer.weight.data[:4])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


def turned() -> State:
    base = torch.randn(40, 40)
    return {"base": base, "t": base.t(), "view": base[10:20], "steps": base[::3, 1::2]}


def flat() -> State:
    """As FSDP1 and fused optimizers have it."""
    flat = torch.randn(100)
    return {"a": flat[:60].view(6, 10), "flat": flat, "b": flat[60:]}


def types() -> State:
    floats = torch.randn(64)
    return {"floats": floats, "integers": floats.view(torch.int32), "bytes": floats.view(torch.uint8)[3:77]}


def imaginary() -> State:
    z = torch.randn(6, 6, dtype=torch.complex64)
    return {"conj": z.conj(), "z": z, "t": z.mH, "neg": z.conj().imag, "real": z.real}


def expanded() -> State:
    base = torch.randn(64)
    entry = torch.randn(1).expand(9)
    return {"rows": base[:3].expand(5, 3), "base": base, "windows": base.unfold(0, 4, 2), "one": entry}


def conjugate_rows() -> State:
    """Conjugate and negative views of which several elements are one in memory."""
    z, entry = torch.randn(8, dtype=torch.complex64), torch.randn(1, dtype=torch.complex128)
    rows = z[:4].expand(3, 4).conj()
    return {"rows": rows, "z": z, "windows": z.unfold(0, 3, 2).conj(), "neg": rows.imag, "one": entry.expand(5).conj()}


def arrays() -> State:
    base = np.random.default_rng(torch.initial_seed()).random((4, 6))
    return {"base": base, "backwards": base[::-1], "t": base.T, "row": base[1], "torch": torch.from_numpy(base)[2:]}


def read_only_views() -> State:
    """Arrays that cannot be written, and share memory that can."""
    base = np.random.default_rng(torch.initial_seed()).random((4, 6))
    views = {"rows": np.broadcast_to(base[0], (3, 6)), "backwards": base[::-1], "tail": base[2:]}
    for view in views.values():
        view.setflags(write=False)
    return {"base": base, **views}


def buffer() -> State:
    model = Half()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), 0.1)}


def sections() -> State:
    model = Half()
    return {"weight": model.layer.weight.data.view(-1)[3:20], "model": {"inner": [model]}, "t": model.part.t()}


def moments() -> State:
    """Slots that are slices of one flat tensor, which is saved, too."""
    state = buffer()
    train(state)
    optimizer = state["optimizer"]
    assert isinstance(optimizer, torch.optim.Optimizer)
    fused = torch.zeros(64 + 8)
    for part, slots in zip((fused[:64].view(8, 8), fused[64:]), optimizer.state.values(), strict=True):
        part.copy_(slots["exp_avg"])
        slots["exp_avg"] = part
    return {**state, "fused": fused}


def train(state: State) -> None:
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, Half)
    assert isinstance(optimizer, torch.optim.Optimizer)
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


MAKES = [
    turned, flat, types, imaginary, expanded, conjugate_rows, arrays, read_only_views, buffer, sections, moments,
]


@pytest.mark.parametrize("verify_first", [False, True])
@pytest.mark.parametrize("make", MAKES)
def test_a_state_with_views_is_loaded_as_it_was_saved(
    store: Path, make: Callable[[], State], verify_first: bool
) -> None:
    torch.manual_seed(1)
    state = make()
    expected = content(state)
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, state).committed.result()
    torch.manual_seed(2)
    fresh = make()
    assert content(fresh) != expected
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.load(fresh, verify_first=verify_first)
        assert content(fresh) == expected
        checkpointer.save(2, fresh).committed.result()


@pytest.mark.parametrize(("make", "first", "second"), [
    (turned, "base", "view"), (flat, "flat", "b"), (types, "floats", "bytes"), (imaginary, "z", "conj"),
    (imaginary, "z", "neg"), (expanded, "base", "rows"), (arrays, "base", "backwards"), (arrays, "base", "torch"),
    (conjugate_rows, "z", "windows"), (read_only_views, "base", "backwards"),
])
def test_views_for_which_other_values_are_stored_are_refused_before_anything_changes(
    store: Path, make: Callable[[], State], first: str, second: str
) -> None:
    torch.manual_seed(1)
    apart = {
        name: value.clone() if isinstance(value, torch.Tensor) else np.array(value) for name, value in make().items()
    }
    changed = apart[second]
    changed.reshape(-1)[-1:] += 1  # type: ignore[union-attr]
    torch.manual_seed(2)
    fresh = make()
    before = content(fresh)
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, apart).committed.result()
        with pytest.raises(fs.MismatchError, match="differ in the checkpoint") as caught:
            checkpointer.load(fresh)
        assert any(second in line for line in caught.value.differences)
        assert fs.explain(fs.open(store), fresh).differences == caught.value.differences
        assert content(fresh) == before
        checkpointer.save(2, fresh).committed.result()  # nothing was changed, so nothing forbids it


def test_elements_that_share_memory_and_are_stored_with_several_values_are_refused(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"rows": torch.arange(6.0).view(2, 3)}).committed.result()
        with pytest.raises(fs.MismatchError, match="rows: its elements share memory, but their stored values differ"):
            checkpointer.load({"rows": torch.zeros(3).expand(2, 3)})
        checkpointer.save(2, {"rows": torch.arange(6.0).view(2, 3).to(torch.complex64)}).committed.result()
        with pytest.raises(fs.MismatchError, match="rows: its elements share memory, but their stored values differ"):
            checkpointer.load({"rows": torch.zeros(3, dtype=torch.complex64).expand(2, 3).conj()})


def test_views_that_are_stored_apart_are_compared_after_a_cast_and_after_rules(store: Path) -> None:
    base = torch.randn(6, 4, dtype=torch.float64).float().double()
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"model": {"whole": base, "rows": base[2:4].clone()}}).committed.result()
        single = torch.zeros(6, 4)
        checkpointer.load({"model": {"whole": single, "rows": single[2:4]}}, rules=fs.Cast("*"))
        assert torch.equal(single, base.float())
        swapped = torch.zeros(4, 6, dtype=torch.float64)
        rules = [fs.Transpose("model.whole"), fs.Transpose("model.rows")]
        checkpointer.load({"model": {"whole": swapped, "rows": swapped[:, 2:4]}}, rules=rules)
        assert torch.equal(swapped, base.t())
        with pytest.raises(fs.MismatchError, match="shares memory"):
            checkpointer.load({"model": {"whole": swapped, "rows": swapped[:, 1:3]}}, rules=rules)


def test_a_damaged_view_is_damage_and_nothing_was_changed(store: Path) -> None:
    state = turned()
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, state).committed.result()
        segment = next((store / "step-00000001").glob("rank-*"))
        raw = bytearray(segment.read_bytes())
        raw[-4096 - 40 * 40 * 2] ^= 1
        segment.write_bytes(raw)
        fresh = turned()
        before = content(fresh)
        with pytest.raises(fs.DamagedError) as caught:
            checkpointer.load(fresh)
        assert caught.value.written == ()
        assert content(fresh) == before


def test_state_dicts_with_views_are_loaded(store: Path) -> None:
    torch.manual_seed(1)
    state = buffer()
    train(state)
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save_state_dict(1, {name: one.state_dict() for name, one in state.items()})  # type: ignore[attr-defined]
    fresh = buffer()
    train(fresh)
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.load_state_dict({name: m.state_dict() for name, m in fresh.items()})  # type: ignore[attr-defined]
    assert content(fresh["model"]) == content(state["model"])


def test_dcp_loads_views_that_agree_and_refuses_others(store: Path) -> None:
    base, fresh = torch.randn(20, 20), torch.zeros(20, 20)
    views = {"base": base, "t": base.t(), "rows": base[3:7].view(-1)}
    dcp.save(views, storage_writer=FlowstoneWriter(store / "one"), no_dist=True)
    target = {"base": fresh, "t": fresh.t(), "rows": fresh[3:7].view(-1)}
    dcp.load(target, storage_reader=FlowstoneReader(store / "one"), no_dist=True)
    assert torch.equal(fresh, base)
    dcp.save({**views, "rows": base[3:7].reshape(-1) + 1}, storage_writer=FlowstoneWriter(store / "two"), no_dist=True)
    fresh.zero_()
    with pytest.raises(CheckpointException, match="rows: shares memory with base, but their stored values differ"):
        dcp.load(target, storage_reader=FlowstoneReader(store / "two"), no_dist=True)
    assert not fresh.any()


def test_a_journal_replays_states_with_views(store: Path) -> None:
    def make() -> State:
        state = buffer()
        model = state["model"]
        assert isinstance(model, Half)
        return {**state, "weight": model.layer.weight.data.view(-1)[3:20], "count": torch.zeros(4).expand(3, 4)}

    torch.manual_seed(1)
    state = make()
    with fs.Checkpointer(store, every_step=True) as checkpointer:
        for step in range(1, 6):
            train(state)
            state["count"][0] += 1  # type: ignore[index]
            checkpointer.save(step, state).committed.result()
    fresh = make()
    with fs.Checkpointer(store, every_step=True) as checkpointer:
        assert checkpointer.load(fresh).step == 5
    assert content(fresh) == content(state)


def test_views_that_a_rule_would_round_apart_are_refused_at_save(store: Path) -> None:
    base = torch.randn(512, 512)
    with fs.Checkpointer(store, rules=fs.Quantize("base")) as checkpointer:
        with pytest.raises(fs.UnsupportedStateError, match="rounds 'base', which shares memory with 't'"):
            checkpointer.save(1, {"base": base, "t": base.t()})
        columns = torch.randn(512, 1024)
        checkpointer.save(1, {"base": columns[:, :512], "other": columns[:, 512:]}).committed.result()
