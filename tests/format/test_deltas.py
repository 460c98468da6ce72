"""Reading deltas: chunks in an earlier checkpoint's file, which has another name in this directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import plain_reader
import pytest
import torch
from safetensors.numpy import load_file

import flowstone as fs
from deltas import OWN, make_delta
from flowstone.config import MIB
from flowstone.errors import DamagedError, StorageError
from forge import content, edit_index, edit_manifest, flip

LONG = 5 * MIB // 2 + 3  # elements of four bytes: eleven chunks


def state(step: int) -> dict[str, object]:
    """Of each step the same `long`, but for one chunk of it from step 3 on, and another `adapter`."""
    long = torch.arange(LONG, dtype=torch.int32)
    if step > 2:
        long[7 * MIB // 4 + 1] = -step
    small = torch.arange(700, dtype=torch.int16)
    tensors = {"long": long, "small": small, "adapter": torch.full((9000,), step), "none": torch.zeros(0)}
    return {"m": tensors, "n": step}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 1 to 3, of which 2 and 3 refer to 1."""
    for step in (1, 2, 3):
        with fs.Checkpointer(tmp_path / "run") as checkpointer:  # whose first save has no base
            checkpointer.save(step, state(step))
    base = tmp_path / "run/step-00000001"
    assert make_delta(tmp_path / "run/step-00000002", base) == 1
    assert make_delta(tmp_path / "run/step-00000003", base) == 2
    return tmp_path / "run"


def loaded(path: Path, step: int, **options: object) -> dict[str, object]:
    result = state(step)
    for tensor in result["m"].values():  # type: ignore[attr-defined]
        tensor.fill_(-1)
    with fs.Checkpointer(path) as checkpointer:
        checkpointer.load(result, step=step, **options)  # type: ignore[arg-type]
    return result


@pytest.mark.parametrize("step", [2, 3])
def test_a_delta_is_read_like_any_other_checkpoint(run: Path, step: int) -> None:
    expected = state(step)
    assert content(loaded(run, step)) == content(expected)
    checkpoint = fs.open(run, step)
    assert checkpoint.verify().sound
    assert torch.equal(checkpoint["m.long"][MIB : 2 * MIB], expected["m"]["long"][MIB : 2 * MIB])  # type: ignore[index]
    streamed = dict(checkpoint.stream())
    assert {name: tensor.sum().item() for name, tensor in streamed.items()} == {
        f"m.{name}": tensor.sum().item() for name, tensor in expected["m"].items()  # type: ignore[attr-defined]
    }


def test_a_plain_reader_reads_a_delta(run: Path) -> None:
    tensors, replicated, _ = plain_reader.read(run / "step-00000003")
    assert replicated["n"] == 3
    for name, tensor in state(3)["m"].items():  # type: ignore[attr-defined]
        assert np.array_equal(tensors[f"m.{name}"], tensor.numpy())


def test_a_delta_is_complete_in_itself(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "step-00000003", tmp_path / "elsewhere")
    shutil.rmtree(run / "step-00000001")
    for place in (run / "step-00000002", run / "step-00000003", tmp_path / "elsewhere"):
        assert fs.open(place).verify().sound
    assert content(loaded(run, 3)) == content(state(3))


def test_a_delta_that_retention_removes_leaves_nothing(run: Path) -> None:
    with fs.Checkpointer(run, keep=fs.Keep(last=1)) as checkpointer:
        checkpointer.save(4, state(4))
    assert [path.name for path in sorted(run.glob("step-*"))] == ["step-00000004"]


def test_every_segment_opens_as_safetensors(run: Path) -> None:
    files = sorted((run / "step-00000003").glob("*-rank-*"))
    assert len(files) == 1
    assert np.array_equal(load_file(files[0])["m.long"], state(1)["m"]["long"].numpy())  # type: ignore[index]
    assert list(load_file(run / "step-00000003" / OWN)) == ["__chunks__"]


def test_a_flipped_bit_is_found_where_a_delta_refers_to_it_and_nowhere_else(run: Path) -> None:
    base = next((run / "step-00000003").glob("from-*"))
    manifest = fs.open(run, 3).manifest
    chunks = fs.open(run, 3).index.chunks
    assert chunks.stored is not None
    used = [(int(o), int(n)) for o, n, s in zip(chunks.stored.offset, chunks.stored.length, chunks.stored.segment,
                                                   strict=True) if s == 1]
    spared = 7 * MIB  # of the chunk that step 3 has itself
    begin = int(fs.open(run, 1).index.chunks.offset[list(fs.open(run, 1).index.rows()).index("m.long")])
    assert not any(offset <= begin + spared < offset + n for offset, n in used)
    flip(base, begin + spared)
    assert not fs.open(run, 1).inspect().sound
    assert fs.open(run, 3).verify().sound, "step 3 does not use that chunk"
    flip(base, begin + spared)
    for position, length in used:
        flip(base, position + length // 2)
        (finding,) = fs.open(run, 3).inspect().findings
        assert finding.file == manifest.segments[1].name
        with pytest.raises(DamagedError):
            loaded(run, 3)
        flip(base, position + length // 2)
    assert fs.open(run, 3).verify().sound


def test_a_base_that_is_missing_is_named(run: Path) -> None:
    name = next((run / "step-00000003").glob("from-*"))
    name.unlink()
    (finding,) = fs.open(run, 3).inspect().findings
    assert (finding.file, finding.what) == (name.name, "is missing")
    with pytest.raises((DamagedError, StorageError), match="from-"):
        loaded(run, 3)


@pytest.mark.parametrize(("column", "chunk", "value", "kind"), [
    ("chunk.segment", 3, 2, "a piece or chunk lies in a segment that the manifest does not list"),
    ("chunk.offset", 3, 0, "a piece or chunk lies outside of its segment"),
    ("chunk.offset", 3, 1 << 63, "a piece or chunk lies outside of its segment"),
    ("chunk.offset", 3, (1 << 64) - 1, "a piece or chunk lies outside of its segment"),
    ("chunk.codec", 3, 1, "unknown codec 1"),
    ("chunk.bytes", 3, 5, "the stored length of a chunk is not possible for its codec and its data"),
    ("piece.segment", 1, 9, "piece.segment or piece.offset is not 0, although each chunk has a location"),
    ("piece.offset", 1, 1 << 63, "piece.segment or piece.offset is not 0, although each chunk has a location"),
])
def test_a_forged_place_is_damage(run: Path, column: str, chunk: int, value: int, kind: str) -> None:
    def forge(columns: dict[str, np.ndarray]) -> None:
        columns[column][chunk] = value

    edit_index(run / "step-00000003", forge)
    with pytest.raises(DamagedError, match=kind):
        fs.open(run, 3).check()


@pytest.mark.parametrize("column", ["chunk.segment", "chunk.offset"])
def test_places_that_are_missing_or_too_few_are_damage(run: Path, column: str) -> None:
    edit_index(run / "step-00000003", lambda columns: columns.update({column: columns[column][:-1]}))
    with pytest.raises(DamagedError, match=r"the columns chunk\.\* are not of the same length"):
        fs.open(run, 3).check()
    edit_index(run / "step-00000003", lambda columns: columns.pop(column))
    with pytest.raises(DamagedError, match=column):
        fs.open(run, 3).check()


def test_two_new_chunks_at_one_place_are_damage(run: Path) -> None:
    def forge(columns: dict[str, np.ndarray]) -> None:
        own = np.flatnonzero(columns["chunk.segment"] == 0)
        columns["chunk.offset"][own] = columns["chunk.offset"][own[0]]

    edit_index(run / "step-00000003", forge)
    with pytest.raises(DamagedError, match="two pieces or chunks overlap in a file"):
        fs.open(run, 3).check()


def test_two_different_chunks_at_one_place_of_a_base_are_both_checked(run: Path) -> None:
    """Of a base's file several chunks may be the same; these say that they are not."""
    chunks = fs.open(run, 3).index.chunks
    assert chunks.stored is not None
    there = np.flatnonzero((chunks.stored.segment == 1) & (chunks.stored.length == MIB))
    first, other = there[:2].tolist()

    def forge(columns: dict[str, np.ndarray]) -> None:
        columns["chunk.offset"][other] = columns["chunk.offset"][first]

    edit_index(run / "step-00000003", forge)
    findings = fs.open(run, 3).inspect().findings
    piece, number = chunks.locate(np.array([other]))
    name = fs.open(run, 3).index.tensors.names[int(fs.open(run, 3).index.pieces.tensor[int(piece[0])])]
    assert [fault.what.partition(", bytes")[0] for fault in findings] == [f"tensor {name!r}, chunk {int(number[0])}"]
    with pytest.raises(DamagedError):
        loaded(run, 3)


def test_a_segment_of_chunks_is_accounted_for(run: Path) -> None:
    own = run / "step-00000003" / OWN
    flip(own, own.stat().st_size - 1)
    (finding,) = fs.open(run, 3).inspect().findings
    assert finding.what.startswith("padding")


def test_places_without_the_feature_are_not_looked_at(run: Path) -> None:
    edit_manifest(run / "step-00000003", lambda m: m.update(critical=[]))
    with pytest.raises(DamagedError, match="the critical feature 'delta' is missing"):
        fs.open(run, 3)


def test_a_delta_is_exported_wherever_its_chunks_lie(run: Path, tmp_path: Path) -> None:
    for step in (2, 3):
        fs.export(fs.open(run, step), tmp_path / str(step), section="m")
        assert fs.diff(tmp_path / str(step), fs.open(run, step), section="m", names="m.*").equal
