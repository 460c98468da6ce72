"""Readers of a store beside its writer: a step that was the newest a moment ago may be removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

import flowstone as fs
from flowstone.commit import catalog


@contextmanager
def writer_goes_on_after_a_listing(store: Path, act: Callable[[fs.Checkpointer], object]) -> Iterator[list[int]]:
    """A job that keeps one checkpoint, and does something right after another one has listed the steps, once."""
    listed: list[int] = []
    with fs.Checkpointer(store, keep=1) as writer:
        for step in (1, 2):
            writer.save(step, {"w": torch.full((4,), float(step))}).committed.result()
        writer.wait()
        directories = catalog._step_directories

        def then_act(names: object) -> list[str]:
            result = directories(names)  # type: ignore[arg-type]
            if not listed:
                listed.extend(int(name.removeprefix("step-")) for name in result)
                act(writer)
            return result

        with mock.patch.object(catalog, "_step_directories", then_act):
            yield listed


def one_more(writer: fs.Checkpointer) -> None:
    writer.save(3, {"w": torch.full((4,), 3.0)}).committed.result()
    writer._saves.sole_writer.drain()  # retention too
    assert not (Path(writer._store.location) / "step-00000002").exists()


@pytest.mark.parametrize("look", ["latest", "open", "load"])
def test_a_reader_takes_the_next_newest_where_the_writer_has_removed_the_one_that_it_saw(
    tmp_path: Path, look: str
) -> None:
    with writer_goes_on_after_a_listing(tmp_path, one_more) as listed:
        if look == "open":
            assert fs.open(tmp_path).step == 3
        else:
            with fs.Checkpointer(tmp_path) as reader:
                state = {"w": torch.zeros(4)}
                report = reader.latest() if look == "latest" else reader.load(state)
            assert report is not None
            assert report.step == 3
            assert look == "latest" or state["w"].tolist() == [3.0] * 4
    assert 2 in listed


def test_an_older_step_that_is_kept_is_not_taken_for_the_newest(tmp_path: Path) -> None:
    """The newest of a moment ago is gone, an older one is there still, and so is a newer one."""
    with fs.Checkpointer(tmp_path, keep=fs.Keep(last=1, every=2)) as writer:
        for step in (2, 3):
            writer.save(step, {"x": step}).committed.result()
        read_manifest = catalog.read_manifest
        asked: list[str] = []

        def goes_on(names: object, directory: str) -> object:
            asked.append(directory)
            if len(asked) == 1:
                writer.save(5, {"x": 5}).committed.result()
                writer._saves.sole_writer.drain()
            return read_manifest(names, directory)  # type: ignore[arg-type]

        with mock.patch.object(catalog, "read_manifest", goes_on):
            actual = catalog.newest_manifest(writer._store)
    assert asked == ["step-00000003", "step-00000005"]
    assert (tmp_path / "step-00000002").exists()
    assert actual is not None
    assert actual.step == 5


def test_a_step_that_was_asked_for_is_told_to_be_gone(tmp_path: Path) -> None:
    with (
        writer_goes_on_after_a_listing(tmp_path, one_more), fs.Checkpointer(tmp_path) as reader,
        pytest.raises(fs.NoCheckpointError),
    ):
        reader.load({"w": torch.zeros(4)}, step=2)


def test_a_directory_without_its_manifest_is_no_endless_search(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path) as writer:
        writer.save(1, {"x": 1}).committed.result()
    gone = fs.NoCheckpointError("gone", next="")
    with (
        mock.patch("flowstone.commit.catalog.read_manifest", side_effect=gone),
        mock.patch("flowstone.reading.checkpoint.read_manifest", side_effect=gone), pytest.raises(fs.NoCheckpointError),
    ):
        fs.open(tmp_path)
