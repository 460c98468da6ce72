"""The small demo for real, with all its kills; and each of its checks can fail."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from msgspec import structs
from rich.console import Console

import flowstone as fs
from flowstone_demo import acts, claims, corpus, every_step
from flowstone_demo.child_process import ChildProcess, DiedError
from flowstone_demo.compare import compare, object_difference
from flowstone_demo.every_step import EveryStepRun, Restart
from flowstone_demo.kill_loop import Kill, KilledRun, Resume, TornSave, Trigger, torn_saves
from flowstone_demo.kill_schedule import PlannedKill, one_more, plan_kills
from flowstone_demo.messages import (
    Began,
    Finished,
    Order,
    SaveCaptured,
    SaveCommitted,
    Saved,
    StepDurable,
    Stepped,
    decode,
    encode,
)
from flowstone_demo.run_log import RunLog
from flowstone_demo.screen import every_step_table
from flowstone_demo.sizes import FULL, SMALL
from warm_start import warm_start

SOURCE = Path(acts.__file__).parents[2]


@pytest.fixture(autouse=True)
def _children_find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]))


def shown(directory: Path, **options: object) -> tuple[int, str]:
    """Status and text of a small demo."""
    text = io.StringIO()
    with warm_start("flowstone_demo.child", "flowstone_demo.rank"):
        status = acts.run(
            directory=directory, small=True, console=Console(file=text, width=200), **options  # type: ignore[arg-type]
        )
    return status, text.getvalue()


# The whole


def test_small_demo_holds_every_claim_and_leaves_nothing(tmp_path: Path) -> None:
    status, text = shown(tmp_path / "work", seed=3)
    assert status == 0, text
    assert "torn: .saving-" in text
    assert "rank 2 killed as it began to save" in text
    assert "SIGKILL" in text
    assert "killed 2 times at random instants" in text
    cost = text[text.index("A step, with and without a durable checkpoint of it") :]
    assert "each step durable" in cost
    assert "with / without" in cost
    assert not (tmp_path / "work").exists()


def test_one_flipped_bit_of_one_weight_fails_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a demo whose act two is short: one kill, wherever it falls."""
    short = structs.replace(SMALL, steps=12, kills=1, kills_min=1, aimed=0, torn=0, journal_kills=1)
    monkeypatch.setattr(acts, "SMALL", short)
    status, text = shown(tmp_path / "work", seed=4, flip_bit=True, keep=True)
    assert status == 1, text
    failed = [line for line in text.splitlines() if line.startswith(("✗", "FAILED"))]
    assert len(failed) == 5, text
    assert "model.wte.weight: 1 of 262144 bytes differ, the first at byte 0" in failed[0]
    assert "equal in memory" in failed[1]
    assert failed[2].endswith("different: wte.weight on 2, wte.weight on 1")
    assert "final state equals" in failed[3]
    assert "replay of the journal" in failed[4]
    assert fs.open(tmp_path / "work" / "killed").step == short.steps


def test_a_directory_with_something_in_it_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    status, text = shown(tmp_path)
    assert status == 2
    assert "not empty" in text
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_child_that_dies_by_itself_is_told_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file, not a directory")
    order = Order(form=SMALL, seed=1, store=str(tmp_path / "store"), scratch=str(tmp_path), save_every=None)
    with warm_start("flowstone_demo.child"), ChildProcess(order, tmp_path / "log") as process:
        while not process.over:
            process.receive(1.0)
        with pytest.raises(DiedError, match="Error"):
            process.end()


def test_the_supervisor_needs_no_torch() -> None:
    code = "import sys, flowstone_demo.acts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The text and its loader


def library(root: Path, names: list[str]) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n" * 10)
    return root


def test_corpus_does_not_depend_on_the_order_of_creation(tmp_path: Path) -> None:
    names = ["b.py", "a/z.py", "a.py", "site-packages/x.py", "test/y.py"]
    first, second = library(tmp_path / "1", names), library(tmp_path / "2", names[::-1])
    assert corpus.read(10_000, first) == corpus.read(10_000, second)
    assert b"site-packages" not in corpus.read(10_000, first)
    assert corpus.read(25, first) == corpus.read(10_000, first)[:25]


def test_corpus_of_this_machine_is_the_same_twice_and_full() -> None:
    text = corpus.read(FULL.corpus_bytes)
    assert text == corpus.read(FULL.corpus_bytes)
    assert len(text) == FULL.corpus_bytes


def test_corpus_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no Python source"):
        corpus.read(10, tmp_path)


def test_loader_goes_on_from_its_state() -> None:
    first, second = (corpus.Loader(bytes(range(256)) * 4, batch=2, length=8, seed=seed) for seed in (1, 2))
    for _ in range(3):
        first.draw()
    second.load_state_dict(first.state_dict())
    for left, right in zip(first.draw(), second.draw(), strict=True):
        assert torch.equal(left, right)
    assert second.state_dict()["drawn"] == 4


def test_loader_refuses_the_state_of_another_text() -> None:
    first = corpus.Loader(b"a" * 99, batch=1, length=8, seed=1)
    with pytest.raises(ValueError, match="the text differs"):
        first.load_state_dict(corpus.Loader(b"b" * 99, batch=1, length=8, seed=1).state_dict())


# The comparison


def stored(path: Path, weight: torch.Tensor, loss: float = 1.0) -> fs.Checkpoint:
    with fs.Checkpointer(path) as ckpt:
        ckpt.save(1, {"model": {"w": weight}, "losses": {"train": [loss]}})
    return fs.open(path)


def test_comparison_finds_one_flipped_bit(tmp_path: Path) -> None:
    weight = torch.randn(100, 100)
    first = stored(tmp_path / "1", weight)
    weight.view(torch.int32)[3, 5] ^= 1
    matched = compare(first, stored(tmp_path / "2", weight))
    assert matched["model"].differences == ("model.w: 1 of 40000 bytes differ, the first at byte 1220",)
    assert matched["losses"].differences == ()


def test_comparison_of_equals_finds_nothing(tmp_path: Path) -> None:
    weight = torch.randn(100, 100)
    matched = compare(stored(tmp_path / "1", weight), stored(tmp_path / "2", weight))
    assert all(not part.differences for part in matched.values())
    assert matched["model"].bytes == 40_000
    assert matched["losses"].values == 1


def test_comparison_finds_another_loss_shape_and_name(tmp_path: Path) -> None:
    first = stored(tmp_path / "1", torch.zeros(4), 1.0)
    assert compare(first, stored(tmp_path / "2", torch.zeros(4), 1.0000000000000002))["losses"].differences
    assert compare(first, stored(tmp_path / "3", torch.zeros(2, 2)))["model"].differences
    with fs.Checkpointer(tmp_path / "4") as ckpt:
        ckpt.save(1, {"model": {"v": torch.zeros(4)}, "losses": {"train": [1.0]}})
    assert len(compare(first, fs.open(tmp_path / "4"))["model"].differences) >= 2


@pytest.mark.parametrize(
    ("first", "second"),
    [(0.0, -0.0), (1, 1.0), (True, 1), ([1], (1,)), ([1], [1, 2]), ({"a": 1}, {"b": 1}), (None, 0), ("a", b"a")],
)
def test_objects_that_python_may_call_equal_differ(first: object, second: object) -> None:
    assert object_difference(first, second, "x")[1]


def test_nan_equals_itself() -> None:
    assert not object_difference([float("nan")], [float("nan")], "x")[1]


# The plan of kills


def test_kills_are_the_seed_s_and_spread_over_the_run() -> None:
    for form in (FULL, SMALL):
        for seed in range(200):
            plan = plan_kills(form, seed)
            assert plan == plan_kills(form, seed)
            assert len(plan) == form.kills >= form.kills_min
            assert sum(kill.aimed for kill in plan) == form.aimed >= form.torn
            steps = [kill.after_step for kill in plan]
            assert steps == sorted(steps)
            assert form.save_every < steps[0]
            assert steps[-1] < form.steps
            assert all((kill.after_step + 1) % form.save_every == 0 for kill in plan if kill.aimed)
    assert plan_kills(FULL, 1) != plan_kills(FULL, 2)
    assert one_more(FULL, 1, 6).aimed


def test_aimed_trigger_waits_for_a_save_then_for_its_share() -> None:
    begun: list[bool] = []
    trigger = Trigger(PlannedKill(5, True, 0.5), lambda: bool(begun), save_s=2.0)
    trigger.observe(Stepped(4, 0.0), 0.0)
    begun.append(True)
    assert not trigger.due(0.0)
    begun.clear()
    trigger.observe(Stepped(5, 0.0), 1.0)
    assert not trigger.due(10.0)
    begun.append(True)
    assert not trigger.due(20.0)
    assert trigger.patience_s(20.9) == pytest.approx(0.1)
    assert trigger.due(21.0)


def test_unaimed_trigger_waits_for_a_share_of_a_step() -> None:
    trigger = Trigger(PlannedKill(2, False, 0.25), lambda: False, save_s=9.0)
    trigger.observe(Stepped(1, 0.0), 10.0)
    trigger.observe(Stepped(2, 0.0), 14.0)
    assert not trigger.due(14.0)
    assert trigger.due(15.0)


# The claims


def test_torn_saves_are_listed_with_files_and_bytes(tmp_path: Path) -> None:
    (tmp_path / ".saving-00000005-ab").mkdir()
    (tmp_path / ".saving-00000005-ab" / "rank-00000.safetensors").write_bytes(bytes(7))
    (tmp_path / "step-00000004").mkdir()
    assert torn_saves(tmp_path) == (TornSave(".saving-00000005-ab", (("rank-00000.safetensors", 7),)),)
    assert torn_saves(tmp_path / "absent") == ()


@pytest.mark.parametrize(
    ("newest", "promised", "actual", "right"),
    [(None, 0, None, True), (10, 10, 10, True), (15, 10, 15, True), (15, 10, 10, False), (5, 10, 5, False),
     (None, 5, None, False), (5, 5, None, False)],
)
def test_a_start_is_right_only_from_the_newest_and_never_below_a_promise(
    newest: int | None, promised: int, actual: int | None, right: bool
) -> None:
    assert Resume(newest, promised, actual).right is right


def run_of(losses: list[float]) -> RunLog:
    run_log = RunLog()
    run_log.enter(Began(None, 1, 0.0))
    for step, loss in enumerate(losses, 1):
        run_log.enter(Stepped(step, loss))
    run_log.enter(Finished(len(losses), "digest", 12))
    return run_log


def good_run(losses: list[float]) -> KilledRun:
    kills = [Kill(n, n, True, 1, (TornSave(f".saving-{n}", ()),), None) for n in range(1, SMALL.kills + 1)]
    return KilledRun(run_of(losses), kills, [Resume(None, 0, None)] * (SMALL.kills + 1))


def verdicts(run: KilledRun, losses: list[float]) -> list[bool]:
    return [claim.held for claim in claims.of_kill_loop(SMALL, run_of(losses), run)]


def test_every_claim_of_act_two_can_fail() -> None:
    losses = [5.0 - step / 10 for step in range(SMALL.steps)]
    assert verdicts(good_run(losses), losses) == [True] * 4
    few = good_run(losses)
    few.kills.pop()
    few.resumes.pop()
    assert verdicts(few, losses) == [False, True, True, True]
    whole = good_run(losses)
    whole.kills = [Kill(kill.number, kill.pid, True, 1, (), None) for kill in whole.kills]
    assert verdicts(whole, losses) == [True, False, True, True]
    differing = good_run(losses)
    differing.resumes[-1] = Resume(10, 10, 5)
    assert verdicts(differing, losses) == [True, True, False, True]
    assert verdicts(good_run([*losses[:-1], 0.0]), losses) == [True, True, True, False]
    assert verdicts(good_run(losses[:-1]), losses) == [True, True, True, False]


def every_step_run(losses: list[float]) -> EveryStepRun:
    run_log = run_of(losses)
    restarts = [Restart(0, 0, 0), Restart(9, 8, 9), Restart(20, 19, 19)]
    return EveryStepRun(run_log, SMALL.journal_kills, restarts, run_log.finished)


@pytest.mark.parametrize("wrong", [Restart(20, 18, 18), Restart(20, 20, 19), Restart(3, 1, 0)])
def test_every_claim_of_act_five_can_fail(wrong: Restart) -> None:
    losses = [5.0 - step / 10 for step in range(SMALL.steps)]

    def held(seen: EveryStepRun) -> list[bool]:
        return [claim.held for claim in claims.of_every_step(SMALL, run_of(losses), seen)]

    assert held(every_step_run(losses)) == [True] * 5
    seen = every_step_run(losses)
    seen.restarts[-1] = wrong
    assert held(seen) == [True, False, True, True, True]
    seen = every_step_run([*losses[:-1], 0.0])
    assert held(seen) == [True, True, False, True, True]
    seen = every_step_run(losses)
    seen.kills -= 1
    seen.restarts.pop()
    assert held(seen) == [False, True, True, True, True]
    other = Finished(SMALL.steps, "another digest", 12)
    seen.run_log.finished = seen.reloaded = other
    assert held(seen)[3:] == [False, False]


def test_the_cost_line_divides_medians_and_percentiles_of_steps_with_and_without() -> None:
    plain, journaled = RunLog(), RunLog()
    for step in range(1, 21):
        plain.enter(Stepped(step, 1.0, 0.2))
        journaled.enter(Stepped(step, 1.0, 0.5 if step == 20 else 0.22))
        journaled.enter(Saved(step, 0.004))
        journaled.enter(StepDurable(step, 38_100_000, 0.05))
    text = io.StringIO()
    Console(file=text, width=200).print(every_step_table(plain, journaled))
    rows = [line.replace("│", " ").split() for line in text.getvalue().splitlines()]
    assert ["without", "(act", "one)", "200", "ms", "200", "ms"] in rows
    assert ["each", "step", "durable", "220", "ms", "500", "ms", "4.0", "ms", "38.1", "50", "ms"] in rows
    assert ["with", "/", "without", "1.10", "x", "2.50", "x"] in rows


def test_kills_of_act_five_are_the_seed_s_one_in_each_part_of_the_run() -> None:
    for form in (FULL, SMALL):
        for seed in range(200):
            plan = every_step.plan_kills(form, seed)
            assert plan == every_step.plan_kills(form, seed)
            steps = [kill.after_step for kill in plan]
            assert len({*steps}) == form.journal_kills
            assert steps == sorted(steps)
            assert 1 < steps[0] <= steps[-1] < form.steps - 1
            assert not any(kill.aimed for kill in plan)
    assert every_step.plan_kills(FULL, 1) != every_step.plan_kills(FULL, 2)


def test_equal_but_empty_checkpoints_prove_nothing() -> None:
    run_log = run_of([1.0])
    held = [claim.held for claim in claims.of_comparison(SMALL, run_log, run_log, {})]
    assert held == [False] * (len(held) - 1) + [True]


# The pipe


def test_messages_read_back_bit_for_bit() -> None:
    for message in (
        Stepped(3, 0.1 + 0.2, 1e-3), SaveCaptured(3, 1e-9), SaveCommitted(3, 1 << 40, 0.3), Began(None, 1, 0.0),
        Saved(3, 1e-5), StepDurable(3, 1 << 33, 0.1 + 0.2),
    ):
        assert decode(encode(message).strip()) == message
