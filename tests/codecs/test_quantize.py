"""Saves with less precision, on request: the restored values, the reports, and the tensors that stay exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import flowstone as fs
from flowstone.cli import app
from flowstone.codecs.unmatched_rules import UnmatchedRules
from flowstone.convert.diff import diff
from flowstone.errors import ArgumentError, DamagedError
from flowstone.format.codec import QUANTIZED
from flowstone.state import describe
from flowstone.store.memory import MemoryStore
from forge import content

RULE = fs.Quantize("optimizer.*.exp_avg*")
MAX = fs.EngineOptions(compress="max")


class Job:
    """A model that is trained by AdamW."""

    def __init__(self, width: int = 512) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer, "step": 0}

    def train(self, steps: int = 3) -> Job:
        for _ in range(steps):
            self.model(torch.randn(8, 512)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state["step"] += 1  # type: ignore[operator]
        return self

    def moments(self) -> list[torch.Tensor]:
        return [slot for slots in self.optimizer.state.values() for name, slot in slots.items() if name != "step"]


def check_bound(actual: torch.Tensor, exact: torch.Tensor, block: int = 256) -> None:
    """The bound of each element, of blocks that begin anew in each chunk of 1 MiB."""
    actual, exact = actual.double().reshape(-1), exact.double().reshape(-1)
    chunk = (1 << 20) // 4
    for begin in range(0, len(exact), chunk):
        for first in range(begin, min(begin + chunk, len(exact)), block):
            here = slice(first, min(first + block, begin + chunk))
            of_block = exact[here].abs().max() / 220_000
            assert bool(((actual[here] - exact[here]).abs() <= (exact[here].abs() / 15).clamp(min=of_block)).all())
    assert torch.equal(actual == 0, exact == 0)


@pytest.mark.parametrize("engine", [fs.EngineOptions(), MAX], ids=["raw", "planes"])
def test_moments_take_a_quarter_and_come_back_within_the_bound(tmp_path: Path, engine: fs.EngineOptions) -> None:
    job = Job().train()
    with fs.Checkpointer(tmp_path / "run", engine=engine, rules=[RULE]) as checkpointer:
        saved = checkpointer.save(3, job.state).committed.result()
    exact_bytes = sum(parameter.numel() * 4 for parameter in job.model.parameters())
    assert sum(row.bytes for row in saved.manifest.segments) < 1.6 * exact_bytes  # 3 without the rule
    assert QUANTIZED.feature in saved.manifest.critical
    assert saved.manifest.lossy
    assert [row.codec for row in saved.manifest.lossy] == ["quantized"]
    assert saved.verify().sound
    other = Job()
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        report = checkpointer.load(other.state)
    large = {f"optimizer.state.model.{layer}.weight.{slot}" for layer in (0, 1) for slot in ("exp_avg", "exp_avg_sq")}
    assert set(report.lossy) == large, "biases are small, and exact"
    assert report.bounds == saved.manifest.lossy
    assert [(row.relative, row.of_block) for row in report.bounds] == [(1 / 15, 1 / 220_000)]
    stdout = CliRunner().invoke(app, ["show", str(tmp_path / "run"), "--json"]).stdout
    assert json.loads(stdout)["lossy"] == [{"codec": "quantized", "relative": 1 / 15, "of_block": 1 / 220_000}]
    shown = " ".join(CliRunner().invoke(app, ["show", str(tmp_path / "run")]).stdout.split())
    assert "lossy: quantized elements differ by at most 0.067 of their value, or 4.5e-06 of the largest" in shown
    assert content(other.model.state_dict()) == content(job.model.state_dict())
    assert other.state["step"] == 3
    for moment, exact in zip(other.moments(), job.moments(), strict=True):
        check_bound(moment, exact) if exact.numel() >= 1 << 14 else None
        assert exact.numel() >= 1 << 14 or torch.equal(moment, exact)


def test_each_way_to_read_gives_the_same_values(tmp_path: Path) -> None:
    job = Job(1100).state["model"]
    with fs.Checkpointer(tmp_path / "run", rules=fs.Quantize("m.*", block=64)) as checkpointer:
        checkpointer.save(1, {"m": job})
    checkpoint = fs.open(tmp_path / "run")
    weight = checkpoint.read("m.0.weight")
    check_bound(weight, job[0].weight.detach(), 64)  # type: ignore[index]
    assert torch.equal(checkpoint["m.0.weight"][3:500, 10:20], weight[3:500, 10:20])
    assert torch.equal(dict(checkpoint.stream())["m.0.weight"], weight)
    fs.export(tmp_path / "run", tmp_path / "hf", to="hf", section="m")
    actual = diff(tmp_path / "run", tmp_path / "hf", section="m")
    assert not actual.differing


def test_a_checkpoint_without_such_rules_says_nothing_of_loss(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path / "run", rules=[fs.Quantize("model.*.bias")]) as checkpointer:  # small ones
        saved = checkpointer.save(1, Job().state).committed.result()
        assert saved.manifest.critical == ()
        assert not saved.manifest.lossy
        assert b"lossy" not in (tmp_path / "run/step-00000001/manifest.json").read_bytes()
        report = checkpointer.load(Job().state)
        assert (report.lossy, report.bounds) == ((), ())
    assert "lossy" not in CliRunner().invoke(app, ["show", str(tmp_path / "run")]).stdout


@pytest.mark.parametrize(("pattern", "nearest"), [
    ("optimizer.*.exp_average*", "optimizer.state.model.*.weight.exp_avg"), ("optimiser.*", "optimizer.state.model."),
    ("*.exp_avgs", "optimizer.state.model.*.weight.exp_avg"), ("model", "model.*.weight"), ("step", "optimizer.state."),
])
def test_a_rule_that_names_nothing_is_refused_with_the_nearest_names(
    tmp_path: Path, pattern: str, nearest: str
) -> None:
    job = Job().train(1)
    with fs.Checkpointer(tmp_path / "run", rules=[RULE, fs.Quantize(pattern)]) as checkpointer:
        for step in (1, 2):
            with pytest.raises(fs.NoTensorError, match=r"matches no tensor of the state") as caught:
                checkpointer.save(step, job.state)
            assert pattern in caught.value.message
            assert nearest in str(caught.value.facts["found"])
            assert "correct the pattern" in str(caught.value.facts["next"])
    assert not list((tmp_path / "run").glob("step-*"))


def test_a_rule_for_what_an_optimizer_has_not_made_yet_is_told_once_and_then_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, rules = Job(), [RULE, fs.Quantize("optimizer.*.exp_avgs")]
    with fs.Checkpointer(tmp_path / "run", rules=rules) as checkpointer:
        for step in (1, 2):
            assert not checkpointer.save(step, job.state).committed.result().manifest.lossy
        reported = [record.getMessage() for record in caplog.records if "matches no tensor yet" in record.getMessage()]
        assert len(reported) == 2, "once for each"
        with pytest.raises(fs.NoTensorError, match="exp_avgs"):
            checkpointer.save(3, job.train().state)
    with fs.Checkpointer(tmp_path / "run", rules=RULE) as checkpointer:
        assert checkpointer.save(3, job.state).committed.result().manifest.lossy
        fresh = Job()
        assert checkpointer.save(4, fresh.state).committed.result(), "it has named something"


def test_a_rule_is_judged_by_the_tensors_of_the_save_that_is_committed_and_not_by_those_of_the_next() -> None:
    rules, job = UnmatchedRules([RULE]), Job()
    first = describe(job.state, rank=0)
    rules.check_described(first, is_all=False)
    second = describe(job.train().state, rank=0)
    rules.check_described(second, is_all=False)  # the next `save` is called before the first is committed
    rules.check("first", first.pieces.names)
    assert rules.any_left
    rules.check("second", second.pieces.names)
    assert not rules.any_left


def test_state_dicts_of_an_optimizer_without_state_are_saved_by_a_rule_for_it(tmp_path: Path) -> None:
    job = Job()
    state_dict = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
    with fs.Checkpointer(tmp_path / "run", rules=fs.Quantize("optimizer.*.exp_avg*")) as checkpointer:
        checkpointer.save_state_dict(1, state_dict).committed.result()
        state_dict = {"model": job.train().model.state_dict(), "optimizer": job.optimizer.state_dict()}
        assert checkpointer.save_state_dict(2, state_dict).committed.result().manifest.lossy


def test_what_is_not_finite_and_what_is_no_float_stays_exact(tmp_path: Path) -> None:
    state = {
        "nan": torch.full((70_000,), float("nan")), "inf": torch.randn(600_000), "ids": torch.arange(80_000),
        "wide": torch.randn(50_000, dtype=torch.float64), "half": torch.randn(70_000).half(),
        "zero": torch.zeros(70_000),
    }
    state["inf"][300_000] = float("inf")  # in the second chunk of 1 MiB
    with fs.Checkpointer(tmp_path / "run", rules=[fs.Quantize("*")]) as checkpointer:
        checkpointer.save(1, {"t": state})
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        report = checkpointer.load({"t": into})
    for name in ("nan", "ids", "wide", "zero"):
        assert content(into[name]) == content(state[name]), name
    assert torch.equal(into["inf"][262_144:524_288], state["inf"][262_144:524_288])
    assert not torch.equal(into["inf"][:262_144], state["inf"][:262_144])
    assert set(report.lossy) == {"t.inf", "t.half", "t.zero"}


def test_what_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    job, written = Job().train(), []
    with fs.Checkpointer(tmp_path / "run", rules=[RULE]) as checkpointer:
        for step in (1, 2, 3, 4):
            saved = checkpointer.save(step, job.state).committed.result()
            written.append(sum(row.bytes for row in saved.manifest.segments if row.home is None))
        assert written[3] < written[0] / 20
        checkpointer.load(Job().state, step=4)
        assert saved.verify().sound


def test_a_store_in_memory_and_damage(tmp_path: Path) -> None:
    store = MemoryStore()
    with fs.Checkpointer(store, rules=[RULE]) as checkpointer:
        checkpointer.save(1, Job().train().state)
    path = "step-00000001/rank-00000.0001.safetensors"
    data = bytearray(store.read(path))
    data[5000] ^= 1
    store.remove(path)
    store.put(path, bytes(data))
    with pytest.raises(DamagedError):
        fs.open(store).verify(), fs.open(store).read("optimizer.state.model.0.weight.exp_avg")


@pytest.mark.parametrize(
    "wrong", [lambda: fs.Quantize(""), lambda: fs.Quantize("a", bits=4), lambda: fs.Quantize("a", block=8),
              lambda: fs.Checkpointer("run", rules=[fs.Skip("a")]), lambda: fs.Checkpointer("run", rules="a"),
              lambda: fs.Checkpointer("run", rules=fs.Quantize("a"), every_step=True)],
)  # fmt: skip
def test_wrong_rules_are_refused_before_anything_is_made(
    wrong: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError):
        wrong()  # type: ignore[operator]
    assert not list(tmp_path.iterdir())
