"""A durable checkpoint of every step: a load restores the state of the step bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import flowstone as fs
from flowstone.commit import catalog
from flowstone.journal import journaling, journals
from flowstone.journal.every_step import EveryStep
from flowstone.journal.journal_format import JournalHeader
from flowstone.store.appendable import AppendFile
from flowstone.store.base import Store
from flowstone.store.local import LocalStore
from flowstone.store.local_append import LocalAppendFile
from journaled import Make, Noisy, Training, adamw, bits, momentum, run, same, steps_of
from kill_loop import killed_until_it_ends

TRAININGS = {
    "adamw": {}, "momentum": {"make": momentum}, "kept gradients": {"keeps_gradients": True},
    "skipped steps": {"skips": (3, 4, 7)},
    "fused": {"make": lambda own: torch.optim.AdamW(own, lr=1e-2, fused=True)},
    "one by one": {"make": lambda own: torch.optim.AdamW(own, lr=1e-2, foreach=False, amsgrad=True)},
    "draws": {"make": lambda own: Noisy(own, lr=0.05)},
    "captured lr": {"make": lambda own: torch.optim.Adam(own, lr=torch.tensor(0.01), foreach=False)},
    "captured betas": {"make": lambda own: torch.optim.Adam(
        own, lr=torch.tensor(0.01), betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
    )},
}


def loaded(root: Path, like: dict[str, object], **options: object) -> tuple[Training, fs.LoadReport]:
    """A fresh training that has loaded from the store."""
    training = Training(seed=9, **like)  # type: ignore[arg-type]
    with fs.Checkpointer(root) as checkpointer:
        return training, checkpointer.load(training.state(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("like", TRAININGS.values(), ids=TRAININGS.keys())
def test_the_newest_step_loads_bit_for_bit_and_training_goes_on_as_if_nothing_had_been(
    tmp_path: Path, like: dict[str, object]
) -> None:
    training = Training(**like)  # type: ignore[arg-type]
    events = run(training, tmp_path, 1, 12)
    assert steps_of(events, fs.Committed) == [1], "one whole checkpoint"
    assert steps_of(events, fs.Journaled) == list(range(2, 13))
    expected = bits(training)
    again, report = loaded(tmp_path, like)
    assert report.step == 12
    assert report.replay is not None
    assert (report.replay.base, report.replay.steps, report.replay.exactness) == (1, 11, "exact")
    assert same(bits(again), expected)
    for step in range(13, 16):
        again.train_step(step)
    there = bits(again)
    other, _ = loaded(tmp_path, like)
    events = run(other, tmp_path, 13, 15)
    assert same(bits(other), there)
    third, report = loaded(tmp_path, like)
    assert report.step == 15
    assert same(bits(third), there)


def test_a_job_goes_on_in_the_journal_of_the_job_before(tmp_path: Path) -> None:
    training = Training()
    run(training, tmp_path, 1, 5)
    for first in (6, 8):  # twice, the second time from a journal that begins in one
        training = Training(seed=9)
        with fs.Checkpointer(tmp_path, every_step=True) as checkpointer:
            checkpointer.load(training.state())
            for step in (first, first + 1):
                training.train_step(step)
                save = checkpointer.save(step, training.state(step))
            assert save.committed.result().journal_step == step
    assert catalog.steps(LocalStore(tmp_path)) == (1,)
    again, report = loaded(tmp_path, {})
    assert report.step == 9
    assert same(bits(again), bits(training))


def six_steps(place: Path) -> dict[int, Mapping[str, object]]:
    """Six steps of a training, each saved; all of it after each of them."""
    training, by_step = Training(), {}
    with fs.Checkpointer(place, every_step=True) as checkpointer:
        for step in range(1, 7):
            training.train_step(step)
            checkpointer.save(step, training.state(step))
            by_step[step] = bits(training)
    return by_step


def test_each_step_loads_by_its_number(tmp_path: Path) -> None:
    by_step = six_steps(tmp_path)
    for step, expected in by_step.items():
        again, report = loaded(tmp_path, {}, step=step)
        assert report.step == step
        assert same(bits(again), expected)
    with pytest.raises(fs.NoCheckpointError):
        loaded(tmp_path, {}, step=7)


def test_what_takes_checkpoints_alone_says_that_a_step_is_in_the_journal_and_how_to_get_it(tmp_path: Path) -> None:
    place = tmp_path / "run"
    six_steps(place)
    for ask in (
        lambda: fs.open(place, step=4), lambda: fs.export(place, tmp_path / "out", to="hf", step=4),
        lambda: fs.pack(place, tmp_path / "out", step=4),
    ):
        with pytest.raises(fs.NoCheckpointError, match=r"step 4 in .*: it is in the journal after step 1") as caught:
            ask()
        assert caught.value.facts["found"] == "steps 1; a journal after step 1, with steps 2 to 6"
        assert "load(state, step=4)" in str(caught.value.facts["next"])
    completed = subprocess.run(
        [sys.executable, "-m", "flowstone", "show", str(place), "--step", "4"], capture_output=True, text=True
    )
    assert completed.returncode == 2
    assert "load(state, step=4)" in completed.stderr
    with fs.Checkpointer(place) as checkpointer:  # no step at all
        for act in (lambda: checkpointer.load(Training().state(), step=7), lambda: checkpointer.rewind(7)):
            with pytest.raises(fs.NoCheckpointError, match=r"no checkpoint of step 7 in .*run\n") as caught:
                act()
            assert caught.value.facts["found"] == "steps 1; a journal after step 1, with steps 2 to 6"


def test_steps_after_a_step_of_the_journal_are_saved_anew_once_the_others_are_set_aside(tmp_path: Path) -> None:
    by_step = six_steps(tmp_path)
    training = Training(seed=9)
    with fs.Checkpointer(tmp_path, every_step=True) as checkpointer:
        assert checkpointer.load(training.state(), step=3).step == 3
        training.train_step(4)
        with pytest.raises(fs.StepExistsError, match=r"rewind\(3\)"):
            checkpointer.save(4, training.state(4))
        checkpointer.rewind(3)
        for step in range(4, 9):
            if step > 4:
                training.train_step(step)
            checkpointer.save(step, training.state(step))
            by_step[step] = bits(training)
    for step in range(4, 9):
        again, report = loaded(tmp_path, {}, step=step)
        assert report.step == step
        assert same(bits(again), by_step[step])


def test_steps_after_the_checkpoint_of_a_journal_are_not_saved_anew_before_a_rewind(tmp_path: Path) -> None:
    by_step = six_steps(tmp_path)
    training = Training(seed=9)
    with fs.Checkpointer(tmp_path, every_step=True) as checkpointer:
        assert checkpointer.load(training.state(), step=1).step == 1
        training.train_step(2)
        with pytest.raises(fs.StepExistsError, match=r"rewind\(1\)"):
            checkpointer.save(2, training.state(2))
    again, report = loaded(tmp_path, {})
    assert report.step == 6
    assert same(bits(again), by_step[6])


def test_a_step_that_goes_on_from_an_older_checkpoint_is_saved_whole(tmp_path: Path) -> None:
    run(Training(), tmp_path, 1, 1)
    training = Training(seed=9)
    with fs.Checkpointer(tmp_path) as checkpointer:  # without a journal
        checkpointer.load(training.state())
        for step in (2, 3):
            training.train_step(step)
            checkpointer.save(step, training.state(step))
    events: list[fs.Event] = []
    with fs.Checkpointer(tmp_path, every_step=True, on_event=events.append) as checkpointer:
        checkpointer.load(training.state(), step=1)
        for step in (4, 5):
            training.train_step(step)
            assert checkpointer.save(step, training.state(step)).committed.result().step == 4
    assert (steps_of(events, fs.Committed), steps_of(events, fs.Journaled)) == ([4], [5])
    again, report = loaded(tmp_path, {})
    assert report.step == 5
    assert same(bits(again), bits(training))


def test_a_rewind_into_a_journal_ends_it_there(tmp_path: Path) -> None:
    training = Training()
    run(training, tmp_path, 1, 6)
    training = Training(seed=9)
    with fs.Checkpointer(tmp_path, every_step=True) as checkpointer:
        checkpointer.load(training.state(), step=4)
        expected = bits(training)
        with pytest.raises(fs.StepExistsError, match="rewind"):
            checkpointer.save(5, training.state(5))
        checkpointer.rewind(4)
        latest = checkpointer.latest()
        assert latest is not None
        assert latest.journal_step == 4
    again, report = loaded(tmp_path, {})
    assert report.step == 4
    assert same(bits(again), expected)
    events = run(again, tmp_path, 5, 6)
    assert steps_of(events, fs.Committed) == [5], "what was loaded without every_step is saved whole first"
    assert loaded(tmp_path, {})[1].step == 6


def test_what_cannot_be_replayed_is_saved_whole_and_the_event_says_why(tmp_path: Path) -> None:
    training, events = Training(), []
    with fs.Checkpointer(tmp_path, every_step=True, on_event=events.append) as checkpointer:
        for step in range(1, 10):
            training.train_step(step)
            if step == 4:
                with torch.no_grad():
                    training.model[0].weight.mul_(0.5)  # not by the optimizer
            if step == 7:
                training.model[2].p = 0.1  # is in no checkpoint
                training.optimizer.step(lambda: torch.zeros(()))
            checkpointer.save(step, training.state(step))
    assert steps_of(events, fs.NotJournaled) == [4, 7]
    assert steps_of(events, fs.Committed) == [1, 4, 7]
    assert any("was changed between steps" in event.reason for event in events if isinstance(event, fs.NotJournaled))
    again, report = loaded(tmp_path, {})
    assert (report.step, report.replay.base if report.replay else None) == (9, 7)
    assert same(bits(again), bits(training))


def test_lbfgs_is_saved_whole_at_every_step(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(5))
    model = torch.nn.Module()
    model.weight = weight
    optimizer = torch.optim.LBFGS([weight], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    events: list[fs.Event] = []
    with fs.Checkpointer(tmp_path, every_step=True, on_event=events.append) as checkpointer:
        for step in (1, 2, 3):
            optimizer.step(closure)
            checkpointer.save(step, {"model": model, "optimizer": optimizer})
    assert steps_of(events, fs.Committed) == [1, 2, 3]
    assert steps_of(events, fs.NotJournaled) == [2, 3]


def test_several_optimizers_and_several_steps_between_saves(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 10))
        return model, [adamw(list(model[0].parameters())), momentum(list(model[1].parameters()))]

    def state(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, object]:
        return {"model": model, "first": optimizers[0], "second": optimizers[1]}

    model, optimizers = make(0)
    with fs.Checkpointer(tmp_path, every_step=True) as checkpointer:
        for step in range(1, 13):
            model(torch.randn(4, 200)).square().mean().backward()  # gradients accumulate in place
            optimizers[step % 2].step()
            if step % 3 == 0:
                optimizers[0].step()
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none=False)
                checkpointer.save(step, state(model, optimizers))
    again, theirs = make(1)
    with fs.Checkpointer(tmp_path) as checkpointer:
        report = checkpointer.load(state(again, theirs))
    assert report.replay is not None
    assert report.replay.steps == 3
    assert same(dict(again.state_dict()), dict(model.state_dict()))


def test_a_whole_save_that_ends_a_journal_begins_after_that_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its retention removes the journal, whose directory another thread would still be syncing."""
    order: list[str] = []
    may_create = threading.Event()
    create = journaling._create

    def slow(store: Store, opening: JournalHeader) -> AppendFile:
        may_create.wait()
        made = create(store, opening)
        order.append("journal")
        return made

    monkeypatch.setattr(journaling, "_create", slow)
    training = Training()
    with fs.Checkpointer(tmp_path, every_step=True, recovery_s=1e-9) as checkpointer:
        saves = checkpointer._saves
        assert isinstance(saves, EveryStep)
        whole, awaited = saves._saves.save, saves._journaling.await_durable

        def save_whole(*arguments: Any) -> fs.Save:
            order.append("whole")
            may_create.set()
            return whole(*arguments)

        def await_durable() -> None:
            pending = saves._journaling._pending
            if pending is not None and not pending.is_open:
                may_create.set()
            awaited()

        monkeypatch.setattr(saves._saves, "save", save_whole)
        monkeypatch.setattr(saves._journaling, "await_durable", await_durable)
        for step in (1, 2):
            training.train_step(step)
            checkpointer.save(step, training.state(step)).committed.result()
    assert order == ["whole", "journal", "whole"]


def test_a_whole_checkpoint_follows_once_a_load_would_take_too_long(tmp_path: Path) -> None:
    training = Training()
    events = run(training, tmp_path, 1, 10, recovery_s=1e-9, keep=1)
    whole = steps_of(events, fs.Committed)
    assert len(whole) > 2
    assert whole[0] == 1
    assert steps_of(events, fs.Journaled)[: whole[1] - 1] == list(range(2, whole[1] + 1)), "journaled as well"
    assert not steps_of(events, fs.NotJournaled)
    again, report = loaded(tmp_path, {})
    assert report.step == 10
    assert same(bits(again), bits(training))
    kept = [journal.header.after for journal in journals.list_journals(LocalStore(tmp_path))]
    assert all(after >= catalog.steps(LocalStore(tmp_path))[-1] for after in kept), "older journals go"


def test_the_rate_that_a_load_was_measured_at_decides_when_a_whole_checkpoint_is_due(tmp_path: Path) -> None:
    run(Training(), tmp_path, 1, 1)
    training, events = Training(seed=9), list[fs.Event]()
    with fs.Checkpointer(tmp_path, every_step=True, recovery_s=50, on_event=events.append) as checkpointer:
        report = checkpointer.load(training.state())
        saves = checkpointer._saves
        assert isinstance(saves, EveryStep)
        assert saves.read_rate == report.bytes / report.seconds
        for step, rate in ((2, 1e12), (3, 1e12), (4, 1.0)):  # at a byte a second, no state is read in 50 s
            saves.read_rate = rate
            training.train_step(step)
            checkpointer.save(step, training.state(step)).committed.result()
    assert steps_of(events, fs.Journaled) == [2, 3, 4]
    assert steps_of(events, fs.Committed) == [4]


def test_steps_that_a_load_has_replayed_count_for_the_next_load_as_long_as_they_took(tmp_path: Path) -> None:
    run(Training(), tmp_path, 1, 8)
    training = Training(seed=9)
    with fs.Checkpointer(tmp_path, every_step=True, recovery_s=50) as checkpointer:
        report = checkpointer.load(training.state())
        assert report.replay is not None
        assert report.replay.steps == 7
        saves = checkpointer._saves
        assert isinstance(saves, EveryStep)
        reading_s = report.seconds - report.replay.seconds
        assert saves.read_rate == pytest.approx(report.bytes / reading_s), "of the checkpoint alone"
        saves.read_rate = 1e30
        assert saves._recovery_estimate_s() == pytest.approx(report.replay.seconds)
        training.train_step(9)
        checkpointer.save(9, training.state(9)).committed.result()
        assert saves._recovery_estimate_s() > report.replay.seconds, "and the steps since then"


def test_a_job_that_is_started_again_and_again_does_not_make_its_journals_longer_than_may_be(tmp_path: Path) -> None:
    run(Training(), tmp_path, 1, 3)
    training, events = Training(seed=9), list[fs.Event]()
    with fs.Checkpointer(tmp_path, every_step=True, on_event=events.append) as checkpointer:
        report = checkpointer.load(training.state())
        assert report.replay is not None
        saves = checkpointer._saves
        assert isinstance(saves, EveryStep)
        saves.read_rate, saves._recovery_s = 1e30, report.replay.seconds  # no load may take longer: a step is too much
        training.train_step(4)
        checkpointer.save(4, training.state(4)).committed.result()
    assert steps_of(events, fs.Journaled) == [4]
    assert steps_of(events, fs.Committed) == [4]


def test_what_no_optimizer_explains_is_logged_if_it_is_small_and_saved_whole_if_not(tmp_path: Path) -> None:
    for length, whole in ((1000, [1]), (2_000_000, [1, 2, 3])):
        root = tmp_path / str(length)
        training, average, events = Training(), torch.zeros(length), []
        with fs.Checkpointer(root, every_step=True, on_event=events.append) as checkpointer:
            for step in (1, 2, 3):
                training.train_step(step)
                average += step
                checkpointer.save(step, {**training.state(step), "average": average})
        assert steps_of(events, fs.Committed) == whole
        again, other = Training(seed=9), torch.ones(length)
        with fs.Checkpointer(root) as checkpointer:
            assert checkpointer.load({**again.state(), "average": other}).step == 3
        assert torch.equal(other, average)
        assert same(bits(again), bits(training))


def test_another_layout_loads_the_checkpoint_and_says_what_is_missing(tmp_path: Path) -> None:
    training, events = Training(), []
    run(training, tmp_path, 1, 5)
    with fs.Checkpointer(tmp_path, on_event=events.append) as checkpointer:
        report = checkpointer.load({"model": training.model})
    assert report.step == 1
    assert report.replay is not None
    assert (report.replay.steps, report.replay.newest) == (0, 5)
    assert "no optimizer" in report.replay.reason
    assert [event.newest for event in events if isinstance(event, fs.NotReplayed)] == [5]


def _file(root: Path) -> Path:
    (result,) = root.glob("journal-*/rank-00000.journal")
    return result


def test_a_torn_tail_is_cut_to_the_newest_whole_step(tmp_path: Path) -> None:
    training = Training()
    run(training, tmp_path, 1, 5)
    (journal,) = journals.list_journals(LocalStore(tmp_path))
    last = journals.complete_frames(LocalStore(tmp_path), journal, 0)[-1]
    with _file(tmp_path).open("r+b") as file:
        file.seek(last.offset + last.frame.frame_bytes - 5000)
        file.write(b"\0" * 5000)
    again, report = loaded(tmp_path, {})
    assert report.step == 4
    with fs.Checkpointer(tmp_path, every_step=True) as checkpointer:
        checkpointer.load(again.state())
        again.train_step(5)
        checkpointer.save(5, again.state(5))
    other, report = loaded(tmp_path, {})
    assert report.step == 5
    assert same(bits(other), bits(again))


def test_damage_in_the_middle_raises_and_a_fallback_ends_before_it(tmp_path: Path) -> None:
    by_step = six_steps(tmp_path)
    (journal,) = journals.list_journals(LocalStore(tmp_path))
    place = journals.complete_frames(LocalStore(tmp_path), journal, 0)[2]  # of step 4
    with _file(tmp_path).open("r+b") as file:
        file.seek(place.offset + place.frame.frame_bytes - 20_000)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(fs.DamagedError, match="step 4"):
        loaded(tmp_path, {})
    again, report = loaded(tmp_path, {}, fallback=True)
    assert report.step == 3
    assert same(bits(again), by_step[3])


def test_a_replay_that_differs_is_noticed_and_named(tmp_path: Path) -> None:
    training = Training(make=momentum)
    run(training, tmp_path, 1, 12)

    class Other(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            super().step(closure)
            with torch.no_grad():
                self.param_groups[0]["params"][0].view(-1)[0] += 1e-6

    Other.__name__ = "SGD"
    groups = momentum(list(Training().model.parameters())).param_groups
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def other(own: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return Other([{"params": own[:1], **options[0]}, {"params": own[1:], **options[1]}], lr=0.05)

    again = Training(make=other, seed=9)
    with fs.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(fs.ReplayError, match=r"step \d+ could not be replayed bit for bit"):
            checkpointer.load(again.state())
        with pytest.raises(fs.DamagedError, match="part of the state has changed"):
            checkpointer.save(13, again.state())


def test_ls_and_latest_tell_where_a_journal_leads(tmp_path: Path) -> None:
    run(Training(), tmp_path, 1, 4)
    listed = subprocess.run(
        [sys.executable, "-m", "flowstone", "ls", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "a journal continues from step 1 to step 4" in listed.stdout
    as_json = subprocess.run(
        [sys.executable, "-m", "flowstone", "ls", "--json", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert json.loads(as_json.stdout)["journal"] == {"base": 1, "newest": 4}
    with fs.Checkpointer(tmp_path) as checkpointer:
        latest = checkpointer.latest()
        assert latest is not None
        assert (latest.step, latest.journal_step) == (1, 4)


IMPORTS = os.pathsep.join(map(str, [Path(__file__).parent, Path(__file__).parents[1] / "support"]))
_KILLED = """
import os, sys
sys.path[:0] = sys.argv[2].split(os.pathsep)
import torch
torch.set_num_threads(1)
import flowstone as fs
from journaled import Training, momentum, adamw
make = momentum if sys.argv[3] == "momentum" else adamw
training = Training(make=make, seed=0, keeps_gradients=sys.argv[4] == "keeps", width=600, skips=(5, 11))
with fs.Checkpointer(sys.argv[1], every_step=True, recovery_s=0.5, keep=2) as checkpointer:
    done = 0
    if checkpointer.latest() is not None:
        done = checkpointer.load(training.state()).step
    print("loaded", done, flush=True)
    for step in range(done + 1, 81):
        training.train_step(step)
        save = checkpointer.save(step, training.state(step))
        print("begun", step, flush=True)
"""


@pytest.mark.parametrize(("make", "keeps"), [(adamw, ""), (momentum, "keeps")], ids=["adamw", "momentum"])
def test_killed_at_any_instant_at_most_the_step_in_progress_is_lost_and_the_end_is_the_same(
    tmp_path: Path, make: Make, keeps: str
) -> None:
    """Each save returns once the step before it is durable."""
    command = [sys.executable, "-c", _KILLED, str(tmp_path), IMPORTS, make.__name__, keeps]
    killed_until_it_ends(command, seed=5, lag_steps=1, pause_s=0.01)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        like = {"make": make, "keeps_gradients": bool(keeps), "width": 600, "skips": (5, 11)}
        undisturbed = Training(seed=0, **like)  # type: ignore[arg-type]
        for step in range(1, 81):
            undisturbed.train_step(step)
        expected = bits(undisturbed)
        actual, report = loaded(tmp_path, like)
        assert report.step == 80
        assert same(bits(actual), expected)
    finally:
        torch.set_num_threads(threads)


def test_a_save_returns_once_the_step_before_is_durable_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the disk is: here, as slow as the test wants."""
    sync, may_sync = LocalAppendFile.sync, threading.Event()

    def waiting(appending: LocalAppendFile) -> None:
        assert may_sync.wait(60)
        sync(appending)

    monkeypatch.setattr(LocalAppendFile, "sync", waiting)
    training, durable = Training(), []
    events: list[fs.Event] = []
    with fs.Checkpointer(tmp_path, every_step=True, on_event=events.append) as checkpointer:
        try:
            training.train_step(1)
            checkpointer.save(1, training.state(1)).committed.result()
            training.train_step(2)
            checkpointer.save(2, training.state(2))
            training.train_step(3)
            threading.Timer(0.3, lambda: (durable.append(steps_of(events, fs.Journaled)), may_sync.set())).start()
            checkpointer.save(3, training.state(3))
            assert durable == [[]], "it has waited"
            assert 2 in steps_of(events, fs.Journaled)
        finally:
            may_sync.set()


def test_a_journal_that_goes_while_it_is_looked_for_is_no_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(Training(), tmp_path, 1, 3)
    store, names = LocalStore(tmp_path), LocalStore.names

    def removed_meanwhile(self: LocalStore, path: str = "") -> tuple[str, ...]:
        result = names(self, path)
        if path.startswith("journal-"):
            shutil.rmtree(tmp_path / path)
        return result

    monkeypatch.setattr(LocalStore, "names", removed_meanwhile)
    assert journals.list_journals(store) == []
    assert not caplog.records
