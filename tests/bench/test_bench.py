"""The benchmark runs end to end on a tiny state, and its arithmetic is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import figures, fio, meter, table
from bench.records import Device, FioSample, LoadSample, Measured, Outcome, Run, SaveSample
from bench.rivals import ENTRIES
from bench.state import build, choose_layout, flatten, is_exact, spoil

ROOT = Path(__file__).resolve().parents[2]
GB = 1_000_000_000


def save(number: int, durable_s: float, blocked_s: float = 0.5) -> SaveSample:
    return SaveSample(number, blocked_s, durable_s, cpu_s=0.2, extra_peak_bytes=3_000_000, files=4, file_bytes=2 * GB)


def load(load_s: float, *, exact: bool = True) -> LoadSample:
    return LoadSample("Checkpointer.load", load_s, cpu_s=0.1, extra_peak_bytes=0, cold=True, exact=exact)


def device(direction: str, seconds: float) -> FioSample:
    return FioSample(direction, fio.PLAIN, 4 << 20, 16, 2 * GB, seconds, cpu_s=0.2)


@pytest.fixture
def run() -> Run:
    """Two rounds: the device is twice as slow in the second, and so is everybody else."""
    measured = []
    for at, slow in ((1, 1.0), (2, 2.0)):
        ours = (save(1, 2.0 * slow), save(2, 1.25 * slow), save(3, 1.25 * slow))
        measured += [
            Measured("flowstone", at, Outcome(2 * GB, saves=ours)),
            Measured("flowstone", at, Outcome(2 * GB, loads=(load(1.0 * slow),))),
            Measured("torch", at, Outcome(2 * GB, saves=(save(1, 8.0 * slow, 8.0 * slow), save(2, 5.0 * slow)))),
        ]
    measured.append(Measured("dcp-1", 1, None, "save: OSError: no space"))
    writes, reads = (tuple(device(way, seconds) for seconds in (1.0, 2.0)) for way in ("write", "read"))
    rates = Device((), writes, reads, writes, reads)
    return Run("bench", "2026-01-01", {"CPU": "x"}, "Llama", 2 * GB, 2, rates, tuple(measured))


def test_ratios_pair_what_was_measured_in_the_same_round(run: Run) -> None:
    later = figures.by_round(figures.saves(run, "flowstone", first=False), lambda s: 2.0 / s.durable_s)
    assert later == {1: 1.6, 2: 0.8}
    assert figures.ratios(later, figures.device_rates(run, "write")) == pytest.approx([0.8, 0.8])
    assert figures.ratios({1: 4.0, 3: 1.0}, {1: 2.0, 2: 1.0}) == [2.0]


def test_goals_tell_pass_from_miss(run: Run) -> None:
    first, later, cold = table.goals(run)
    assert not first.is_met
    assert first.reached is not None
    assert first.reached.median == pytest.approx(0.5)
    assert not later.is_met
    assert cold.is_met
    assert str(cold).startswith("pass")
    assert str(later).startswith("miss")


def test_tables_hold_medians_spreads_ratios_and_failures(run: Run) -> None:
    rows = {row[0]: row for row in table.save_table(run).rows}
    assert rows["Flowstone, first"][2:5] == ("3.00 (2.00-4.00)", "0.75 (0.50-1.00)", "0.50")
    assert rows["DCP, 1 thread, round 1: FAILED"][1] == "save: OSError: no space"
    (against, failed) = table.against_table(run).rows
    assert against[:4] == ("torch.save", "4.0x", "4.0x", "24.0 (16.0-32.0)x")
    assert failed[1:] == ("-",) * 5
    (loaded,) = table.load_table(run).rows
    assert loaded[3] == "1.00"
    assert loaded[-2:] == ("yes", "yes")


def test_markdown_is_framed_by_its_markers_and_names_its_command(run: Run) -> None:
    text = table.markdown(run)
    assert text.startswith(table.BEGIN)
    assert text.rstrip().endswith(table.END)
    assert "`bench`, 2026-01-01" in text
    assert "| Flowstone, later | 0.50 |" in text


def test_fio_settings_are_those_with_the_best_median() -> None:
    slow, fast = fio.Setting(fio.PLAIN, 1 << 20, 8), fio.Setting(fio.REGISTERED, 8 << 20, 32)
    seconds = {slow: (0.5, 3.0, 3.0), fast: (1.0, 1.0, 9.0)}
    samples = [
        FioSample("read", at.memory, at.request_bytes, at.depth, GB, s, 0.0) for at in seconds for s in seconds[at]
    ]
    assert fio.best(samples, "read") == fast
    assert fio.best(samples, "read", (fio.PLAIN,)) == slow


def test_state_is_llama_shaped_near_the_size_and_the_same_everywhere() -> None:
    for wanted in (5e6, 2.1e9, 98e9):
        assert choose_layout(int(wanted)).state_bytes == pytest.approx(wanted, rel=0.15)
    layout = choose_layout(3_000_000)
    state = build(layout)
    flat = flatten(state)
    assert sum(tensor.numel() * tensor.element_size() for tensor in flat.values()) == layout.state_bytes
    assert flat["model.model.layers.0.mlp.down_proj.weight"].dtype == torch.bfloat16
    assert flat["optimizer.state.lm_head.weight.exp_avg_sq"].dtype == torch.float32
    assert is_exact(state)
    flat["model.lm_head.weight"].view(torch.int16)[-1, -1] ^= 1
    assert not is_exact(state)
    spoil(state)
    assert not is_exact(state)


def test_cooled_files_are_not_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "warm"
    path.write_bytes(b"x" * 1_000_000)
    if meter.cool([path]) is None:
        pytest.skip("this kernel has no cachestat(2)")
    path.read_bytes()
    assert meter._cached_pages(path)
    assert meter.cool([path])


def test_rivals_save_and_loads_exactly(tmp_path: Path) -> None:
    told = tmp_path / "raw.json"
    command = [
        sys.executable, str(ROOT / "bench" / "run.py"), "--bytes", "2e6", "--rounds", "1",
        "--settle-s", "0", "--passes", "1",
        "--directory", str(tmp_path), "--json", str(told), "--markdown", str(tmp_path / "tables.md"),
        "--only", "flowstone", "torch", "dcp-async",
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    raw = json.loads(told.read_text())
    assert [m["error"] for m in raw["measured"]] == [None] * 7
    assert all(sample["exact"] for m in raw["measured"] for sample in m["outcome"]["loads"])
    assert {e.name: e.saves for e in ENTRIES}["flowstone"] == len(raw["measured"][0]["outcome"]["saves"])
    assert "Flowstone against its rivals" in done.stdout
    assert (tmp_path / "tables.md").read_text().startswith(table.BEGIN)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
