"""A journal of a state on a device: the device's fingerprints verify a replay or show a difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import flowstone as fs
from flowstone.journal import every_step, journals
from flowstone.journal.device_values import DeviceValues, ValueGather
from flowstone.journal.fingerprints import FingerprintWindow, window_of
from flowstone.journal.journal_frames import FrameMaker, FrameTensor, StepContent
from flowstone.store.local import LocalStore
from flowstone.table.pieces import Memory, Places
from simulated_device import SimulatedDevice, visible_device

STEPS = 20
MIB = 1 << 20
Change = Callable[["OnDevice", int], None]


class OnDevice:
    """A layer of more than one chunk, its optimizer's slots, and a frozen one, on the device; None: on the host."""

    def __init__(self, far: SimulatedDevice | None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.far, self.layer, self.frozen = far, torch.nn.Linear(700, 600), torch.nn.Linear(300, 200, bias=False)
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)
        self.model = torch.nn.ModuleList([self.layer, self.frozen])
        if far is not None:
            far.take(self.model)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1, momentum=0.9)
        self._give(torch.ones(600, 700), torch.ones(600))
        self.optimizer.step()
        if far is not None:
            far.take_slots(self.optimizer)

    def _give(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        self.layer.weight.grad, self.layer.bias.grad = weight, bias

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def bits(self) -> list[bytes]:
        slots = [slot for of in self.optimizer.state.values() for slot in of.values()]
        return [bytes(tensor.detach().reshape(-1).numpy().data) for tensor in (*self.model.parameters(), *slots)]

    def train_step(self) -> None:
        self._settle()
        self._give(torch.randn(600, 700), torch.randn(600))
        self.optimizer.step()

    def _settle(self) -> None:
        """What a GPU does next comes behind the kernels of a save, and so does what the processor plays of it."""
        if self.far is not None:
            self.far.native.settle()

    def go(self, root: Path, change: Change | None = None) -> list[fs.Event]:
        """Train, and save each step. `change`: called before each."""
        events: list[fs.Event] = []
        with fs.Checkpointer(root, every_step=True, on_event=events.append, recovery_s=1e9) as checkpointer:
            for step in range(1, STEPS + 1):
                if change is not None:
                    change(self, step)
                self.train_step()
                checkpointer.save(step, self.state)
        return events


@pytest.fixture
def far() -> Iterator[SimulatedDevice]:
    with visible_device(SimulatedDevice(64 * MIB)) as device:
        yield device


def loaded(root: Path, into: OnDevice) -> fs.Replay:
    with fs.Checkpointer(root) as checkpointer:
        report = checkpointer.load(into.state)
    assert report.replay is not None
    assert report.replay.steps == STEPS - report.replay.base
    return report.replay


def exactness(root: Path) -> str:
    chain = journals.newest_chain(LocalStore(root))
    assert chain is not None
    return chain.parts[-1].journal.header.exactness


def test_a_replay_of_a_state_on_a_device_is_proven_exact(tmp_path: Path, far: SimulatedDevice) -> None:
    training = OnDevice(far)
    copied = far.native.copied_bytes
    events = training.go(tmp_path)
    assert not any(isinstance(event, fs.NotJournaled) for event in events)
    assert exactness(tmp_path) == "proven"
    assert far.native.copied_bytes - copied < 2 * sum(map(len, training.bits)), "saved whole once, no step is copied"
    again = OnDevice(far, seed=1)
    replay = loaded(tmp_path, again)
    assert (replay.base, replay.exactness, replay.differs_from) == (1, "exact", None)
    assert again.bits == training.bits


@pytest.mark.parametrize("place", [0, 333_333, 419_999])
def test_a_change_on_a_device_that_no_step_made_is_told_from_its_step_on(
    tmp_path: Path, far: SimulatedDevice, place: int
) -> None:
    """Of one bit, through `.data`: no counter moves, no sample is taken there."""
    def change(training: OnDevice, step: int) -> None:
        if step == 7:
            training.layer.weight.data.view(-1).view(torch.int32)[place] ^= 1 << 20

    training = OnDevice(far)
    training.go(tmp_path, change)
    again = OnDevice(far, seed=1)
    replay = loaded(tmp_path, again)
    assert replay.exactness == "tolerance"
    assert replay.differs_from is not None
    assert 7 <= replay.differs_from < 7 + 8, "each bit is in the fingerprint of one step of eight"
    assert again.bits != training.bits


def test_frozen_tensors_on_a_device_are_in_the_fingerprints_and_a_change_of_them_is_saved_whole(
    tmp_path: Path, far: SimulatedDevice
) -> None:
    def change(training: OnDevice, step: int) -> None:
        if step == 12:
            training.frozen.weight.data.view(-1)[5000] += 1

    training = OnDevice(far)
    events = training.go(tmp_path, change)
    left = [e for e in events if isinstance(e, fs.NotJournaled) and e.step > 2]  # then it is known to be frozen
    assert left[0].reason == "'model.1.weight' has changed, but no optimizer updates it"
    assert 12 < left[0].step <= 12 + 9
    again = OnDevice(far, seed=1)
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.load(again.state)
    assert again.bits == training.bits


def test_a_step_does_not_wait_for_digests_of_the_device(
    tmp_path: Path, far: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its kernels come behind them: what a later step writes is in no fingerprint of an earlier one."""
    training, may_read, own = OnDevice(far), Event(), FingerprintWindow.digests

    def digests(window: FingerprintWindow, host: NDArray[np.uint64]) -> list[int]:
        assert may_read.wait(60)
        return own(window, host)

    monkeypatch.setattr(FingerprintWindow, "digests", digests)
    with fs.Checkpointer(tmp_path, every_step=True) as checkpointer:
        may_read.set()
        for step in (1, 2):
            training.train_step()
            checkpointer.save(step, training.state).committed.result(60)
        training.train_step()
        may_read.clear()
        save = checkpointer.save(3, training.state)
        far.native.settle()
        training.train_step()
        assert not save.committed.done()
        may_read.set()
        checkpointer.save(4, training.state).committed.result(60)
    again = OnDevice(far, seed=1)
    with fs.Checkpointer(tmp_path) as checkpointer:
        report = checkpointer.load(again.state)
    assert report.replay is not None
    assert (report.step, report.replay.exactness) == (4, "exact")
    assert again.bits == training.bits


def test_gradients_are_read_with_the_streams_that_were_current_at_save(
    tmp_path: Path, far: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be made on another stream than the default one, for which the journal's thread would not wait."""
    inside, made, own = [0], [], FrameMaker.make

    @contextmanager
    def current() -> Iterator[None]:
        inside[0] += 1
        yield
        inside[0] -= 1

    def make(*arguments: object) -> object:
        made.append(inside[0])
        return own(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(every_step, "copy_current_streams", lambda devices: current if devices == (far.name,) else None)
    monkeypatch.setattr(FrameMaker, "make", make)
    OnDevice(far).go(tmp_path)
    assert made == [1] * len(made)
    assert len(made) > 10


class Normed(OnDevice):
    """With a BatchNorm, whose statistics each forward pass changes, and a buffer that nothing changes."""

    def __init__(self, far: SimulatedDevice | None, seed: int = 0) -> None:
        super().__init__(far, seed)
        self.norm = torch.nn.BatchNorm1d(600, affine=False)
        self.norm.register_buffer("table", torch.arange(300.0))
        self.norm.register_buffer("turned", torch.arange(300.0).view(20, 15))
        if far is not None:
            far.take(self.norm)
        self.norm.turned = self.norm.turned.t() if far is not None else self.norm.turned.t().contiguous()
        self.model.append(self.norm)

    @property
    def bits(self) -> list[bytes]:
        return [*super().bits, *(bytes(buffer.contiguous().view(-1).numpy().data) for buffer in self.norm.buffers())]

    def train_step(self) -> None:
        self._settle()
        self.norm(torch.randn(8, 600))
        super().train_step()


def logged(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of what each frame has of tensors that no optimizer explains."""
    names, own = list[list[str]](), FrameMaker.make

    def make(maker: FrameMaker, number: int, content: StepContent, fingerprint: str) -> list[memoryview]:
        values = content.values | content.device_values()
        names.append(sorted(values))
        return own(maker, number, msgspec.structs.replace(content, values=values, device_values=dict), fingerprint)

    monkeypatch.setattr(FrameMaker, "make", make)
    return names


@pytest.mark.parametrize("where", ["device", "host"])
def test_buffers_that_change_are_logged_with_each_step(
    tmp_path: Path, far: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    names = logged(monkeypatch)
    training, again = (Normed(far if where == "device" else None, seed) for seed in (0, 1))
    events = training.go(tmp_path)
    assert not any(isinstance(event, fs.NotJournaled) for event in events)
    changing = [f"model.2.{name}" for name in ("num_batches_tracked", "running_mean", "running_var")]
    assert names == [changing] * (STEPS - 1)
    replay = loaded(tmp_path, again)
    assert (replay.base, replay.exactness, replay.differs_from) == (1, "exact", None)
    assert again.bits == training.bits


@pytest.mark.parametrize(("saved", "into"), [("device", "host"), ("host", "device")])
def test_logged_buffers_come_to_wherever_the_state_is(
    tmp_path: Path, far: SimulatedDevice, saved: str, into: str
) -> None:
    training, again = (Normed(far if where == "device" else None, seed) for seed, where in enumerate((saved, into)))
    training.go(tmp_path)
    assert loaded(tmp_path, again).differs_from is None
    assert again.bits == training.bits


def test_a_step_does_not_wait_for_buffers_of_the_device_and_later_steps_are_in_no_earlier_frame(
    tmp_path: Path, far: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read, own = Event(), DeviceValues.changed

    def changed(values: DeviceValues, now: ValueGather) -> dict[str, FrameTensor]:
        assert may_read.wait(60)
        return own(values, now)

    monkeypatch.setattr(DeviceValues, "changed", changed)
    training = Normed(far)
    with fs.Checkpointer(tmp_path, every_step=True) as checkpointer:
        may_read.set()
        for step in (1, 2):
            training.train_step()
            checkpointer.save(step, training.state).committed.result(60)
        training.train_step()
        expected = training.bits
        may_read.clear()
        save = checkpointer.save(3, training.state)
        far.native.settle()
        training.train_step()
        assert not save.committed.done()
        may_read.set()
        save.committed.result(60)
    again = Normed(far, seed=1)
    with fs.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load(again.state).step == 3
    assert again.bits == expected


def test_buffers_of_a_device_that_are_too_many_for_a_frame_are_saved_whole(
    tmp_path: Path, far: SimulatedDevice
) -> None:
    training, again = Normed(far), Normed(far, seed=1)
    for tensor in training, again:
        tensor.norm.register_buffer("large", far.tensor(torch.ones(5 * MIB // 4)))
    events = training.go(tmp_path)
    reasons = {event.reason for event in events if isinstance(event, fs.NotJournaled)}
    refused = "'model.2.large' and others on a device, which no optimizer updates, are too large for the journal"
    assert refused in reasons
    with fs.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load(again.state).replay is None
    assert again.bits == training.bits


def test_a_replay_on_the_host_compares_what_a_device_has_digested(tmp_path: Path, far: SimulatedDevice) -> None:
    training = OnDevice(far)
    training.go(tmp_path)
    again = OnDevice(None, seed=1)
    replay = loaded(tmp_path, again)
    assert (replay.exactness, replay.differs_from) == ("tolerance", None), "other processors, and the same bits"
    assert again.bits == training.bits


def test_a_journal_of_the_host_is_replayed_on_a_device_and_not_proven(tmp_path: Path, far: SimulatedDevice) -> None:
    training = OnDevice(None)
    training.go(tmp_path)
    again = OnDevice(far, seed=1)
    replay = loaded(tmp_path, again)
    assert (replay.exactness, replay.differs_from) == ("tolerance", None)
    assert again.bits == training.bits


@pytest.mark.parametrize("how", ["refused", "unpinned", "strided"])
def test_where_a_device_cannot_digest_all_of_it_a_journal_promises_nothing(tmp_path: Path, how: str) -> None:
    with visible_device(SimulatedDevice(64 * MIB, refuses_kernels=how == "refused")) as far:
        if how == "unpinned":
            far.native.limit_pinned(0)
        training, again = OnDevice(far), OnDevice(far, seed=1)
        if how == "strided":
            for item in (training, again):
                item.frozen.weight.data = far.tensor(torch.randn(300, 200)).t()
        training.go(tmp_path)
        assert exactness(tmp_path) == "tolerance"
        replay = loaded(tmp_path, again)
        assert (replay.exactness, replay.differs_from) == ("tolerance", None)
        assert again.bits[0] == training.bits[0]


def test_a_device_that_digests_no_more_leaves_steps_without_a_fingerprint(tmp_path: Path, far: SimulatedDevice) -> None:
    own, left = far.digest, [6]

    def digest(*columns: object) -> object:
        left[0] -= 1
        return own(*columns) if left[0] > 0 else None  # type: ignore[arg-type]

    far.digest = digest  # type: ignore[method-assign, assignment]
    training = OnDevice(far)
    events = training.go(tmp_path)
    assert not any(isinstance(event, fs.NotJournaled) for event in events)
    far.digest = own  # type: ignore[method-assign]
    again = OnDevice(far, seed=1)
    replay = loaded(tmp_path, again)
    assert (replay.exactness, replay.differs_from) == ("tolerance", None), "the last steps are not proven"
    assert again.bits == training.bits


@pytest.mark.parametrize("windows", [1, 8])
def test_windows_by_chunks_are_the_same_wherever_their_bytes_lie(far: SimulatedDevice, windows: int) -> None:
    torch.manual_seed(3)
    near = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (3 * MIB + 77, 1, 240, 241, MIB, 5000)]
    there = [far.tensor(tensor) for tensor in near]

    def prints(tensors: list[torch.Tensor]) -> list[str]:
        from flowstone.torch import tensors as read

        memory: list[Memory] = [read.memory_of(tensor) for tensor in tensors]
        places, lengths = Places.of(memory), torch.tensor([tensor.numel() for tensor in tensors]).numpy().astype("u8")
        rows = torch.arange(len(tensors)).numpy()
        prints = [window_of(index, windows, places, rows, lengths, tensors, by_chunks=True) for index in range(windows)]
        return [entry.fingerprint() for entry in prints if entry is not None]

    assert len(prints(near)) == windows
    assert prints(near) == prints(there)
    assert prints(near) == prints([*near[:2], *there[2:]])
