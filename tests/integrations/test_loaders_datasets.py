"""An IterableDataset of Hugging Face's datasets through resumable(), in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from jobs import is_installed

import flowstone as fs
from flowstone.adapters.loaders import resumable

pytestmark = pytest.mark.skipif(not is_installed("datasets"), reason="`make test-integrations` installs datasets")
if is_installed("datasets"):
    from datasets import Dataset, IterableDataset
    from datasets.distributed import split_dataset_by_node

PER_SHARD = 6


def numbers(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for index in range(PER_SHARD):
            yield {"n": PER_SHARD * shard + index}


def generated(shards: int) -> Any:
    return IterableDataset.from_generator(numbers, gen_kwargs={"shards": [*range(shards)]})


def tables(shards: int) -> Any:
    return Dataset.from_dict({"n": [*range(PER_SHARD * shards)]}).to_iterable_dataset(num_shards=shards)


def mapped(shards: int) -> Any:
    return generated(shards).map(lambda row: {"n": row["n"]}).filter(lambda row: True)


def shuffled(shards: int) -> Any:
    return mapped(shards).shuffle(seed=3, buffer_size=1)


def batched(shards: int) -> Any:
    return generated(shards).map(lambda many: many, batched=True, batch_size=4)


def divided(made: Any, rank: int, ranks: int, shards: int) -> Any:
    return split_dataset_by_node(made(shards), rank, ranks)


def epoch_of(dataset: Any, epoch: int) -> list[int]:
    dataset.set_epoch(epoch)
    return [row["n"] for row in dataset]


def round_trip(path: Path, dataset: Any, into: Any) -> Any:
    with fs.Checkpointer(path) as ckpt:
        ckpt.save(1, {"data": resumable(dataset)})
    with fs.Checkpointer(path) as ckpt:
        ckpt.load({"data": resumable(into)})
    return into


@pytest.mark.parametrize("made", [generated, tables, mapped, shuffled, batched])
@pytest.mark.parametrize("shards", [3, 4])
@pytest.mark.parametrize(("epoch", "number"), [(0, 0), (0, 5), (1, 4), (1, 8)])
def test_each_place_is_resumed_exactly(tmp_path: Path, made: Any, shards: int, epoch: int, number: int) -> None:
    dataset = divided(made, 1, 2, shards)
    if epoch:
        epoch_of(dataset, 0)
    dataset.set_epoch(epoch)
    iterator = iter(dataset)
    seen = [next(iterator)["n"] for _ in range(number)]
    resumed = round_trip(tmp_path / "a", dataset, divided(made, 1, 2, shards))
    again = round_trip(tmp_path / "b", resumed, divided(made, 1, 2, shards))  # saved before its first example
    whole = epoch_of(divided(made, 1, 2, shards), epoch)
    assert seen + epoch_of(again, epoch) == whole
    assert epoch_of(again, epoch + 1) == epoch_of(divided(made, 1, 2, shards), epoch + 1)


def redistribute(path: Path, saved: Sequence[Any], made: Any, ranks: int, shards: int) -> list[Any]:
    with fs.Checkpointer(path) as ckpt:
        ckpt.save(1, {"data": [resumable(loader).value.state_dict() for loader in saved]})  # type: ignore[attr-defined]
    result = [divided(made, rank, ranks, shards) for rank in range(ranks)]
    for rank, dataset in enumerate(result):
        section: Any = resumable(dataset)
        section.value.load_state_dict(section.redistribute(fs.open(path).state_dict("data"), rank, ranks))
    return result


@pytest.mark.parametrize(("made", "shards", "before", "after", "number"), [
    (generated, 4, 2, 4, 3), (mapped, 8, 2, 4, 8), (tables, 4, 2, 4, 3), (tables, 4, 1, 2, 4), (generated, 8, 2, 8, 8),
    (generated, 3, 2, 5, 4), (mapped, 3, 2, 1, 4), (generated, 3, 1, 2, 5), (generated, 4, 2, 1, 0),
])
@pytest.mark.parametrize("epoch", [0, 1])
def test_other_ranks_go_on_with_the_examples_that_are_left(
    tmp_path: Path, made: Any, shards: int, before: int, after: int, number: int, epoch: int
) -> None:
    saved = [divided(made, rank, before, shards) for rank in range(before)]
    seen = []
    for dataset in saved:
        dataset.set_epoch(epoch)
        seen += [row["n"] for row in islice(iter(dataset), number)]
    actual = redistribute(tmp_path, saved, made, after, shards)
    left = [example for dataset in actual for example in epoch_of(dataset, epoch)]
    assert sorted(seen + left) == [*range(PER_SHARD * shards)]
    following = [epoch_of(dataset, epoch + 1) for dataset in actual]
    assert following == [epoch_of(divided(made, rank, after, shards), epoch + 1) for rank in range(after)]


def test_the_end_of_an_epoch_is_the_end_of_it_on_any_number_of_ranks(tmp_path: Path) -> None:
    for number, made in enumerate([generated, tables]):
        saved = [divided(made, rank, 4, 4) for rank in range(4)]
        for dataset in saved:
            epoch_of(dataset, 0)
        actual = redistribute(tmp_path / str(number), saved, made, 2, 4)
        assert [epoch_of(dataset, 0) for dataset in actual] == [[], []]
        assert [epoch_of(entry, 1) for entry in actual] == [epoch_of(divided(made, rank, 2, 4), 1) for rank in range(2)]


@pytest.mark.parametrize(("made", "shards", "before", "after", "numbers", "expected"), [
    ("generated", 4, 4, 2, [3] * 4, r"several partly read shards \(of \[0, 1, 2, 3\]"),
    ("generated", 4, 2, 3, [3] * 2, "its 4 shards can be divided evenly only among the ranks that saved"),
    ("generated", 3, 2, 1, [3, 4], "different numbers of examples"),
    ("shuffled", 4, 2, 4, [3] * 2, "alternates between shards"),
    ("tables", 3, 2, 1, [3] * 2, "the dataset reads tables"),
    ("tables", 8, 2, 8, [8] * 2, "still buffered examples of the shard"),
    ("batched", 4, 4, 2, [5] * 4, r"a batched map\(\) or filter\(\) buffers"),
    ("skipping", 4, 1, 2, [3], "count the examples of a rank"),
    ("taking", 4, 1, 2, [3], "count the examples of a rank"),
    ("repeating", 4, 2, 1, [3] * 2, "count the examples of a rank"),
    ("numbering", 4, 1, 2, [3], "count the examples of a rank"),
])
def test_what_cannot_be_divided_is_refused_by_name(
    tmp_path: Path, made: str, shards: int, before: int, after: int, numbers: list[int], expected: str
) -> None:
    make: Any = {
        "generated": generated, "tables": tables, "shuffled": shuffled, "batched": batched,
        "skipping": lambda count: generated(count).skip(4), "taking": lambda count: generated(count).take(10),
        "repeating": lambda count: generated(count).repeat(2),
        "numbering": lambda count: generated(count).map(lambda row, i: {"n": row["n"], "at": i}, with_indices=True),
    }[made]
    saved = [divided(make, rank, before, shards) for rank in range(before)]
    for dataset, number in zip(saved, numbers, strict=True):
        assert len([*islice(iter(dataset), number)]) == number
    with pytest.raises(fs.StateError, match=rf"cannot be divided[\s\S]*{expected}"):
        redistribute(tmp_path, saved, make, after, shards)


@pytest.mark.parametrize("ranks", [1, 2])
def test_shards_that_were_whole_are_not_taken_for_a_stream(tmp_path: Path, ranks: int) -> None:
    saved = [divided(generated, rank, 2, 4) for rank in range(2)]
    for dataset in saved:
        next(iter(dataset))
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"data": [resumable(loader).value.state_dict() for loader in saved]})  # type: ignore[attr-defined]
    section: Any = resumable(split_dataset_by_node(generated(4), 0, ranks, strategy="examples"))
    with pytest.raises(fs.StateError, match="its 4 shards can be divided evenly only among the ranks that saved"):
        section.redistribute(fs.open(tmp_path).state_dict("data"), 0, ranks)


def test_ranks_that_share_examples_and_have_read_other_numbers_of_them_are_refused(tmp_path: Path) -> None:
    saved = [divided(generated, number // 2, 2, 4) for number in range(4)]
    for dataset, number in zip(saved, [3, 5, 3, 3], strict=True):
        list(islice(iter(dataset), number))
    with pytest.raises(fs.StateError, match="examples of dataset rank 0 had read different numbers"):
        redistribute(tmp_path, saved, generated, 4, 4)


def test_what_is_not_divided_by_node_is_not_divided_among_others(tmp_path: Path) -> None:
    with pytest.raises(fs.StateError, match="the dataset was not divided among the ranks by split_dataset_by_node"):
        redistribute(tmp_path, [generated(4), generated(4)], generated, 4, 4)


def test_another_dataset_is_refused_by_name(tmp_path: Path) -> None:
    dataset = divided(generated, 0, 2, 4)
    next(iter(dataset))
    for number, (other, expected) in enumerate([
        (divided(generated, 0, 2, 6), "num_shards: 4 at the save, 6 now"), (divided(mapped, 0, 2, 4), "pipeline: "),
        (divided(generated, 0, 4, 4), "ranks: 2 at the save, 4 now"),
    ]):
        with pytest.raises(fs.StateError, match=expected):
            round_trip(tmp_path / str(number), dataset, other)
    with fs.Checkpointer(tmp_path / "plain") as ckpt:
        ckpt.save(1, {"data": fs.PerRank(divided(generated, 0, 2, 4))})
    with fs.Checkpointer(tmp_path / "plain") as ckpt, pytest.raises(fs.StateError, match="another kind of loader"):
        ckpt.load({"data": resumable(divided(generated, 0, 2, 4))})


@pytest.mark.skipif(not is_installed("torchdata"), reason="`make test-integrations` installs torchdata")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_inside_of_a_stateful_loader_is_resumed_exactly(tmp_path: Path, workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def batches(loader: Any, epoch: int) -> list[Any]:
        loader.dataset.set_epoch(epoch)
        return [batch["n"].tolist() for batch in loader]

    def made(dataset: Any = None) -> Any:
        return StatefulDataLoader(dataset or divided(generated, 1, 2, 4), batch_size=3, num_workers=workers)

    whole = [batches(made(), epoch) for epoch in range(3)]
    loader = made()
    batches(loader, 0)
    loader.dataset.set_epoch(1)
    iterator = iter(loader)
    assert [next(iterator)["n"].tolist() for _ in range(2)] == whole[1][:2]
    resumed = round_trip(tmp_path / "a", loader, made())
    assert batches(resumed, 1) == whole[1][2:]
    resumed = round_trip(tmp_path / "b", resumed, made())  # at the end of the epoch
    assert batches(resumed, 2) == whole[2]
    with pytest.raises(fs.UnsupportedStateError, match="shuffle buffer"):
        resumable(made(generated(4).shuffle(seed=1, buffer_size=10)))


def test_what_datasets_does_not_restore_is_refused_at_once() -> None:
    with pytest.raises(fs.UnsupportedStateError, match=r"shuffle buffer[\s\S]*buffer_size=1"):
        resumable(generated(4).shuffle(seed=1, buffer_size=10))
    with pytest.raises(fs.UnsupportedStateError, match=r"batched map\(\) and a table format"):
        resumable(batched(4).with_format("arrow"))
