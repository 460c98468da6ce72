"""The benchmark's tables and instruments, and one run from end to end on a tiny state."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import made_up
import numpy as np
import pytest
import torch
from made_up import GB, two_rounds

from bench import figures, fio, meter, plots, table
from bench.records import FioSample, Outcome, joined
from bench.report import MarkerError, draw, markers, update
from bench.rivals import ENTRIES
from bench.run import NAME, main, report
from bench.state import build, choose_layout, choose_llama, flatten, is_exact, spoil
from warm_start import warm_start

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = markers(NAME)


def test_ratios_pair_what_was_measured_in_the_same_round() -> None:
    run = two_rounds()
    later = figures.save_rates(run, "flowstone", first=False)
    assert later == {1: 1.6, 2: 0.8}
    assert figures.ratios(later, figures.device_rates(run, "write")) == pytest.approx([0.8, 0.8])
    assert figures.ratios({1: 4.0, 3: 1.0}, {1: 2.0, 2: 1.0}) == [2.0]


def test_rates_are_of_the_rivals_own_bytes() -> None:
    small = made_up.Measured("flowstone-small", 1, Outcome(GB // 5, saves=(made_up.save(1, 0.5),)))
    run = made_up.run([*two_rounds().measured, small])
    assert figures.save_rates(run, "flowstone-small", first=True) == {1: 0.4}
    assert figures.save_rates(run, "flowstone", first=True) == {1: 1.0, 2: 0.5}


def test_ranks_of_a_job_add_up_and_the_slowest_counts() -> None:
    parts = [
        Outcome(GB, (made_up.save(1, seconds, blocked),), (made_up.load(seconds, exact=exact),), "posix")
        for seconds, blocked, exact in ((1.0, 0.3, True), (2.0, 0.1, False))
    ]
    whole = joined(parts)
    assert (whole.payload_bytes, whole.note, whole.parts) == (2 * GB, "posix", tuple(parts))
    (saved,), (loaded,) = whole.saves, whole.loads
    assert (saved.durable_s, saved.blocked_s, saved.cpu_s, saved.files) == (2.0, 0.3, 0.4, 8)
    assert (loaded.load_s, loaded.cold, loaded.exact) == (2.0, True, False)
    assert joined(parts[:1]) is parts[0]


def test_tables_hold_medians_spreads_ratios_rounds_and_failures() -> None:
    run = two_rounds()
    actual = {t.title.split(" (")[0]: {row[0]: row for row in t.rows} for t in table.tables(run)}
    assert actual["Save"]["Flowstone, first"][2:5] == ("3.00 (2.00-4.00)", "0.75 (0.50-1.00)", "0.50")
    assert "DCP, 2 threads [1 of 2 rounds], later" in actual["Save"]
    assert actual["What failed"]["DCP, 1 thread"] == ("DCP, 1 thread", "1", "save: OSError: no space")
    against = actual["Flowstone against its rivals"]
    assert against["torch.save"][:4] == ("torch.save", "4.0x", "4.0x", "24.0 (16.0-32.0)x")
    assert "DCP, 1 thread" not in against
    loaded = actual["Cold load into existing tensors"]["Flowstone, Checkpointer.load"]
    assert loaded[3] == "1.00"
    assert loaded[-2:] == ("cold", "yes")


def test_rows_of_several_ranks_are_compared_with_as_many_jobs() -> None:
    four = made_up.Measured("flowstone-ranks", 1, Outcome(2 * GB, saves=(made_up.save(1, 4.0),)))
    run = made_up.run([four], rounds=1, devices=made_up.devices((2.0,), jobs=4))
    (row,) = next(t.rows for t in table.tables(run) if t.title.startswith("Flowstone in other settings: save"))
    assert row[4] == "0.50"
    assert figures.many_device_rates(made_up.run([four], devices=made_up.devices((2.0,))), "write") == {}


def test_sharing_among_replicas_is_told_condition_by_condition() -> None:
    actual = {t.title.split(" of ")[0]: {row[0]: row[1:] for row in t.rows} for t in table.tables(made_up.replicas())}
    rows = actual["Four replicas"]
    assert rows["cold"] == ("2.00x", "1.00", "2.00", "0.10", "0.10", "0", "0")
    assert [row[0] for row in rows.values()] == ["2.00x", "0.50x", "0.50x"]
    loads = actual["Flowstone in other settings: load"]
    assert [row[-2] for row in loads.values()] == ["cold"] * 4 + ["cached"] * 2


def test_a_load_that_was_to_be_cold_and_was_not_stands_out() -> None:
    warm = replace(made_up.load(1.0), cold=False)
    actual = table.tables(made_up.run([made_up.Measured("flowstone", 1, Outcome(GB, loads=(warm,)))], rounds=1))
    assert actual[0].rows[0][-2] == "NOT COLD"


def test_the_document_keeps_all_but_its_section(tmp_path: Path) -> None:
    path, figures_path = tmp_path / "docs" / "performance.md", tmp_path / "docs" / "figures"
    path.parent.mkdir()
    path.write_text(f"# Mine\n\n{BEGIN}\nold numbers\n{END}\n\nmine too\n")
    update(path, report(two_rounds()), figures_path)
    text = path.read_text()
    assert text.startswith("# Mine\n\n")
    assert text.endswith(f"{END}\n\nmine too\n")
    assert "old numbers" not in text
    assert "`bench`, 2026-01-01" in text
    assert "| Flowstone, later | 0.50 |" in text
    assert "](figures/durable-save.svg)" in text
    update(path, report(two_rounds()), figures_path)
    assert path.read_text() == text


@pytest.mark.parametrize("text", ["no markers", f"{END}{BEGIN}", BEGIN,
                                  f"{BEGIN}{END}{END}"])
def test_a_document_without_its_markers_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "performance.md"
    path.write_text(text)
    with pytest.raises(MarkerError):
        update(path, report(two_rounds()), None)
    assert path.read_text() == text


def test_our_own_document_has_the_markers() -> None:
    text = (ROOT / "docs" / "performance" / "rivals.md").read_text()
    assert text.index(BEGIN) < text.index(END)


def test_plots_draw_every_row_to_scale(tmp_path: Path) -> None:
    run = two_rounds()
    draw(plots.charts(run), tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == {chart.name for chart in plots.charts(run)}
    text = (tmp_path / "durable-save.svg").read_text()
    tag = "{http://www.w3.org/2000/svg}"
    drawn = ElementTree.fromstring(text)  # which also says that it is well-formed
    patches = [group for group in drawn.iter(f"{tag}g") if re.fullmatch(r"patch_[3-5]", group.get("id", ""))]
    widths = [np.ptp([float(x) for x in re.findall(r"[ML] (\S+)", next(group.iter(f"{tag}path")).attrib["d"])])
              for group in patches]
    rates = figures.values({1: [1.2, 0.3, 0.5]}, float)  # medians: Flowstone, torch.save, DCP with 2 threads
    assert np.divide(widths, widths[0]) == pytest.approx(np.divide(rates, rates[0]), abs=0.001)
    assert "prefers-color-scheme: dark" in text
    assert text == next(chart for chart in plots.charts(run) if chart.name == "durable-save").svg()


def test_fio_settings_are_those_with_the_best_median() -> None:
    slow, fast = fio.Setting(fio.PLAIN, 1 << 20, 8), fio.Setting(fio.REGISTERED, 8 << 20, 32)
    seconds = {slow: (0.5, 3.0, 3.0), fast: (1.0, 1.0, 9.0)}
    actual = [
        FioSample("read", job.memory, job.request_bytes, job.depth, GB, s, 0.0) for job in seconds for s in seconds[job]
    ]
    assert fio.best(actual, "read") == fast
    assert fio.best(actual, "read", (fio.PLAIN,)) == slow


def test_fio_jobs_at_once_share_the_bytes(tmp_path: Path) -> None:
    if not fio.is_installed():
        pytest.skip("fio is not installed")
    setting = fio.Setting(fio.PLAIN, 1 << 20, 8)
    for job in (fio.write, fio.read):
        sample = job(tmp_path, 8 << 20, setting, 4)
        assert (sample.bytes, sample.jobs) == (8 << 20, 4)
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [2 << 20] * 4
    fio.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_llama_is_near_the_size_and_the_same_everywhere() -> None:
    for expected in (5e6, 2.1e9, 98e9):
        assert choose_llama(int(expected)).state_bytes == pytest.approx(expected, rel=0.15)
    flat = flatten(build(choose_llama(3_000_000)))
    assert flat["model.model.layers.0.mlp.down_proj.weight"].dtype == torch.bfloat16
    assert flat["optimizer.state.lm_head.weight.exp_avg_sq"].dtype == torch.float32


@pytest.mark.parametrize("shape", ["llama", "small"])
@pytest.mark.parametrize("phase", [None, 64, 2112])
def test_states_have_their_size_and_phase_and_every_byte_counts(shape: str, phase: int | None) -> None:
    layout = choose_layout(shape, 3_000_000)
    state = build(layout, phase)
    flat = flatten(state)
    assert sum(tensor.numel() * tensor.element_size() for tensor in flat.values()) == layout.state_bytes
    assert phase is None or {tensor.data_ptr() % 4096 for tensor in flat.values()} == {phase}
    assert is_exact(state)
    list(flat.values())[-1].view(-1).view(torch.int16)[-1] ^= 1
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


def test_warmed_files_are_read_from_the_page_cache_alone(tmp_path: Path) -> None:
    path = tmp_path / "cold"
    path.write_bytes(b"x" * 1_000_001)
    if meter.cool([path]) is None:
        pytest.skip("this kernel has no cachestat(2)")
    watch = meter.Meter()
    assert meter.warm([path])
    assert watch.read().device_bytes >= 1_000_001
    watch = meter.Meter()
    path.read_bytes()
    assert watch.read().device_bytes == 0


def test_the_meter_sees_what_a_living_child_uses() -> None:
    work = (
        "x = bytearray(64 << 20); x[::4096] = bytes(len(x) // 4096); "
        "print(sum(range(10**7)), flush=True); input()"
    )
    before_bytes, watch = meter.resident_bytes(), meter.Meter()
    with subprocess.Popen(
        [sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        alive = watch.read()
        child.communicate("\n")
    ended = watch.read()
    assert alive.peak_bytes - before_bytes >= 64 << 20
    assert alive.cpu_s > 0.05
    assert ended.cpu_s >= alive.cpu_s - 0.02  # a tick of the kernel's clock for each of two numbers


@pytest.mark.usefixtures("conductor")
def test_a_run_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, tables, update = tmp_path / "raw.json", tmp_path / "tables.md", tmp_path / "doc.md"
    update.write_text(f"{BEGIN}\n{END}\n")
    measure = [
        "--json", str(path), "--update", str(update), "--bytes", "2e6", "--rounds", "1", "--settle-s", "0", "--passes",
        "1", "--directory", str(tmp_path), "--plots", str(tmp_path / "figures"), "--only", "flowstone", "torch",
        "flowstone-ranks",
    ]
    with warm_start("bench.worker"):
        assert main(measure) == 0
    assert "Flowstone against its rivals" in capsys.readouterr().out
    raw = json.loads(path.read_text())
    assert [m["error"] for m in raw["measured"]] == [None] * 7
    assert all(sample["exact"] for m in raw["measured"] for sample in m["outcome"]["loads"])
    assert {e.name: e.saves for e in ENTRIES}["flowstone"] == len(raw["measured"][0]["outcome"]["saves"])
    assert [len(m["outcome"]["parts"]) for m in raw["measured"] if m["rival"] == "flowstone-ranks"] == [4, 4]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["figures"]
    assert main([*measure, "--resume"]) == 0  # all its rounds are there
    assert json.loads(path.read_text()) == raw
    assert main(["--from", str(path), "--markdown", str(tables)]) == 0
    assert "one job of four ranks" in tables.read_text()
