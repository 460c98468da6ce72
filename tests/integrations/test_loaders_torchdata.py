"""torchdata's StatefulDataLoader through resumable(), in one process: every position and change of the loader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import is_installed
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import flowstone as fs
from flowstone.adapters.loaders import resumable

pytestmark = pytest.mark.skipif(not is_installed("torchdata"), reason="`make test-integrations` installs torchdata")
if is_installed("torchdata"):
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler


class Numbers(Dataset):
    """Each sample is its own number."""

    def __init__(self, count: int = 48) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stateful(Numbers):
    """Counts, in each process for itself, what was taken from it."""

    taken = 0

    def __getitem__(self, index: int) -> int:
        self.taken += 1
        return index + 1000 * self.taken

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


class Stream(IterableDataset):
    """Numbers without a place of their own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(48))


def divided(rank: int = 0, ranks: int = 2, *, sampler: Any = None, dataset: Any = None, **options: Any) -> Any:
    """A rank's loader of shuffled numbers; `sampler` is the class of one that divides them among ranks."""
    dataset = dataset if dataset is not None else Numbers()
    own = {key: options.pop(key) for key in ("seed", "shuffle") if key in options}
    trimmed = options.pop("sampler_drop_last", False)
    sampler = (sampler or StatefulDistributedSampler)(dataset, ranks, rank, drop_last=trimmed, **own)
    return StatefulDataLoader(dataset, sampler=sampler, **{"batch_size": 4, **options})


def undivided(*, dataset: Any = None, **options: Any) -> Any:
    return StatefulDataLoader(dataset if dataset is not None else Numbers(), **{"batch_size": 4, **options})


def epochs(loader: Any, *numbers: int) -> list[list[int]]:
    """Batches of the first epoch from where the loader is, and of the others."""
    epochs = []
    for number in numbers:
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(number)
        epochs += [batch.tolist() for batch in loader]
    return epochs


def state_of(loader: Any, **others: Any) -> dict[str, Any]:
    return {"loader": resumable(loader), "rng": fs.rng(), **others}


def save(path: Path, loader: Any) -> None:
    with fs.Checkpointer(path) as ckpt:
        ckpt.save(1, state_of(loader))


def resume(path: Path, loader: Any) -> Any:
    """In another process, whose generators have drawn other numbers."""
    torch.manual_seed(99)
    with fs.Checkpointer(path) as ckpt:
        ckpt.load(state_of(loader))
    return loader


def redistribute(path: Path, saved: Sequence[Any], ranks: int, **options: Any) -> list[Any]:
    """Loaders of so many ranks, behind what those of other ranks have saved: through a checkpoint, as plain values."""
    with fs.Checkpointer(path) as ckpt:
        ckpt.save(1, {"loaders": [resumable(loader).value.state_dict() for loader in saved]})
    loaders = [divided(rank, ranks, **options) for rank in range(ranks)]
    for rank, loader in enumerate(loaders):
        section = resumable(loader)
        assert section.redistribute is not None
        states: Any = fs.open(path).state_dict("loaders")
        section.value.load_state_dict(section.redistribute(states, rank, ranks))  # type: ignore[attr-defined]
    return loaders


MADE = {
    "stateful": lambda **options: divided(**options),
    "distributed": lambda **options: divided(sampler=DistributedSampler, **options),
    "shuffled": lambda **options: undivided(dataset=Numbers(24), shuffle=True, **options),
    "shuffled by a generator": lambda **options: undivided(
        dataset=Numbers(24), shuffle=True, generator=torch.Generator().manual_seed(5), **options),
    "in order": lambda **options: undivided(dataset=Numbers(24), **options),
}
WORKERS: dict[str, dict[str, Any]] = {
    "2 workers": {"num_workers": 2, "prefetch_factor": 3},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "rare snapshots": {"num_workers": 2, "snapshot_every_n_steps": 4},
}


def saved_at(path: Path, loader: Any, places: Sequence[int]) -> None:
    """Two epochs of six batches, saved twice at some of the places: step 2n is before the first batch for n = 0, behind
    n batches for 1 to 6, behind the end of the epoch for 7, and so on, from 8, in the second one.
    """
    with fs.Checkpointer(path) as ckpt:
        state = state_of(loader, epoch=0)

        def save(place: int) -> None:
            if place in places:
                ckpt.save(2 * place, state)
                ckpt.save(2 * place + 1, state)

        for epoch in range(2):
            if hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch)
            state["epoch"] = epoch
            iterator = iter(loader) if epoch else None
            save(8 * epoch)
            for number, _ in enumerate(iterator or loader, 1):
                save(8 * epoch + number)
            state["epoch"] += 1
            save(8 * epoch + 7)


def check_places(path: Path, made: Any, places: Sequence[int]) -> None:
    """From each place a process with other generators goes on with the batches of a run that was not interrupted."""
    torch.manual_seed(1)
    saved_at(path, made(), places)
    torch.manual_seed(1)
    whole = epochs(made(), 0, 1, 2)
    assert len(whole) == 18
    for place in places:
        torch.manual_seed(1000 + place)
        loader = made()
        state = state_of(loader, epoch=None)
        with fs.Checkpointer(path) as ckpt:
            ckpt.load(state, step=2 * place + place % 2)
        behind = 6 * (place // 8) + min(6, place % 8)
        assert epochs(loader, *range(state["epoch"], 3)) == whole[behind:], f"behind {behind} batches"


@pytest.mark.parametrize("kind", MADE)
def test_every_place_of_two_epochs_is_resumed_exactly(tmp_path: Path, kind: str) -> None:
    check_places(tmp_path, MADE[kind], range(16))


@pytest.mark.parametrize(("kind", "options"), [
    ("stateful", "2 workers"), ("stateful", "persistent"), ("stateful", "rare snapshots"),
    ("shuffled by a generator", "2 workers"),
])
def test_workers_that_have_prefetched_are_resumed_exactly(tmp_path: Path, kind: str, options: str) -> None:
    check_places(tmp_path, lambda: MADE[kind](**WORKERS[options]), [2, 7, 8, 10])


@pytest.mark.parametrize("kind", ["stateful", "distributed", "shuffled", "in order"])
@pytest.mark.parametrize("place", [0, 3, 7, 11])
def test_other_batches_go_on_with_the_samples_that_are_left(tmp_path: Path, kind: str, place: int) -> None:
    torch.manual_seed(1)
    saved_at(tmp_path, MADE[kind](), [place])
    torch.manual_seed(1)
    whole = [sample for batch in epochs(MADE[kind](), 0, 1, 2) for sample in batch]
    torch.manual_seed(2)
    loader = MADE[kind](batch_size=3, drop_last=True)
    state = state_of(loader, epoch=None)
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.load(state)
    behind = 24 * (place // 8) + 4 * min(6, place % 8)
    left = [sample for batch in epochs(loader, *range(state["epoch"], 3)) for sample in batch]
    in_epoch = (len(whole) - behind) % 24
    cut = in_epoch - in_epoch % 3  # of the epoch that was cut, a last batch of fewer than three is dropped
    assert left == whole[behind:][:cut] + whole[behind:][in_epoch:]


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 1)])
def test_another_number_of_workers_changes_nothing(tmp_path: Path, before: int, after: int) -> None:
    rare = {"snapshot_every_n_steps": 4} if before else {}
    saved_at(tmp_path, divided(num_workers=before, **rare), [3])
    whole = epochs(divided(), 0, 1)
    assert epochs(resume(tmp_path, divided(num_workers=after)), 0, 1) == whole[3:]


def go_through(loader: Any, number: int) -> list[int]:
    iterator = iter(loader)
    return [sample for _ in range(number) for sample in next(iterator).tolist()]


@pytest.mark.parametrize("sampler", [None, DistributedSampler], ids=["stateful", "plain"])
@pytest.mark.parametrize(("before", "after", "number"), [
    (4, 2, 3), (2, 3, 2), (3, 1, 4), (1, 4, 5), (2, 3, 0), (4, 3, 1),
])
def test_other_ranks_go_on_with_the_samples_that_are_left(
    tmp_path: Path, sampler: Any, before: int, after: int, number: int
) -> None:
    saved = [divided(rank, before, sampler=sampler) for rank in range(before)]
    seen = [sample for loader in saved for sample in go_through(loader, number)]
    options = {"batch_size": 3} if (before, after) == (4, 3) else {}  # 16 samples are trained on, 32 are left
    loaders = redistribute(tmp_path, saved, after, sampler=sampler, **options)
    left = [epochs(loader, 0) for loader in loaders]
    assert sorted(seen + [sample for own in left for batch in own for sample in batch]) == [*range(48)]
    assert len({len(own) for own in left}) == 1
    following = [epochs(loader, 1) for loader in loaders]
    assert following == [epochs(divided(rank, after, sampler=sampler, **options), 1) for rank in range(after)]


def test_redistributed_ranks_are_saved_and_redistributed_again(tmp_path: Path) -> None:
    saved = [divided(rank, 4, batch_size=2) for rank in range(4)]
    seen = [sample for loader in saved for sample in go_through(loader, 2)]
    loaders = redistribute(tmp_path / "a", saved, 3, batch_size=4)  # 6, 5 and 5 samples are behind them
    seen += [sample for loader in loaders for sample in go_through(loader, 1)]
    loaders = redistribute(tmp_path / "b", loaders, 2, batch_size=4)
    left = [sample for loader in loaders for batch in epochs(loader, 0) for sample in batch]
    assert sorted(seen + left) == [*range(48)]


@pytest.mark.parametrize("is_finished", [False, True])
def test_an_epoch_that_was_over_is_over_on_other_ranks(tmp_path: Path, is_finished: bool) -> None:
    """Also where they would have some of the samples that were dropped."""
    options: Any = {"dataset": Numbers(50), "sampler_drop_last": True}
    saved = [divided(rank, 3, **options) for rank in range(3)]  # 16 of each rank, 2 dropped
    for loader in saved:
        iterator = iter(loader)
        assert len([next(iterator) for _ in range(4)]) == 4
        assert not is_finished or not [*iterator]
    loaders = redistribute(tmp_path, saved, 2, **options)
    whole = [epochs(divided(rank, 2, **options), 1) for rank in range(2)]
    if not is_finished:
        assert [epochs(loader, 0) for loader in loaders] == [[], []]
    assert [epochs(loader, 1) for loader in loaders] == whole


def refused(loader: Any, path: Path) -> str:
    with pytest.raises(fs.StateError) as caught:
        resume(path, loader)
    return str(caught.value)


CHANGED: dict[str, tuple[Any, str]] = {
    "the length of the dataset": (lambda: divided(dataset=Numbers(40)), "dataset_length: 48 at the save, 40 now"),
    "the seed": (lambda: divided(seed=4), "seed: 0 at the save, 4 now"),
    "the order": (lambda: divided(shuffle=False), "shuffle: True at the save, False now"),
    "the sampler": (lambda: undivided(shuffle=True), "sampler: 'torchdata.stateful_dataloader.sampler.Stateful"),
    "the dataset's kind": (lambda: undivided(dataset=Stream()), "dataset: 'map' at the save, 'iterable' now"),
    "the ranks of the sampler": (lambda: divided(0, 4), "ranks: 2 at the save, 4 now"),
    "what the sampler drops": (lambda: divided(sampler_drop_last=True), "sampler_drop_last: False at the save, True"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_another_order_of_samples_is_refused_by_name(tmp_path: Path, change: str) -> None:
    loader = divided()
    go_through(loader, 2)
    save(tmp_path, loader)
    made, expected = CHANGED[change]
    text = refused(made(), tmp_path)
    assert "cannot restore 'loader@0'" in text
    assert expected in text
    assert "raised" not in text  # the remedy is the loader's, and no word about a method to be fixed
    assert "trained on" in text or "divide" in text


@pytest.mark.parametrize("options", [{"num_workers": 1}, {"batch_size": 2}], ids=str)
@pytest.mark.parametrize("made", [
    lambda **options: divided(dataset=Stateful(), **options), lambda **options: undivided(dataset=Stream(), **options),
], ids=["stateful dataset", "stream"])
def test_a_place_that_only_torchdata_knows_is_of_those_workers_and_batches(
    tmp_path: Path, made: Any, options: dict[str, Any]
) -> None:
    loader = made()
    iterator = iter(loader)
    next(iterator), next(iterator)
    save(tmp_path, loader)
    left = [batch.tolist() for batch in iterator]
    (changed,) = options
    assert changed in refused(made(**options), tmp_path)
    assert epochs(resume(tmp_path, made()), 0) == left


def test_what_no_sampler_divides_is_not_divided(tmp_path: Path) -> None:
    for number, made in enumerate([
        lambda: undivided(shuffle=True), lambda: undivided(dataset=Stream()), lambda: divided(dataset=Stateful()),
    ]):
        saved = [made(), made()]
        for loader in saved:
            go_through(loader, 2)
        with pytest.raises(fs.StateError, match="cannot be divided among another number of ranks"):
            redistribute(tmp_path / str(number), saved, 3)


def test_ranks_that_did_not_keep_step_are_not_divided(tmp_path: Path) -> None:
    saved = [divided(rank, 2) for rank in range(2)]
    go_through(saved[0], 2)
    go_through(saved[1], 3)
    with pytest.raises(fs.StateError, match=r"different numbers of samples[\s\S]*\[8, 12\]"):
        redistribute(tmp_path / "a", saved, 3)
    saved = [divided(rank, 2) for rank in range(2)]
    saved[1].sampler.set_epoch(1)
    with pytest.raises(fs.StateError, match="differ in their epoch"):
        redistribute(tmp_path / "b", saved, 3)


def test_ranks_that_would_wait_for_ever_are_refused(tmp_path: Path) -> None:
    saved = [divided(rank, 4, dataset=Numbers(44), batch_size=2) for rank in range(4)]
    for loader in saved:
        go_through(loader, 1)  # 8 of 44: of the 36 that are left, and one repeated, ranks get 12, 12 and 13
    assert len(redistribute(tmp_path / "a", saved, 3, dataset=Numbers(44), batch_size=5)) == 3
    saved = [divided(rank, 2, dataset=Numbers(44), batch_size=2) for rank in range(2)]
    for loader in saved:
        go_through(loader, 1)  # 4 of 44: of the 40 that are left, and one repeated, ranks get 13, 14 and 14
    with pytest.raises(fs.StateError, match=r"cannot be divided evenly among 3 ranks[\s\S]*drop_last=True"):
        redistribute(tmp_path / "b", saved, 3, dataset=Numbers(44), batch_size=13)


def test_what_torchdata_does_not_restore_is_refused_at_once() -> None:
    data = Numbers()
    with pytest.raises(fs.UnsupportedStateError, match="RandomSampler cannot be resumed: its order is not saved"):
        resumable(undivided(sampler=torch.utils.data.RandomSampler(data)))
    with pytest.raises(fs.UnsupportedStateError, match="in_order=False"):
        resumable(divided(num_workers=2, in_order=False))
    with pytest.raises(fs.UnsupportedStateError, match=r"does not support a .*DataLoader[\s\S]*use StatefulDataLoader"):
        resumable(DataLoader(data))
    own = type("Own", (DataLoader,), {"state_dict": dict})(data)
    with pytest.raises(fs.UnsupportedStateError, match=r"does not support a .*Own[\s\S]*into the state directly"):
        resumable(own)


def test_a_state_of_something_else_is_refused(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path / "a") as ckpt:
        ckpt.save(1, {"loader": fs.PerRank(divided())})
    with pytest.raises(fs.StateError, match="another kind of loader"), fs.Checkpointer(tmp_path / "a") as ckpt:
        ckpt.load({"loader": resumable(divided())})
    with fs.Checkpointer(tmp_path / "b") as ckpt:
        ckpt.save(1, {"loader": fs.PerRank({"kind": "mine", "left": [1]})})
    with pytest.raises(fs.StateError, match=r"found +mine"), fs.Checkpointer(tmp_path / "b") as ckpt:
        ckpt.load({"loader": resumable(divided())})


def test_a_save_before_the_first_batch_draws_nothing_and_begins_nothing(tmp_path: Path) -> None:
    loader = divided(num_workers=2)
    before = torch.get_rng_state()
    save(tmp_path, loader)
    assert torch.equal(torch.get_rng_state(), before)
    assert loader._iterator is None


def test_a_version_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    monkeypatch.setattr(metadata, "version", lambda package: "9.9.9+cpu")
    with pytest.raises(fs.FrameworkError, match=r"states of torchdata 9\.9\.9[\s\S]*0\.11\.0"):
        resumable(divided())
