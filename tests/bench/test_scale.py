"""Plans of large jobs: simulated ranks hold the pieces that torch would give them; the bound; one run end to end."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Shard

from bench import charts
from bench.report import section
from bench.scale import jobs, main, parse, report
from bench.scaling import tables
from bench.scaling.bound import least_largest, ownership
from bench.scaling.records import Case, Outcome, Run, Spent, Task
from bench.scaling.state import MODELS, PARALLELISMS, Job, Sizes, pieces_of, tensors
from flowstone.plan.assign_writers import assign_writers
from flowstone.table.box import Box
from flowstone.table.pieces import Pieces
from warm_start import warm_start

ROOT = Path(__file__).resolve().parents[2]
CASES = [("tiny-moe" if form.experts else "tiny", how, n) for how, form in PARALLELISMS.items() for n in (8, 24, 128)]


def job(model: str, how: str, ranks: int) -> Job:
    return Job(MODELS[model], PARALLELISMS[how], ranks)


@pytest.mark.parametrize("ranks", [3, 16, 100])
def test_fsdp_cuts_as_torch_does(ranks: int) -> None:
    made = job("tiny", "fsdp", ranks)
    for rank in range(ranks):
        held = {piece.name: piece.box for piece in pieces_of(made.held(rank))}
        for tensor in tensors(MODELS["tiny"]):
            if not tensor.shape:
                assert held[tensor.name] == Box((), ())
                continue
            shape, offset = _compute_local_shape_and_global_offset(tensor.shape, (ranks,), [rank], [Shard(0)])
            if 0 in shape:
                assert tensor.name not in held
            else:
                assert held[tensor.name] == Box(tuple(offset), tuple(shape))


@pytest.mark.parametrize(("model", "how", "ranks"), CASES)
def test_made_up_columns_are_those_of_a_real_rank(model: str, how: str, ranks: int) -> None:
    made, sizes = job(model, how, ranks), Sizes()
    for rank in {0, 1, ranks // 2, ranks - 1}:
        held = made.held(rank)
        pieces = pieces_of(held)
        plain = Pieces(held.tensors, pieces.parts, pieces.boxes).compact()
        assert plain.kinds is not None
        assert held.kinds is not None
        assert (plain.parts.tolist(), plain.kinds.tolist()) == (held.parts.tolist(), held.kinds.tolist())
        assert plain.boxes.tolist() == held.boxes.tolist()
        assert sizes(held).tolist() == [piece.bytes for piece in pieces]


@pytest.mark.parametrize(("model", "how", "ranks"), CASES)
def test_every_byte_of_a_made_up_job_is_written_once_and_evenly(model: str, how: str, ranks: int) -> None:
    made = job(model, how, ranks)
    held = [made.held(rank) for rank in range(ranks)]
    assigned = assign_writers(held, made.nodes)
    assert int(assigned.bytes.sum()) == made.state_bytes
    sizes = Sizes()
    assert [int(sizes(own)[of].sum()) for own, of in zip(held, assigned.writes, strict=True)] == assigned.bytes.tolist()
    owned, pieces = ownership(held)
    assert sum(owned.values()) == made.state_bytes
    assert pieces == sum(map(len, assigned.writes))
    largest = max(int(sizes(pieces).max()) for pieces in held)
    bound = least_largest(owned, ranks)
    assert bound <= assigned.bytes.max()
    level = assign_writers(held).bytes.max()  # nodes set aside, which can be level while their ranks are not
    assert bound <= level <= bound + largest, "whole pieces: no further than one of them"


def test_the_bound_of_one_set_of_ranks_is_a_level() -> None:
    assert least_largest({(0,): 10, (0, 1, 2): 5}, 3) == 10
    assert least_largest({(0,): 10, (0, 1, 2): 21}, 3) == 11
    assert least_largest({(0, 1): 10, (1, 2): 30}, 3) == 15
    assert least_largest({(0, 1): 30, (1, 2): 30}, 3) == 20
    assert least_largest({}, 2) == 0


def test_the_program_refuses_to_put_toy_numbers_into_a_document(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- scale:start -->\nold\n<!-- scale:end -->\nafter\n")
    command = [sys.executable, str(ROOT / "bench" / "scale.py"), "--quick", "--update", str(document)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, "its numbers belong into no document" in done.stderr) == (2, True), done.stderr
    assert "\nold\n" in document.read_text()


@pytest.mark.usefixtures("conductor")
def test_a_quick_run_plans_every_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warm_start("bench.scaling.measure"):
        assert main(["--quick", "--ranks", "16", "--directory", str(tmp_path / "bench"), "--json",
                     str(tmp_path / "run.json"), "--plots", str(tmp_path / "figures")]) == 0
    run = msgspec.json.decode((tmp_path / "run.json").read_bytes(), type=Run)
    assert [case.task.how for case in run.cases] == list(PARALLELISMS)
    for case in run.cases:
        assert case.error is None
        outcome = case.outcome
        assert outcome is not None
        assert outcome.posted == 2 * (15 + 16 + 1) + 1, "each message in one part, and a count; rank 0 says it waits"
        assert outcome.bound <= outcome.largest
        assert outcome.reads > 0
        assert set(outcome.spent) == {
            "say", "first plan", "write plan", "index", "manifest", "write index", "open index", "load plan"
        }
    assert "first plan, CPU-s of one core" in capsys.readouterr().out
    for chart in tables.charts(run):
        ElementTree.parse(tmp_path / "figures" / f"{chart.name}.svg")
    assert not list((tmp_path / "bench").iterdir())


def made_up(ranks: int, first_plan_s: float, largest: int) -> Case:
    phases = (*tables.SAVE_PHASES, *tables.LOAD_PHASES, "say", "write plan")
    spent = dict.fromkeys(phases, Spent(0.3, 0.3, 10**8, 10**9))
    spent["first plan"] = Spent(first_plan_s, first_plan_s, 10**8, 10**9)
    outcome = Outcome(
        held_pieces=2_000_000, pieces=1_200_000, chunks=1_200_000, state_bytes=10**12, message_bytes=1000, posted=64,
        posted_bytes=10**6, commit_bytes=1000, posted_receipts_bytes=10**6, largest=largest, mean=100.0, bound=100,
        largest_piece=1, cached_s=0.001, index_bytes=10**6, manifest_bytes=1000, segments=ranks, reads=10,
        read_bytes=100, spent=spent,
    )
    return Case(Task("405b", "hsdp", ranks, "fsdp", ""), outcome)


def test_goals_tell_pass_from_miss() -> None:
    good = Run("c", "today", {"CPU": "x"}, "full", (made_up(256, 1.0, 101), made_up(8192, 59.0, 102)))
    assert {goal.is_met for goal in tables.goals(good)} == {True}
    assert len(tables.goals(good)) == 7
    bad = msgspec.structs.replace(good, cases=(made_up(8192, 61.0, 103),))
    missed = [goal.text for goal in tables.goals(bad) if not goal.is_met]
    assert len(missed) == 3
    assert "first plan" in missed[0]
    text = section(report(good), "figures")
    assert text.startswith("<!-- scale:start -->")
    assert "![First plan, CPU-seconds: Llama-3 405B](figures/scale-plan.svg)" in text


def test_labels_of_curves_that_end_together_stand_apart() -> None:
    lines = tuple(charts.Curve(f"line {index}", ((8, 1.0), (64, 10.0 + index / 100))) for index in range(6))
    chart = charts.GrowthChart("x", "Title <&>", "small", lines, 50.0)
    root = ElementTree.fromstring(chart.svg())
    labels = [e for e in root.iter("{http://www.w3.org/2000/svg}text") if (e.text or "").startswith("line ")]
    heights = sorted(float(e.get("y", "0")) for e in labels)
    assert min(np.diff(heights)) >= 16
    assert heights[0] > 0
    assert heights[-1] < 420
    assert replace(chart, goal=None) != chart


def test_a_job_of_experts_is_of_a_model_that_has_some() -> None:
    for model, how, _ in jobs(parse([])):
        assert ("moe" in model) == PARALLELISMS[how].experts
