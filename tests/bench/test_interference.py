"""The cost of saves for a training: arithmetic on synthetic runs, checks of the real parts, and one run end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event

import made_up_training as made_up
import pytest
import torch
from made_up_training import GB, Trained, block, saved, training

from bench import environments, interference
from bench.environments import Environment
from bench.goals import Goal
from bench.interference import NAME, is_sound, report
from bench.launch import WorkerError, call
from bench.report import markers, section
from bench.rivals import OURS, Entry
from bench.rivals.torch_save import TorchSave
from bench.state import State, flatten
from bench.training import figures, text
from bench.training.drill import drill
from bench.training.goals import goals
from bench.training.programme import FULL, PARTICIPANTS, PROGRAMMES, QUICK
from bench.training.records import (
    CalibrationTask,
    DrillTask,
    Leg,
    SavedSample,
    Shape,
    TrainingOutcome,
    TrainingTask,
    Window,
)
from bench.training.savers import ByRival, Saver, open_saver
from bench.training.trainer import Lap, Trainer, calibrate, solve, window_of
from bench.training.worker import check_exact
from warm_start import warm_start

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = markers(NAME)
ENVIRONMENTS = ROOT / "runs" / "bench" / "environments"
TINY = Shape(vocabulary=64, context=16, width=16, depth=1, heads=2)
WINDOW = Window(2, 8)
RIVALS = [entry for entry in PARTICIPANTS if not entry.is_ours]


def by_text(all_goals: tuple[Goal, ...]) -> dict[str, Goal]:
    texts = {goal.text: goal for goal in all_goals}
    assert len(texts) == len(all_goals)
    return texts


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}


# Arithmetic


def test_ratios_are_to_the_blocks_without_saves_of_the_same_process() -> None:
    run = made_up.two_rounds()
    assert figures.total_ratios(figures.pairs(run, OURS, 5)) == pytest.approx([1.01, 1.03])
    theirs = figures.pairs(run, "torch", 5)
    assert [none.every for of in theirs.values() for none, _ in of] == [0, 0]
    assert figures.total_ratios(theirs) == pytest.approx([1.5, 1.5]), "what is left to write is the block's"
    assert figures.percentile_ratios(theirs, 95) == pytest.approx([1.0, 1.0])
    assert figures.pairs(run, OURS, 20) == {}


def test_percentiles_lie_between_neighbours() -> None:
    steps = block(0, tuple(index / 100 for index in range(101))).steps
    assert [figures.percentile(steps, p) for p in (50, 95, 99)] == pytest.approx([0.50, 0.95, 0.99])
    assert figures.percentile(steps[3:4], 99) == pytest.approx(0.03)


def test_blocked_is_save_and_fence_and_the_first_save_stands_apart() -> None:
    run = made_up.two_rounds()
    later = figures.later_saves(run, OURS, 5)
    assert [save.blocked_s for of in later.values() for save in of] == pytest.approx([0.010, 0.020])
    assert [save.save_s for save in figures.first_saves(run, OURS)] == [0.5, 0.5]
    assert figures.longer_optimizer_s(figures.pairs(run, OURS, 5)) == pytest.approx([0.05] * 4)
    assert figures.cpu_per_gb(run, OURS, 5) == pytest.approx([1.0, 1.0])
    assert figures.extra_peaks(run, OURS, 5) == [(5 * GB, 5 * GB)] * 2


def test_memory_may_be_made_but_must_not_grow() -> None:
    for growing_bytes in (0, 100_000):
        outcome = made_up.flat(growing_bytes).outcome
        assert outcome is not None
        peaks = [sample.peak_bytes for sample in outcome.samples]
        assert figures.growth(outcome.samples, peaks) == pytest.approx(200 * growing_bytes)
    assert figures.growth(outcome.samples[:2], peaks[:2]) is None


def test_goals_tell_pass_from_miss() -> None:
    run = made_up.two_rounds()
    run = replace(run, drilled=(made_up.many(0.005), made_up.flat(1_000_000)))
    goals_by_text = by_text(goals(run))
    time = goals_by_text["training time, a save every 5 steps, relative to no saves"]
    assert str(time) == f"pass  {time.text}: 1.020 (1.010-1.030), goal at most 1.030"
    blocked = goals_by_text["blocked in total (in `save`, and by waiting for its capture), a save every 5 steps, ms"]
    assert str(blocked).startswith("pass")
    perceived = goals_by_text["perceived throughput, a save every 5 steps, relative to torch.save's"]
    assert str(perceived) == f"miss  {perceived.text}: 375 (250-500), goal at least 500"
    assert goals_by_text["time for which `save` blocks training, 1,800 tensors of 5 GB in all, later saves, ms"].is_met
    assert goals_by_text["time for which `save` blocks training, 1,800 tensors of 5 GB in all, first save, ms"].is_met
    title = "200 saves of a state of ten times the budget"
    assert not goals_by_text[f"{title}: growth of resident memory, MB"].is_met
    assert goals_by_text[f"{title}: growth of shared memory, MB"].is_met
    assert goals_by_text[f"{title}: failures"].is_met
    slower = by_text(goals(replace(run, drilled=(made_up.many(0.011), made_up.flat(0, ("save 7: EIO",))))))
    assert not any(goal.is_met for text, goal in slower.items() if "blocks training, " in text or "failures" in text)


def test_a_row_that_was_not_run_has_no_goal_and_one_that_failed_misses_its_own() -> None:
    run = made_up.run([Trained("torch", 1, made_up.two_rounds().trained[1].outcome)])
    assert goals(run) == ()
    failed = made_up.run([Trained(OURS, 1, None, "killed")])
    assert [goal.is_met for goal in goals(failed)] == [False] * 3


def test_the_section_holds_rows_goals_charts_and_failures() -> None:
    torch_failed = SavedSample(6, 0.1, 0.0, None, "OSError: no space")
    run = made_up.two_rounds()
    broken = training(block(0, (2.0,) * 6), block(5, (2.0,) * 6, (saved(1, 1.0), torch_failed)), differing=("a", "b"))
    run = replace(run, trained=(*run.trained, Trained("dcp-async", 1, broken), Trained(OURS, 3, None, "killed")))
    written = section(report(run), "figures")
    assert written.startswith(BEGIN)
    assert "(figures/interference-blocked.svg)" in written
    assert "| Flowstone, every 5 | 20 | 2.040 |" in written
    assert "GPT-2 of 124.4 million parameters" in written
    assert "| DCP async, every 5 | 1 | 1 of 2 saves: OSError: no space |" in written
    assert "| DCP async | 1 | the last save came back with other bytes in a and 1 more |" in written
    assert "| Flowstone | 3 | killed |" in written


def test_wrong_bytes_and_failed_saves_of_ours_are_not_sound() -> None:
    run = made_up.two_rounds()
    assert is_sound(run)
    good = run.trained[0].outcome
    assert good is not None
    failed = replace(good.blocks[1], saves=(SavedSample(1, 0.1, 0.0, None, "EIO"),))
    for outcome in (None, replace(good, differing=("x",)), replace(good, blocks=(good.blocks[0], failed))):
        assert not is_sound(replace(run, trained=(Trained(OURS, 1, outcome),)))
    assert not is_sound(replace(run, drilled=(made_up.flat(0, ("save 7: EIO",)),)))


def test_our_own_document_has_the_markers_and_the_programmes_are_consistent() -> None:
    text = (ROOT / "docs" / "performance" / "training.md").read_text()
    assert text.index(BEGIN) < text.index(END)
    assert FULL.shape.parameters == 124_439_808  # GPT-2's own
    assert sum(leg.steps for leg in FULL.ours if leg.every == 5) * FULL.rounds == 200
    for programme in PROGRAMMES.values():
        assert all(leg.steps % leg.every == 0 for leg in (*programme.ours, *programme.others))
        assert {drill.name for drill in programme.drills} == {drill.name for drill in FULL.drills}


# The real thing


def test_tokens_are_ranks_and_the_rest_is_unknown() -> None:
    assert text.tokens("a b a  c", 3).tolist() == [1, 2, 0, 2, 1, 0, 0]
    assert len(text.library()) > 1_000_000


def test_state_names_every_tensor_once_and_a_step_changes_it() -> None:
    trainer = Trainer(TINY, WINDOW)
    trainer.step()
    assert sum(p.numel() for p in trainer.model.parameters()) == TINY.parameters
    state = trainer.state()
    model, slots = state["model"], state["optimizer"]
    assert isinstance(model, dict)
    assert "head.weight" not in model  # tied
    assert isinstance(slots, dict)
    assert set(slots["state"]) == set(model)
    before = model["norm.weight"].clone()
    trainer.step()
    assert not torch.equal(before, model["norm.weight"])


def test_calibration_finds_windows_for_any_wish() -> None:
    assert solve({100: 1.0, 200: 1.5, 400: 9.0}, 2.0) == pytest.approx(300)
    assert solve({100: 1.0, 200: 1.0}, 2.0) == pytest.approx(200)
    assert window_of(450, 1024) == Window(4, 112)
    assert window_of(3 * 4096, 1024) == Window(16, 768)
    assert window_of(-5, 1024) == Window(4, 8)
    actual = calibrate(CalibrationTask(TINY, 1e-9))
    assert (actual.window, len(actual.step_s)) == (Window(4, 8), 3)


class Telling(Trainer):
    """Tells of every step."""

    def __init__(self) -> None:
        super().__init__(TINY, WINDOW)
        self.stepped = Event()

    def step(self) -> Lap:
        lap = super().step()
        self.stepped.set()
        return lap


class Late(TorchSave):
    """Returns from `save` at once, and looks at the state behind the next step."""

    def __init__(self, directory: Path, stepped: Event) -> None:
        super().__init__(directory)
        self._stepped = stepped

    def save(self, state: State, number: int, /) -> Callable[[], object]:
        self._stepped.clear()

        def until_durable() -> None:
            self._stepped.wait()
            super(Late, self).save(state, number)

        return until_durable


def test_a_capture_that_comes_too_late_is_found(tmp_path: Path) -> None:
    trainer = Telling()
    assert check_exact(trainer, ByRival(TorchSave(tmp_path)), 1) == ()
    differing = check_exact(trainer, ByRival(Late(tmp_path, trainer.stepped)), 2)
    assert set(differing) == set(flatten(trainer.state()))


class FailsTwice(TorchSave):
    """Save 2 fails at once, save 3 behind the caller's back."""

    def save(self, state: State, number: int, /) -> Callable[[], object]:
        def until_durable() -> None:
            raise OSError("no space")

        if number == 2:
            until_durable()
        return until_durable if number == 3 else super().save(state, number)


def test_a_rivals_failed_save_is_a_sample_and_the_training_goes_on(tmp_path: Path) -> None:
    saver = ByRival(FailsTwice(tmp_path))
    samples = save_four_times(Trainer(TINY, WINDOW), saver)
    assert [sample.error for sample in samples] == [None, "OSError: no space", "OSError: no space", None]
    assert [sample.durable_s is None for sample in samples] == [False, True, True, False]
    assert [path.name for path in tmp_path.iterdir()] == ["save-4"]
    assert saver.samples() == []


def test_our_failed_save_is_a_sample_and_the_training_goes_on(tmp_path: Path) -> None:
    saver = open_saver(OURS, tmp_path)
    trainer = Trainer(TINY, WINDOW)
    trainer.model.register_module("strange", Strange())
    samples = save_four_times(trainer, saver)
    saver.close()
    assert [sample.error is None for sample in samples] == [True, False, False, True]
    assert all("strange" in (sample.error or "") for sample in samples[1:3])


class Strange(torch.nn.Module):
    """Nothing can be made of its state at the second and the third save."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def get_extra_state(self) -> object:
        self.asked += 1
        return object() if self.asked in (2, 3) else 0

    def set_extra_state(self, _state: object) -> None:
        pass


def save_four_times(trainer: Trainer, saver: Saver) -> list[SavedSample]:
    trainer.step()
    saver.prepare(trainer)
    for number in range(1, 5):
        saver.save(trainer, number)
        saver.drain()
        trainer.step()
    return saver.samples()


@pytest.mark.parametrize("entry", RIVALS, ids=lambda entry: entry.name)
def test_every_rival_trains_saves_and_brings_back(entry: Entry, tmp_path: Path) -> None:
    python = Path(sys.executable)
    if entry.environment is not None:
        if not environments.is_made(ENVIRONMENTS / entry.environment, entry.environment):
            pytest.skip(f"environment {entry.environment} is not made; `make bench-interference` makes it")
        python = Environment(ENVIRONMENTS).python(entry.environment)
    task = TrainingTask(entry.name, TINY, WINDOW, (Leg(1, 2), Leg(2, 2)), str(tmp_path), 0.0)
    with warm_start("bench.training.worker"):
        outcome = call(
            "bench.training.worker", {"TrainingTask": task}, TrainingOutcome, python=python, timeout_s=300.0
        )
    assert [block.every for block in outcome.blocks] == [0, 1, 2, 0]
    assert outcome.differing == ()
    assert outcome.payload_bytes == 12 * TINY.parameters + 4 * outcome.tensors // 4
    assert [[save.error for save in block.saves] for block in outcome.blocks] == [[], [None] * 2, [None], []]
    kept = [path for path in tmp_path.iterdir() if path.name.startswith("save-")]
    assert [path.name for path in kept] == ["save-9"]


def test_a_worker_that_fails_says_why() -> None:
    task = {"TrainingTask": TrainingTask("nobody", TINY, WINDOW, (), "", 0.0)}
    with warm_start("bench.training.worker"), pytest.raises(WorkerError, match="StopIteration"):
        call("bench.training.worker", task, TrainingOutcome, python=Path(sys.executable), timeout_s=300.0)


def test_a_rivals_process_does_not_import_flowstone() -> None:
    program = "import sys, bench.training.worker; sys.exit('flowstone' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment(), check=True)


@pytest.mark.parametrize("stepping", [False, True])
def test_a_drill_tells_of_every_save(stepping: bool, tmp_path: Path) -> None:
    task = DrillTask(
        tensors=30, state_bytes=40_000_000, saves=3, budget_bytes=32 << 20, stepping=stepping, directory=str(tmp_path),
        settle_s=0.0,
    )
    outcome = drill(task)
    assert outcome.failures == ()
    assert [sample.number for sample in outcome.samples] == [1, 2, 3]
    assert outcome.payload_bytes == pytest.approx(40e6, rel=0.001)
    for sample in outcome.samples:
        assert 0 < sample.save_s <= sample.durable_s
        assert sample.copied_bytes >= outcome.payload_bytes
        assert sample.peak_bytes > outcome.before_bytes / 2


@pytest.mark.usefixtures("conductor")
def test_a_quick_run_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(interference, "QUICK", replace(QUICK, shape=TINY, window=WINDOW))
    path, update = tmp_path / "raw.json", tmp_path / "doc.md"
    update.write_text(f"# Mine\n\n{BEGIN}\nold\n{END}\n")
    measure = ["--json", str(path), "--quick", "--directory", str(tmp_path), "--only", "flowstone", "torch"]
    with warm_start("bench.training.worker"):
        assert interference.main(measure) == 0
    assert "training time, a save every 5 steps, relative to no saves" in capsys.readouterr().out
    raw = json.loads(path.read_text())
    assert [trained["error"] for trained in raw["trained"]] == [None] * 2
    assert [trained["outcome"]["differing"] for trained in raw["trained"]] == [[], []]
    assert [drilled["outcome"]["failures"] for drilled in raw["drilled"]] == [[]] * len(QUICK.drills)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    assert interference.main([*measure, "--resume"]) == 0  # all is there
    assert json.loads(path.read_text()) == raw
    plots = ["--update", str(update), "--plots", str(tmp_path / "figures")]
    assert interference.main(["--from", str(path), *plots]) == 0
    assert update.read_text().startswith("# Mine\n\n<!--")
    assert "| Flowstone, every step | 5 |" in update.read_text()
    assert (tmp_path / "figures" / "interference-total.svg").exists()
    program = [sys.executable, str(ROOT / "bench" / "interference.py"), *measure, "--update", str(update)]
    refused = subprocess.run(program, capture_output=True, check=False, env=environment())
    assert refused.returncode == 2
