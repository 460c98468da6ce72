"""Changes that no optimizer step explains, with every step saved: each is saved in full, or reported; none is lost."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import flowstone as fs
from flowstone.journal import journals
from flowstone.journal.journal_format import StepRow, decode_document
from flowstone.stage.samples import Samples
from flowstone.store.local import LocalStore
from flowstone.store.local_append import LocalAppendFile
from flowstone.table.pieces import Places
from flowstone.torch import tensor_snapshot
from interrupts import Struck, struck
from journaled import Training, bits, same


class Steps:
    """A training whose steps are saved, with what is seen of that."""

    def __init__(self, root: Path, training: Training | None = None, **options: object) -> None:
        self.root, self.training = root, training or Training()
        self.events: list[fs.Event] = []
        self.checkpointer = fs.Checkpointer(root, every_step=True, on_event=self.events.append, **options)  # type: ignore[arg-type]
        self.step = 0

    def train_step(self, count: int = 1) -> None:
        for _ in range(count):
            self.step += 1
            self.training.train_step(self.step)

    def save(self, **more: object) -> None:
        self.checkpointer.save(self.step, {**self.training.state(self.step), **more})

    def go(self, count: int) -> None:
        for _ in range(count):
            self.train_step()
            self.save()

    def of(self, kind: type[fs.Event]) -> list[int]:
        return [event.step for event in self.events if isinstance(event, kind)]

    @property
    def reasons(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, fs.NotJournaled)]

    def check(self, like: Training | None = None) -> fs.LoadReport:
        """A fresh training that loads is what this one is."""
        self.checkpointer.close()
        again = like or Training(seed=9)
        with fs.Checkpointer(self.root) as checkpointer:
            report = checkpointer.load(again.state())
        assert report.step == self.step
        assert same(bits(again), bits(self.training))
        return report


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Steps]:
    made = Steps(tmp_path)
    try:
        yield made
    finally:
        made.checkpointer.close()


def slots(training: Training) -> dict[str, torch.Tensor]:
    return training.optimizer.state[training.model[0].weight]


def edit_slot(training: Training) -> None:
    slots(training)["exp_avg"].mul_(0.5)


def edit_slot_unseen_by_counters(training: Training) -> None:
    slots(training)["exp_avg"].data.mul_(0.5)


def replace_slot(training: Training) -> None:
    slots(training)["exp_avg"] = slots(training)["exp_avg"] * 0.5


def load_slots(training: Training) -> None:
    state = training.optimizer.state_dict()
    state["state"][0]["exp_avg"] = torch.ones(160, 40)
    training.optimizer.load_state_dict(state)


def clip_weights_unseen_by_counters(training: Training) -> None:
    training.model[0].weight.data.clamp_(-0.01, 0.01)


def point_weight_elsewhere(training: Training) -> None:
    weight = training.model[0].weight
    weight.data = weight.data * 0.5


def split_group(training: Training) -> None:
    group = training.optimizer.param_groups[0]
    rest = group["params"][1:]
    del group["params"][1:]
    training.optimizer.param_groups.append({**group, "params": rest, "lr": 0.5})


CHANGES = [
    edit_slot, edit_slot_unseen_by_counters, replace_slot, load_slots, clip_weights_unseen_by_counters,
    point_weight_elsewhere, split_group,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_optimizer_or_its_weights_between_steps_is_saved_whole(
    steps: Steps, change: Callable[[Training], None]
) -> None:
    steps.go(3)
    change(steps.training)
    steps.go(3)
    assert steps.of(fs.NotJournaled) == [4]
    like = Training(seed=9)
    if change is split_group:
        split_group(like)
    steps.check(like)


@pytest.mark.parametrize("when", ["before the first save", "later"])
def test_a_hook_behind_the_step_that_edits_weights_is_seen_whenever_it_was_registered(
    tmp_path: Path, when: str
) -> None:
    training = Training()

    def shrink(*_: object) -> None:
        with torch.no_grad():
            training.model[0].weight.mul_(0.99)

    if when != "later":
        training.optimizer.register_step_post_hook(shrink)  # before any of ours
    steps = Steps(tmp_path, training)
    steps.go(2)
    if when == "later":
        training.optimizer.register_step_post_hook(shrink)
    steps.go(3)
    assert steps.of(fs.NotJournaled) == ([3, 4, 5] if when == "later" else [2, 3, 4, 5])
    steps.check()


def test_weights_and_moments_are_sampled_together_three_times_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(tmp_path)
    steps.go(3)
    counts: list[int] = []
    sampled = tensor_snapshot.take_samples

    def counting(places: Places, rows: NDArray[np.int64], lengths: NDArray[np.uint64], *, seed: int) -> Samples:
        counts.append(len(rows))
        return sampled(places, rows, lengths, seed=seed)

    monkeypatch.setattr(tensor_snapshot, "take_samples", counting)
    steps.go(4)
    optimizer = steps.training.optimizer
    own = sum(len(group["params"]) for group in optimizer.param_groups)
    slots = sum(isinstance(tensor, torch.Tensor) for of in optimizer.state.values() for tensor in of.values())
    assert counts == 3 * 4 * [own + slots]  # before the step, after it, and at its save
    assert steps.of(fs.NotJournaled) == []


def test_a_hook_before_the_step_that_was_put_behind_ours_is_not_overlooked(steps: Steps) -> None:
    steps.go(2)

    def halve(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad * 0.5

    steps.training.optimizer.register_step_pre_hook(halve)
    steps.go(3)
    assert steps.of(fs.NotJournaled) == [3]
    steps.check()


def test_a_save_that_raises_does_not_lose_the_steps_that_it_was_about(steps: Steps) -> None:
    steps.go(2)
    steps.train_step()
    with pytest.raises(fs.UnsupportedStateError):
        steps.save(odd=object())
    steps.go(2)
    assert steps.of(fs.NotJournaled) == [4]
    assert "gradients were dropped" in steps.reasons[0]
    steps.check()


def test_windows_follow_one_another_whatever_numbers_steps_have(tmp_path: Path) -> None:
    training = Training()
    with fs.Checkpointer(tmp_path, every_step=True) as checkpointer:
        for step in range(8, 90, 8):
            training.train_step(step)
            checkpointer.save(step, training.state(step))
    store = LocalStore(tmp_path)
    (journal,) = journals.list_journals(store)
    path = f"{journal.directory}/rank-00000.journal"
    rows = [
        decode_document(store.read(path, offset=place.offset, length=place.frame.payload_offset), place.frame, StepRow,
                        path=path)
        for place in journals.complete_frames(store, journal, 0)
    ]
    assert {row.window for row in rows if row is not None} == set(range(8))


def test_a_frame_that_fails_while_the_next_journal_begins_is_told_and_nothing_goes_on_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save after it has begun, and waits for it, when it fails."""
    sync, fails, may_go = LocalAppendFile.sync, threading.Event(), threading.Event()

    def failing(appending: LocalAppendFile) -> None:
        if fails.is_set():
            assert may_go.wait(60)
            fails.clear()
            raise fs.StorageError("the disk is gone", errno=5)
        sync(appending)

    monkeypatch.setattr(LocalAppendFile, "sync", failing)
    steps = Steps(tmp_path)
    try:
        steps.go(2)
        steps.checkpointer.wait()
        steps.train_step()
        fails.set()
        steps.checkpointer._saves._recovery_s = 1e-9  # type: ignore[union-attr]
        steps.save()  # into the first journal, and whole
        steps.train_step()
        threading.Timer(0.3, may_go.set).start()
        try:
            steps.save()
        except fs.SaveFailedError:
            pass
        else:
            with pytest.raises(fs.SaveFailedError, match="the disk is gone"):
                steps.checkpointer.wait()
        assert not fails.is_set(), "it has failed"
        assert not {3, 4} & {*steps.of(fs.Journaled)}
        steps.go(2)
        steps.check()
    finally:
        may_go.set()
        steps.checkpointer.close()


class Targeted(Training):
    """With a target network inside the module, which no optimizer steps."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.model.add_module("target", torch.nn.Linear(160, 160).requires_grad_(requires_grad=False))

    def train_step(self, step: int) -> None:
        target = self.model.target
        del self.model.target  # it is behind the last layer
        super().train_step(step)
        self.model.add_module("target", target)


def follow(steps: Steps, rows: int) -> None:
    """The target's first rows follow the weights, in a way that no version counter shows."""
    target, source = steps.training.model.target.weight, steps.training.model[4].weight
    target.data[:rows].mul_(0.9).add_(source.detach()[:rows], alpha=0.1)


@pytest.mark.parametrize("rows", [160, 1], ids=["all of it", "a row"])
def test_a_frozen_network_that_changes_unseen_by_counters_is_not_replayed_as_it_was(tmp_path: Path, rows: int) -> None:
    steps = Steps(tmp_path, Targeted())
    steps.go(10)
    assert not steps.reasons, "it stays as it is"
    for _ in range(2 if rows == 160 else 20):
        steps.train_step()
        follow(steps, rows)
        steps.save()
    steps.go(1)
    assert steps.reasons
    report = steps.check(Targeted(seed=9))
    assert report.replay is None or report.replay.exactness == "exact"


def test_what_changes_in_a_frozen_network_is_not_called_exact_before_it_is_noticed(tmp_path: Path) -> None:
    """A load of the steps in between finds the fingerprint of that row."""
    steps = Steps(tmp_path, Targeted())
    steps.go(2)
    steps.train_step()
    follow(steps, 1)
    for _ in range(8):
        steps.save()
        steps.train_step()
    steps.checkpointer.close()
    again = Targeted(seed=9)
    with fs.Checkpointer(tmp_path) as checkpointer, pytest.raises(fs.ReplayError, match="bit for bit"):
        checkpointer.load(again.state(), step=steps.of(fs.Journaled)[-1])


def test_a_network_that_changed_and_is_frozen_since_a_load_is_replayed(tmp_path: Path) -> None:
    """One journal logs its values, and the next, of the process that went on, none: they are in its fingerprints."""
    steps = Steps(tmp_path, Targeted())
    steps.go(2)
    for _ in range(3):
        steps.train_step()
        follow(steps, 160)
        steps.save()
    steps.check(Targeted(seed=9))
    assert steps.of(fs.Journaled)[-2:] == [4, 5]
    on = Steps(tmp_path, Targeted(seed=9))
    on.checkpointer.load(on.training.state())
    on.step = steps.step
    on.go(10)
    assert not on.reasons
    report = on.check(Targeted(seed=8))
    assert report.replay is not None
    assert (report.replay.base, report.replay.exactness) == (3, "exact")


class Replacing(torch.optim.SGD):
    """Makes new tensors of its momentum in each step, in a list too, and keeps a sum that is of no parameter."""

    is_strided = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        common = self.state["common"]  # type: ignore[index]
        common.setdefault("sum", torch.zeros(3))
        for group in self.param_groups:
            for parameter in group["params"]:
                common["sum"].add_(parameter.grad.sum())
                own = self.state[parameter]
                own["mean"] = (own["mean"] if "mean" in own else torch.zeros_like(parameter)) * 0.9 + parameter.grad
                own["nested"] = [(own["mean"] * 2).t() if self.is_strided else own["mean"] * 2]
                parameter.sub_(own["mean"], alpha=group["lr"])


def replacing(parameters: list[torch.nn.Parameter]) -> Replacing:
    return Replacing(parameters, lr=0.01)


def test_an_optimizer_that_replaces_its_slots_is_replayed(tmp_path: Path) -> None:
    steps = Steps(tmp_path, Training(make=replacing))
    steps.go(12)
    assert not steps.reasons
    keep = [torch.randn(160, 160) for _ in range(50)]  # their memory is not that of the slots
    again = Training(make=replacing, seed=9)
    report = steps.check(again)
    assert report.replay is not None
    assert (report.replay.steps, report.replay.exactness) == (11, "exact")
    assert same(again.optimizer.state["common"], steps.training.optimizer.state["common"])  # type: ignore[index]
    del keep


def test_slots_that_a_load_makes_anew_and_that_are_not_in_one_run_of_memory_are_saved_whole(tmp_path: Path) -> None:
    steps = Steps(tmp_path, Training(make=replacing))
    assert isinstance(steps.training.optimizer, Replacing)
    steps.training.optimizer.is_strided = True
    steps.go(4)
    assert steps.of(fs.NotJournaled) == [2, 3, 4]
    assert "not contiguous in memory" in steps.reasons[0]
    steps.check(Training(make=replacing, seed=9))


def test_gradients_of_steps_without_a_save_are_not_kept_without_limit(tmp_path: Path) -> None:
    model = torch.nn.Linear(2500, 1000, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state: dict[str, object] = {"model": model, "optimizer": optimizer}
    events: list[fs.Event] = []

    def train_step() -> None:
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()

    with fs.Checkpointer(tmp_path, every_step=True, on_event=events.append) as checkpointer:
        for step, steps in enumerate((1, 5, 8, 2)):
            for _ in range(steps):
                train_step()
            checkpointer.save(step, state)
    whys = [(event.step, event.reason) for event in events if isinstance(event, fs.NotJournaled)]
    assert [step for step, _ in whys] == [2]
    assert "7 steps without a save" in whys[0][1]


def test_an_interrupt_at_any_line_of_a_save_leaves_one_that_ends_and_a_next_one_that_is_right(tmp_path: Path) -> None:
    """Of the modules of the journal; some of the lines, as there are hundreds."""
    places = {"every_step.py", "journaling.py"}
    line, ended = 1, False
    while not ended:
        steps = Steps(tmp_path / str(line))
        steps.go(2)
        steps.train_step()
        try:
            struck(steps.save, line, of=places)
            ended = True
        except Struck:
            pass
        done = threading.Event()

        def proceed(steps: Steps = steps, done: threading.Event = done) -> None:
            steps.go(2)
            done.set()

        thread = threading.Thread(target=proceed, daemon=True)
        thread.start()
        assert done.wait(60), f"it hangs after an interrupt at line {line}"
        thread.join()
        steps.check()
        line += 31


def test_gradients_that_the_loop_changes_after_the_step_are_copied_from_then_on(steps: Steps) -> None:
    for _ in range(6):
        steps.train_step()
        for parameter in steps.training.model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(2)  # to be told of, say
        steps.save()
    assert len(steps.reasons) <= 1
    steps.check()


def step_compiled(steps: Steps) -> None:
    steps.go(2)
    optimizer = steps.training.optimizer
    steps.training.optimizer.zero_grad()
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    for parameter in steps.training.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    compiled()
    steps.go(2)
    assert steps.of(fs.NotJournaled) == [3]
    assert "compiled" in steps.reasons[0]
    steps.check()


def test_a_step_inside_of_a_compiled_function_is_saved_whole(steps: Steps) -> None:
    """Its kernels need not be those of the optimizer's own step. Torch's wrapper shows that; here it compiles nothing.
    """
    with torch.compiler.set_stance("force_eager"):
        step_compiled(steps)


@pytest.mark.soak
def test_a_compiled_step_is_saved_whole(steps: Steps) -> None:
    step_compiled(steps)


@pytest.mark.parametrize("removed", ["step-00000001", "journal-*", "journal-*/*", "both"])
def test_steps_whose_checkpoint_or_journal_was_removed_are_not_called_durable(tmp_path: Path, removed: str) -> None:
    steps = Steps(tmp_path / "run", keep=1)
    steps.go(4)
    steps.checkpointer.wait()
    for pattern in ("step-00000001", "journal-*") if removed == "both" else (removed,):
        for path in list(steps.root.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    steps.go(3)
    assert steps.of(fs.NotJournaled) == [5]
    gone = "step-00000001" if removed == "step-00000001" else "journal-00000001-"
    assert steps.reasons[0].startswith(gone)
    assert steps.check().step == 7
    assert steps.of(fs.Committed) == [1, 5]


def test_what_a_whole_save_replaces_was_not_removed_by_others(tmp_path: Path) -> None:
    steps = Steps(tmp_path / "run", keep=1, recovery_s=1e-4)
    for _ in range(4):
        steps.go(3)
        steps.checkpointer.wait()  # the next step is free to be saved whole as well
    assert len(steps.of(fs.Committed)) > 2
    assert steps.of(fs.NotJournaled) == []
    assert steps.check().step == 12
