"""MosaicML's StreamingDataLoader through resumable(), in one process: every position, and every change of the data."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from jobs import is_installed
from mosaic import streaming, write_numbers

import flowstone as fs
from flowstone.adapters.loaders import resumable

pytestmark = pytest.mark.skipif(
    not is_installed("mosaicml-streaming"), reason="`make test-integrations` installs mosaicml-streaming"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("streaming") / "data"
    write_numbers(place, 50)
    return place


def loader_of(data: Path, batch: int = 4, **options: Any) -> Any:
    given = {"shuffle": True, "shuffle_seed": 5, "num_canonical_nodes": 1, **options}
    return streaming().StreamingDataLoader(
        streaming().StreamingDataset(local=str(data), batch_size=batch, **given), batch_size=batch
    )


def numbers(loader: Any) -> list[list[int]]:
    return [batch["number"].tolist() for batch in loader]


def begin(loader: Any, count: int) -> list[list[int]]:
    return [batch["number"].tolist() for batch in islice(loader, count)]


def round_trip(path: Path, loader: Any, into: Any) -> Any:
    with fs.Checkpointer(path) as ckpt:
        ckpt.save(1, {"loader": resumable(loader)})
    with fs.Checkpointer(path) as ckpt:
        ckpt.load({"loader": resumable(into)})
    return into


@pytest.mark.parametrize(("epochs", "count"), [(0, 0), (0, 5), (1, 0), (1, 4), (0, 13)])
def test_each_place_is_resumed_exactly(tmp_path: Path, data: Path, epochs: int, count: int) -> None:
    whole, loader = loader_of(data), loader_of(data)
    expected = [numbers(whole) for _ in range(epochs + 2)]
    seen = [numbers(loader) for _ in range(epochs)]
    seen.append(begin(loader, count))
    resumed = round_trip(tmp_path / "a", loader, loader_of(data))
    again = round_trip(tmp_path / "b", resumed, loader_of(data))  # saved before its first batch
    if count or not epochs:
        assert seen[epochs] + numbers(again) == expected[epochs]
    else:
        assert numbers(again) == []  # the end of an epoch, of which nothing is left
    assert numbers(again) == expected[epochs + (1 if count or not epochs else 0)]


def test_a_loader_goes_back_to_an_earlier_epoch_in_its_own_process(tmp_path: Path, data: Path) -> None:
    whole, loader = loader_of(data), loader_of(data)
    expected = [numbers(whole) for _ in range(3)]
    begin(loader, 3)
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"loader": resumable(loader)})
        numbers(loader)
        begin(loader, 2)  # of the next epoch
        ckpt.load({"loader": resumable(loader)})
        ckpt.save(2, {"loader": resumable(loader)})
        assert numbers(loader) == expected[0][3:]
        assert numbers(loader) == expected[1]
        begin(loader, 2)
        ckpt.load({"loader": resumable(loader)}, step=2)
        assert numbers(loader) == expected[0][3:]


def test_another_batch_size_takes_the_samples_that_are_left(tmp_path: Path, data: Path) -> None:
    loader = loader_of(data)
    seen = begin(loader, 5)
    left = numbers(round_trip(tmp_path, loader, loader_of(data, batch=3)))
    assert sorted(number for batch in seen + left for number in batch) == [*range(50)]


@pytest.mark.parametrize(("options", "message"), [
    ({"shuffle": False}, "shuffle"), ({"shuffle_algo": "naive"}, "shuffle"), ({"shuffle_block_size": 77}, "block_size"),
    ({"epoch_size": 20}, "epoch_size"), ({"batching_method": "stratified"}, "batching"),
    ({"sampling_granularity": 3}, "sampling"),
])
def test_another_order_is_refused_by_name(tmp_path: Path, data: Path, options: dict[str, Any], message: str) -> None:
    loader = loader_of(data)
    begin(loader, 2)
    with pytest.raises(fs.StateError, match=rf"differs from the saved one[\s\S]*{message}"):
        round_trip(tmp_path, loader, loader_of(data, **options))


def test_other_data_are_refused_by_name(tmp_path: Path, data: Path) -> None:
    write_numbers(tmp_path / "other", 51)
    with pytest.raises(fs.StateError, match=r"samples: \[50\] at the save, \[51\] now"):
        round_trip(tmp_path / "run", loader_of(data), loader_of(tmp_path / "other"))


def test_ranks_that_were_not_equally_far_are_refused(data: Path) -> None:
    section: Any = resumable(loader_of(data))
    states = [section.value.state_dict() for _ in range(2)]
    assert section.redistribute(states, 0, 3) == states[0]
    states[1] = states[1] | {"loader": states[1]["loader"] | {"sample_in_epoch": 8}}
    with pytest.raises(fs.StateError, match=r"differ in their sample_in_epoch[\s\S]*\[0, 8\]"):
        section.redistribute(states, 0, 3)


def test_what_is_no_streaming_dataset_is_refused(data: Path) -> None:
    with pytest.raises(fs.UnsupportedStateError, match="list cannot be resumed"):
        resumable(streaming().StreamingDataLoader([1, 2, 3]))
