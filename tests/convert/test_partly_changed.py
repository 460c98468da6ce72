"""Conversions of checkpoints with chunks in files of earlier saves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from typer.testing import CliRunner

import flowstone as fs
from flowstone.cli import app
from flowstone.config import MIB
from flowstone.convert.digests import unequal_runs
from flowstone.convert.source import SourceCheckpoint
from flowstone.errors import DamagedError
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES
from flowstone.table.stored import DigestedPiece, SourceTensor
from forge import flip


def changed(step: int) -> dict[str, torch.Tensor]:
    """A tensor of eleven chunks of which some differ in each step, one of odd sides, one that is always the same."""
    long = torch.arange(11 * MIB // 4 - 3, dtype=torch.int32)
    odd = torch.arange(3 * 700_001, dtype=torch.float32).reshape(3, 700_001).clone()
    if step > 2:
        long[[0, 3 * MIB // 4, 7 * MIB // 4 + 1]] = -step
        odd[1, 5] = odd[2, 700_000] = step
    return {"long": long, "odd": odd, "same": torch.ones(500, 600), "adapter": torch.full((9000,), float(step))}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 to 5, saved by one process: from step 3 on tensors rest, of which a part differs in steps 3, 4 and 5."""
    root = tmp_path_factory.mktemp("deltas") / "run"
    with fs.Checkpointer(root) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step, {"m": changed(step), "step": step}).committed.result()
    assert fs.open(root, 4).manifest.critical == ("delta",)
    return root


def test_they_are_stored_in_parts(run: Path) -> None:
    """What the tests below are about."""
    segment, _ = fs.open(run, 4).index.chunks.extents()
    assert (segment == -1).sum() >= 2


@pytest.mark.parametrize("step", [3, 4, 5])
def test_an_export_has_every_tensor_as_a_whole(run: Path, tmp_path: Path, step: int) -> None:
    fs.export(fs.open(run, step), tmp_path / "hf", section="m")
    actual = load_file(tmp_path / "hf/model.safetensors")
    expected = changed(step)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("step", [3, 5])
def test_reads_and_streams_have_every_element(run: Path, step: int) -> None:
    checkpoint, expected = fs.open(run, step), changed(step)
    assert torch.equal(checkpoint.read("m.odd", fs.Box((1, 3), (2, 700_000 - 3))), expected["odd"][1:, 3:700_000])
    streamed = {name.removeprefix("m."): tensor.clone() for name, tensor in checkpoint.stream("m.*")}
    assert all(torch.equal(streamed[name], tensor) for name, tensor in expected.items())


def test_rules_cut_what_lies_in_parts(run: Path, tmp_path: Path) -> None:
    rules = [fs.Split("m.odd", ("m.first", "m.rest"), parts=(1, 2))]
    fs.export(fs.open(run, 5), tmp_path / "hf", section="m", rules=rules)
    tensors = load_file(tmp_path / "hf/model.safetensors")
    assert torch.equal(tensors["rest"], changed(5)["odd"][1:])
    assert torch.equal(tensors["first"], changed(5)["odd"][:1])


def test_a_flipped_bit_in_any_file_is_found_by_an_export(run: Path, tmp_path: Path) -> None:
    checkpoint = fs.open(run, 5)
    chunks = checkpoint.index.chunks
    assert chunks.stored is not None
    names = [row.name for row in checkpoint.manifest.segments]
    for number in np.unique(chunks.stored.segment, return_index=True)[1].tolist():
        file = Path(checkpoint.path) / names[int(chunks.stored.segment[number])]
        flip(file, int(chunks.stored.offset[number]))
        with pytest.raises(DamagedError, match=f"{file.name} is damaged: '[a-z.]+', chunk"):
            fs.export(checkpoint, tmp_path / f"hf-{number}", section="m")
        flip(file, int(chunks.stored.offset[number]))


def test_a_diff_that_trusts_digests_reads_unequal_chunks_alone(run: Path) -> None:
    whole = fs.diff(run, run, step_a=4, step_b=5, names="m.*")
    diff = fs.diff(run, run, step_a=4, step_b=5, names="m.*", trust_digests=True)
    counts = ("name", "unequal", "unequal_bits", "largest_absolute", "largest_relative", "largest_at", "equal")
    for tensor, other in zip(whole.tensors, diff.tensors, strict=True):
        assert [getattr(tensor, name) for name in counts] == [getattr(other, name) for name in counts]
    by_name = {tensor.name: tensor for tensor in diff.tensors}
    assert (by_name["m.same"].by_digest, by_name["m.same"].unread) == (True, 300_000)
    assert by_name["m.long"].unread == 11 * MIB // 4 - 3 - 3 * MIB // 4
    assert not by_name["m.long"].by_digest
    assert diff.bytes <= 2 * (5 * MIB + 36_000)
    assert whole.bytes > 2 * 19 * MIB


def test_a_diff_by_digests_of_a_step_with_itself_reads_nothing(run: Path) -> None:
    diff = fs.diff(run, run, step_a=5, step_b=5, trust_digests=True, names="m.*")
    assert diff.equal
    assert diff.bytes == 0
    assert all(tensor.by_digest for tensor in diff.tensors)


def test_a_diff_by_digests_alone_counts_chunks_and_reads_no_data(run: Path, tmp_path: Path) -> None:
    whole = fs.diff(run, run, step_a=4, step_b=5)
    for step in (4, 5):
        shutil.copytree(run / f"step-{step:08d}", tmp_path / str(step))
        for row in fs.open(tmp_path / str(step)).manifest.segments:
            path = tmp_path / str(step) / row.name
            path.write_bytes(path.read_bytes()[: row.header_bytes])
            os.truncate(path, row.bytes)
    diff = fs.diff(tmp_path / "4", tmp_path / "5", digests_only=True)
    assert (diff.equal, diff.bytes) == (False, 0)
    assert diff.values == whole.values
    assert [tensor.equal for tensor in diff.tensors] == [tensor.equal for tensor in whole.tensors]
    assert {tensor.name: (tensor.chunks, tensor.unequal, tensor.by_digest) for tensor in diff.tensors} == {
        "m.long": ((3, 11), None, False), "m.odd": ((2, 9), None, False), "m.same": ((0, 2), None, True),
        "m.adapter": ((1, 1), None, False),
    }
    result = CliRunner().invoke(app, ["diff", str(tmp_path / "4"), str(tmp_path / "5"), "--digests-only"])
    assert result.exit_code == 1
    assert "3 of 11 chunks" in result.stdout
    same = CliRunner().invoke(app, ["diff", str(tmp_path / "4"), str(tmp_path / "4"), "--digests-only"])
    assert same.exit_code == 0
    assert "(4 by their digests)" in same.stdout


def test_a_diff_by_digests_alone_does_not_call_equal_what_it_cannot_tell(run: Path, tmp_path: Path) -> None:
    state = changed(5)
    with fs.Checkpointer(tmp_path / "coded", engine=fs.EngineOptions(compress="max")) as checkpointer:
        checkpointer.save(5, {"m": {**state, "none": torch.zeros(0, 3)}, "step": 5})
    fs.export(fs.open(run, 5), tmp_path / "hf", section="m")
    for other in (tmp_path / "coded", tmp_path / "hf"):
        diff = fs.diff(run, other, step_a=5, section="m", names="m.*", digests_only=True)
        assert diff.bytes == 0
        assert not diff.equal
    assert all(tensor.chunks is None for tensor in diff.tensors), "another format has no digests"
    itself = fs.diff(tmp_path / "coded", tmp_path / "coded", digests_only=True)
    assert itself.equal, "what has no elements, too"


def test_pieces_that_are_columns_are_compared_by_the_rows_that_their_chunks_reach() -> None:
    """Two halves of the columns of 1000 x 2000 floats: four chunks each, of which one differs in the right half."""
    halves = tuple(DigestedPiece(Box((0, position), (1000, 1000)), first) for position, first in ((0, 0), (1000, 4)))
    tensor = SourceTensor("w", DTYPES["float32"], (1000, 2000), (), halves)
    digests = np.arange(8, dtype=np.uint64)
    other = digests.copy()
    other[6] = 99
    sources = tuple(SourceCheckpoint("flowstone", "", (), (tensor,), digests=item) for item in (digests, other))
    (run,) = unequal_runs(sources, tensor, tensor) or []  # type: ignore[arg-type]
    first, last = 2 * MIB // 4, 3 * MIB // 4 - 1  # elements of the piece, whose rows have 1000
    assert run == (first // 1000 * 2000 + 1000 + first % 1000, last // 1000 * 2000 + 1000 + last % 1000 + 1)
    assert unequal_runs((sources[0], sources[0]), tensor, tensor) == []
    cut = SourceTensor("w", DTYPES["float32"], (1000, 2000), (), halves[:1])
    assert unequal_runs(sources, tensor, cut) is None  # type: ignore[arg-type]
    assert unequal_runs(sources, replace(tensor, dtype=DTYPES["int32"]), tensor) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["rtol", "atol", "ignore_dtype", "trust_digests"])
def test_a_diff_by_digests_alone_refuses_what_digests_cannot_tell(run: Path, option: str) -> None:
    with pytest.raises(fs.ArgumentError, match="digests_only cannot be combined"):
        fs.diff(run, run, step_a=4, step_b=5, digests_only=True, **{option: 1e-3 if "tol" in option else True})
