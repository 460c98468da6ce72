"""Compressed gradients: the compressed form is logged, and a replay restores bit-equal gradients from it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flowstone as fs
from flowstone.adapters.ddp import Int8Gradients, TopKGradients, exchange
from flowstone.journal import journals
from flowstone.store.local import LocalStore

WIDTH, LAST = 256, 9
Change = Callable[[Sequence[torch.nn.Parameter]], object]


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Training:
    """Two layers behind DDP, in several buckets."""

    def __init__(self, make: Callable[[torch.nn.Module], Any], seed: int = 0, *, view: bool = False) -> None:
        torch.manual_seed(seed)
        layers = torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
        self.model = DistributedDataParallel(
            torch.nn.Sequential(*layers), gradient_as_bucket_view=view, bucket_cap_mb=0.1
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.gradients = make(self.model)
        self.model.register_comm_hook(self.gradients, exchange)

    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "gradients": fs.PerRank(self.gradients)}

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        self.model(inputs).square().mean().backward()

    def train_step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()

    def bits(self) -> list[bytes]:
        tensors = [*self.model.parameters()]
        tensors += [tensor for own in self.optimizer.state.values() for tensor in own.values()]
        return [tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]

    def residual(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.gradients.state_dict()["residual"].items()}


def run(
    training: Training, root: Path, last: int = LAST, changes: Mapping[int, Change] | None = None
) -> list[fs.Event]:
    events: list[fs.Event] = []
    with fs.Checkpointer(root, every_step=True, on_event=events.append) as checkpointer:
        for step in range(1, last + 1):
            training.backward(step)
            if changes and step in changes:
                changes[step](list(training.model.parameters()))
            training.optimizer.step()
            checkpointer.save(step, training.state())
    return events


def loaded(root: Path, training: Training, **options: Any) -> fs.LoadReport:
    with fs.Checkpointer(root) as checkpointer:
        return checkpointer.load(training.state(), **options)


def journaled(events: Sequence[fs.Event]) -> dict[int, fs.Journaled]:
    return {event.step: event for event in events if isinstance(event, fs.Journaled)}


@pytest.mark.parametrize("view", [False, True], ids=["own gradients", "views of buckets"])
@pytest.mark.parametrize(("make", "share"), [(TopKGradients, 0.016), (Int8Gradients, 0.1)], ids=["top k", "int8"])
def test_what_was_exchanged_is_logged_and_the_newest_step_loads_bit_for_bit(
    tmp_path: Path, make: type[Any], share: float, view: bool
) -> None:
    training = Training(make, view=view)
    written = journaled(run(training, tmp_path))
    assert sorted(written) == list(range(2, LAST + 1))
    assert not any(event.uncompressed for event in written.values())
    state_bytes = 3 * sum(parameter.nbytes for parameter in training.model.parameters())
    assert max(event.bytes for event in written.values()) < share * state_bytes
    again = Training(make, seed=1, view=view)
    report = loaded(tmp_path, again)
    assert report.step == LAST
    assert report.replay is not None
    assert (report.replay.exactness, report.replay.approximate) == ("exact", ("gradients",))
    assert again.bits() == training.bits()


@pytest.mark.parametrize("make", [TopKGradients, Int8Gradients])
def test_without_error_feedback_training_goes_on_as_if_nothing_had_been(tmp_path: Path, make: type[Any]) -> None:
    def without(model: torch.nn.Module) -> Any:
        return make(model, error_feedback=False)

    training = Training(without)
    run(training, tmp_path)
    again = Training(without, seed=1)
    report = loaded(tmp_path, again)
    assert report.replay is not None
    assert (report.replay.steps, report.replay.approximate) == (LAST - 1, ())
    for step in range(LAST + 1, LAST + 4):
        training.train_step(step)
        again.train_step(step)
    assert again.bits() == training.bits()


def test_a_residual_is_that_of_the_checkpoint_less_what_was_sent_since(tmp_path: Path) -> None:
    training, sent = Training(TopKGradients), dict[str, torch.Tensor]()
    run(training, tmp_path, 1)
    base = training.residual()
    with fs.Checkpointer(tmp_path, every_step=True) as checkpointer:
        checkpointer.load(training.state())
        for step in range(2, 5):
            before = training.residual()
            training.train_step(step)
            checkpointer.save(step, training.state())
            for name, tensor in training.residual().items():
                now = (tensor == 0) & (before[name] != 0)
                sent[name] = now | sent.get(name, torch.zeros_like(now))
    again = Training(TopKGradients, seed=1)
    loaded(tmp_path, again)
    actual = again.residual()
    for name, tensor in base.items():
        assert torch.equal(actual[name] == 0, sent[name] | (tensor == 0))
        assert torch.equal(actual[name][~sent[name]], tensor[~sent[name]])
    assert sum(int(values.sum()) for values in sent.values()) > 1000
    whole = Training(TopKGradients, seed=1)
    loaded(tmp_path, whole, step=1)
    assert all(torch.equal(tensor, base[name]) for name, tensor in whole.residual().items())


def clip(parameters: Sequence[torch.nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 1e-3)


def clip_each(parameters: Sequence[torch.nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_value_(parameters, 1e-5)


def clip_unseen(parameters: Sequence[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-1e-5, 1e-5)  # version counters do not tell


def accumulate(parameters: Sequence[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-4)


def test_a_clipping_is_a_factor_and_other_changes_are_logged_whole_and_told(tmp_path: Path) -> None:
    training = Training(TopKGradients)
    changes = {3: clip, 5: clip_each, 6: clip_unseen, 7: accumulate}
    written = journaled(run(training, tmp_path, changes=changes))
    whole = {step: event.uncompressed for step, event in written.items() if event.uncompressed}
    assert sorted(whole) == [5, 6, 7]
    assert all("more than one common factor" in why for why in whole.values())
    gradient_bytes = sum(parameter.nbytes for parameter in training.model.parameters())
    assert all((event.bytes > gradient_bytes) == (step in whole) for step, event in written.items())
    again = Training(TopKGradients, seed=1)
    assert loaded(tmp_path, again).step == LAST
    assert again.bits() == training.bits()


class Signs:
    """Anybody's: a gradient is its signs and one magnitude. No DDP, no proof: each bit is compared."""

    kind, exact = "signs.1", True

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters, self._buckets = list(parameters), list[fs.CompressedBucket]()

    def compress(self) -> None:
        self._buckets = []
        for parameter in self._parameters:
            assert parameter.grad is not None
            tensors = {"signs": parameter.grad.sign().to(torch.int8).view(-1), "size": parameter.grad.abs().mean()}
            parameter.grad.copy_(self.decompress(tensors, parameter.numel()).view_as(parameter))
            self._buckets.append(fs.CompressedBucket([parameter], [0], parameter.numel(), tensors))

    def compressed(self) -> Sequence[fs.CompressedBucket]:
        return self._buckets

    def decompress(self, tensors: Mapping[str, torch.Tensor], length: int) -> torch.Tensor:
        return tensors["signs"].float() * tensors["size"]

    def replayed(self, bucket: fs.CompressedBucket) -> None:
        raise AssertionError("it is exact")

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: Mapping[str, object], /) -> None: ...


def signed(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Signs]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(WIDTH, WIDTH)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), Signs(list(model.parameters()))


def test_gradients_that_anybody_compresses_are_logged_compressed(tmp_path: Path) -> None:
    model, optimizer, signs = signed(0)
    assert isinstance(signs, fs.CompressedGradients)
    events: list[fs.Event] = []
    with fs.Checkpointer(tmp_path, every_step=True, on_event=events.append) as checkpointer:
        for step in range(1, 6):
            optimizer.zero_grad()
            model(torch.randn(4, WIDTH)).square().mean().backward()
            signs.compress()
            optimizer.step()
            checkpointer.save(step, {"model": model, "optimizer": optimizer, "signs": signs})
    assert all(event.bytes < 90_000 and not event.uncompressed for event in journaled(events).values())
    other, theirs, own = signed(1)
    with fs.Checkpointer(tmp_path) as checkpointer:
        report = checkpointer.load({"model": other, "optimizer": theirs, "signs": own})
        assert report.replay is not None
        assert (report.step, report.replay.approximate) == (5, ())
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))
        own.kind = "signs.2"
        report = checkpointer.load({"model": other, "optimizer": theirs, "signs": own})
    assert report.step == 1
    assert report.replay is not None
    assert "signs.1" in report.replay.reason


def test_journals_name_the_reader_that_they_need(tmp_path: Path) -> None:
    run(Training(TopKGradients), tmp_path / "compressed", 3)
    training = Training(TopKGradients)
    with fs.Checkpointer(tmp_path / "plain", every_step=True) as checkpointer:
        for step in range(1, 4):
            training.train_step(step)
            checkpointer.save(step, {"model": training.model, "optimizer": training.optimizer})
    for name, version in (("compressed", 2), ("plain", 1)):
        store = LocalStore(tmp_path / name)
        (journal,) = journals.list_journals(store)
        path = tmp_path / name / journal.directory / "rank-00000.journal"
        offsets = [0, *[frame.offset for frame in journals.complete_frames(store, journal, 0)]]
        assert {path.read_bytes()[offset + 8] for offset in offsets} == {version}


_KILLED = """
import sys
import torch, torch.distributed as dist
sys.path.insert(0, sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import flowstone as fs
from flowstone.adapters.ddp import TopKGradients
from test_ddp_gradients import Training
training = Training(lambda model: TopKGradients(model, error_feedback=False))
with fs.Checkpointer(sys.argv[1], every_step=True, recovery_s=0.05) as checkpointer:
    done = 0 if checkpointer.latest() is None else checkpointer.load(training.state()).step
    print("loaded", done, flush=True)
    for step in range(done + 1, 31):
        training.train_step(step)
        checkpointer.save(step, training.state())
        print("begun", step, flush=True)
"""


@pytest.mark.usefixtures("warm")
def test_killed_at_any_instant_the_step_before_comes_back_and_the_end_is_the_same(tmp_path: Path) -> None:
    begun, kills = 0, 0
    for expected in (9, 31):
        arguments = [sys.executable, "-c", _KILLED, str(tmp_path), str(Path(__file__).parent)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                word, number = line.split()
                assert word != "loaded" or int(number) >= begun - 1
                begun = max(begun, int(number))
                if begun >= expected:
                    process.send_signal(signal.SIGKILL)
                    kills += 1
                    break
    assert kills == 1
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        undisturbed = Training(lambda model: TopKGradients(model, error_feedback=False))
        for step in range(1, 31):
            undisturbed.train_step(step)
        training = Training(lambda model: TopKGradients(model, error_feedback=False), seed=1)
        assert loaded(tmp_path, training).step == 30
        assert training.bits() == undisturbed.bits()
    finally:
        torch.set_num_threads(threads)


def test_an_exchange_that_fails_gives_its_error_and_no_gradient() -> None:
    compression, failed = TopKGradients(torch.nn.Linear(4, 4)), torch.futures.Future()
    failed.set_exception(ConnectionError("a rank is gone"))
    with pytest.raises(ConnectionError, match="a rank is gone"):
        compression._applied({}, 4, None, failed)
