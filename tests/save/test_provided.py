"""Providers end to end: through a store and back, and the effect of a failing provider on a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

import flowstone as fs
from flowstone.cli import app
from flowstone.events.phases import Event, SaveStarted
from flowstone.save.pacing import Captures
from flowstone.store.base import Pace
from golden.make_provided import Reel, ReelProvider
from quantised import Momentum8, Net, RowInt8


def reel(lasts: int = 4) -> Reel:
    made = Reel([20_000, 5], lasts)
    for salt, block in enumerate(made.blocks):
        block[...] = np.arange(block.size).reshape(block.shape) % 1000 + salt
    made.lasts[...] = np.arange(lasts)
    made.at = {"frame": 3}
    return made


def test_a_state_of_everything_survives_a_store(store: Path) -> None:
    model, target = Net(0), Net(1)
    optimizer, fresh = (Momentum8(p for p in net.parameters() if p.requires_grad) for net in (model, target))
    model(torch.randn(8, 6)).square().mean().backward()
    optimizer.step()
    source, other = reel(), Reel([7, 20_000 - 2], 1)
    with (
        fs.register_provider(Reel, ReelProvider()), fs.register_provider(RowInt8, fs.SplitTensor(RowInt8)),
        fs.Checkpointer(store) as checkpointer,
    ):
        checkpointer.save(1, {"model": model, "optimizer": optimizer, "reel": source}).committed.result()
        report = checkpointer.load({"model": target, "optimizer": fresh, "reel": other})
    assert "reel.frames" in report.matched
    assert np.array_equal(np.concatenate(other.blocks), np.concatenate(source.blocks))
    assert np.array_equal(other.lasts, source.lasts)
    assert other.at == source.at
    assert torch.equal(target.base.weight.codes, model.base.weight.codes)
    assert torch.equal(
        fresh.state[target.head.weight]["momentum"].codes, optimizer.state[model.head.weight]["momentum"].codes
    )
    fs.open(store).verify()


def test_any_safetensors_reader_finds_the_parts_by_name(store: Path) -> None:
    source, weight = reel(), RowInt8.of(torch.randn(4, 3))
    with fs.register_provider(Reel, ReelProvider()), fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"reel": [source], "w": weight})
    with safe_open(store / "step-00000001/rank-00000.safetensors", "np") as file:
        names = [name for name in file.keys() if not name.startswith("__pad__")]  # noqa: SIM118
        assert sorted(names) == [
            "reel.0.frames[0:20000,0:3]", "reel.0.frames[20000:20005,0:3]", "reel.0.lasts", "w.codes", "w.scale",
        ]
        assert np.array_equal(file.get_tensor("w.codes"), weight.codes.numpy())
    checkpoint = fs.open(store)  # where no provider is
    box = fs.Box((19_999, 0), (3, 3))
    rows = np.concatenate(source.blocks)[19_999:20_002]
    assert np.array_equal(checkpoint.read("reel.0.frames", box, framework="numpy"), rows)
    assert checkpoint.objects["reel"][0].objects == {"at": {"frame": 3}, "rate": 24}  # type: ignore[index]


def test_show_tells_what_providers_said(store: Path) -> None:
    with fs.register_provider(Reel, ReelProvider()), fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"reel": reel()})
    shown = json.loads(CliRunner().invoke(app, ["show", str(store), "--json"]).stdout)["objects"]["reel"]
    assert shown == {
        "provided": "reel", "parts": {"frames": "reel.frames", "lasts": "reel.lasts"},
        "objects": {"at": {"frame": 3}, "rate": 24},
    }
    assert "reel: frames, lasts, at, rate" in CliRunner().invoke(app, ["show", str(store)]).stdout


class Probe(ReelProvider):
    """A provider that lets a test look on when its small objects are asked for."""

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look

    def chunks(self, value: Reel) -> Iterable[object]:
        yield from value.blocks
        yield value.lasts
        self._look()
        yield value.at
        yield value.rate


def test_small_objects_are_made_while_bytes_already_move(store: Path) -> None:
    seen: list[list[str]] = []
    probe = Probe(lambda: seen.append([path.name for path in store.glob(".saving-*/*")]))
    with fs.register_provider(Reel, probe), fs.Checkpointer(store) as checkpointer:
        save = checkpointer.save(1, {"reel": reel()})
        assert seen == [["rank-00000.safetensors"]], "the segment is being written, and save() has not returned"
        save.committed.result()


def fails() -> None:
    raise KeyError("inner")


def test_a_provider_that_fails_in_the_middle_leaves_the_save_before_it_newest(store: Path) -> None:
    source = reel()
    with fs.Checkpointer(store) as checkpointer:
        with fs.register_provider(Reel, ReelProvider()):
            checkpointer.save(1, {"reel": source}).committed.result()
        with fs.register_provider(Reel, Probe(fails)), pytest.raises(fs.ProviderError, match="'reel'") as caught:
            checkpointer.save(2, {"reel": source})
        assert "test_provided.Probe" in str(caught.value)
        assert isinstance(caught.value.__cause__, KeyError)
        assert [path.name for path in store.glob(".saving-*")] == []
        assert fs.open(store).step == 1
        with fs.register_provider(Reel, ReelProvider()):
            checkpointer.save(2, {"reel": source}).committed.result()
    assert fs.open(store).step == 2


class Gap(ReelProvider):
    """Describes a tensor whose end no rank holds."""

    def describe(self, value: Reel) -> Sequence[fs.Part | fs.ObjectPart]:
        first, *_ = super().describe(value)
        return [first]  # type: ignore[list-item]

    def chunks(self, value: Reel) -> Iterable[object]:
        return value.blocks[:1]


def test_boxes_that_leave_a_hole_are_refused_by_name(store: Path) -> None:
    wrong = pytest.raises(fs.CoverageError, match=r"reel\.frames")
    with fs.register_provider(Reel, Gap()), fs.Checkpointer(store) as checkpointer, wrong:
        checkpointer.save(1, {"reel": reel()})
    assert list(store.glob("step-*")) == []


def test_differences_of_all_kinds_are_listed_together_and_nothing_changes(store: Path) -> None:
    weight = RowInt8.of(torch.ones(4, 3))
    with fs.register_provider(Reel, ReelProvider()), fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"reel": reel(), "w": weight, "plain": torch.ones(2)}).committed.result()
        other, narrow = Reel([5], 1), RowInt8.of(torch.full((4, 2), 7.0))
        other.rate = 25
        held = narrow.codes.clone(), narrow.scale.clone()
        with pytest.raises(fs.MismatchError) as caught:
            checkpointer.load({"reel": other, "w": narrow, "plain": torch.zeros(3)})
    assert [line.split(":")[0].split()[1] for line in caught.value.differences] == [
        "reel.rate", "w.outer", "reel.frames", "w.codes", "plain",
    ]
    assert torch.equal(narrow.codes, held[0])
    assert torch.equal(narrow.scale, held[1])
    assert not other.blocks[0].any()


def test_a_checkpoint_whose_provider_is_missing_is_an_error_by_type_and_path(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        with fs.register_provider(Reel, ReelProvider()):
            checkpointer.save(1, {"reel": {"first": reel()}, "n": 1}).committed.result()
        state: dict[str, Any] = {"reel": {"first": Reel([20_005], 0)}, "n": 0}
        for target in (state, {"reel": None, "n": 0}, {"reel": {"first": None}, "n": 0}):
            with pytest.raises(fs.MismatchError) as caught:
                checkpointer.load(target)
            assert state["n"] == 0
        text = caught.value.differences[0]
        assert "reel.first" in text
        assert "'reel'" in text
        assert "register_provider" in text
        checkpointer.load({"n": 0})  # sections that are not asked for need no provider


def test_the_plan_is_kept_as_long_as_descriptions_stay(store: Path) -> None:
    events: list[Event] = []
    source = reel()
    with fs.register_provider(Reel, ReelProvider()), fs.Checkpointer(store, on_event=events.append) as checkpointer:
        for step in range(4):
            if step == 2:
                source.lasts = np.arange(9, dtype=np.float32)
            source.at = step
            checkpointer.save(step, {"reel": source, "w": RowInt8.of(torch.randn(4, 3))}).committed.result()
    assert [event.plan_cached for event in events if isinstance(event, SaveStarted)] == [False, True, False, True]
    assert fs.open(store).read("reel.lasts", framework="numpy").tolist() == list(range(9))
    assert fs.open(store).objects["reel"].objects["at"] == 3  # type: ignore[attr-defined]


class Weights:
    """What an optimizer's step changes, and what may change at any time; 6 MiB each."""

    def __init__(self) -> None:
        self.stepped, self.free = (np.ones(6 << 18, np.float32) for _ in range(2))


class WeightsProvider(fs.Provider[Weights]):
    def describe(self, value: Weights) -> Sequence[fs.Part]:
        return [fs.Part.of("stepped", value.stepped, lazy=True), fs.Part.of("free", value.free)]

    def chunks(self, value: Weights) -> Iterable[object]:
        return [value.stepped, value.free]

    def restore(self, value: Weights, stored: Mapping[str, object]) -> None: ...


def test_lazy_parts_are_captured_before_the_step_and_all_others_before_save_returns(store: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], 0.1)
    weights = Weights()
    state = {"w": weights, "p": [parameter], "optimizer": optimizer}
    engine = fs.EngineOptions(request_bytes=2 << 20)
    crawl = mock.patch.object(Captures, "pace", return_value=Pace(blocks=1, bytes_per_s=1))
    with (
        fs.register_provider(Weights, WeightsProvider()), crawl,
        fs.Checkpointer(store, engine=engine, budget_bytes=4 << 20) as checkpointer,
    ):
        save = checkpointer.save(1, state)
        weights.free[:] = 2
        assert not save.captured.done()
        optimizer.step()
        weights.stepped[:] = 2
        checkpoint = save.committed.result()
        assert set(checkpoint.read("w.stepped").tolist()) == set(checkpoint.read("w.free").tolist()) == {1.0}
        save = checkpointer.save(2, state)
        weights.stepped[:] = 3  # which the provider has promised not to do
        with pytest.raises(fs.StateChangedError, match=r"w\.stepped"):
            save.committed.result()


class Counts(fs.Provider[Any]):
    """For an object of the language's own that has no state_dict: numbers and nothing else."""

    kind = "counts"

    def describe(self, value: object) -> Sequence[fs.ObjectPart]:
        return [fs.ObjectPart("n")]

    def chunks(self, value: Any) -> Iterable[object]:
        yield value.n

    def restore(self, value: Any, stored: Mapping[str, object]) -> None:
        value.n = stored["n"]


def test_an_object_without_a_tensor_is_restored_too(store: Path) -> None:
    class Meter:
        __slots__ = ("n",)  # so that it has no weak references, either

    meter = Meter()
    meter.n = 5  # type: ignore[attr-defined]
    with fs.register_provider(Meter, Counts()), fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"meter": meter, "own": fs.PerRank(meter)}).committed.result()
        meter.n = 6  # type: ignore[attr-defined]
        checkpointer.load({"meter": meter, "own": fs.PerRank(meter)})
    assert meter.n == 5  # type: ignore[attr-defined]
