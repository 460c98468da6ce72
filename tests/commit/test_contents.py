"""A checkpoint's own files: damage, contradictions and references to other places are refused by name.

The edits here have valid digests, like those of a hostile or a faulty writer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import flowstone as fs
from flowstone.errors import DamagedError, FormatError, NoCheckpointError, StorageError, UnsupportedFormatError
from forge import content, edit_header, edit_index, edit_manifest, vouch_for, with_checksum
from small_state import STEP, state

Columns = dict[str, np.ndarray]


def refused(checkpoint: Path, kind: type[fs.FlowstoneError] = DamagedError) -> fs.FlowstoneError:
    """The error that a load gives, which `fs.open(...).check()` gives too; the state is untouched by it."""
    blank = state(9.0)
    before = content(blank)
    with fs.Checkpointer(checkpoint.parent) as checkpointer, pytest.raises(kind) as caught:
        checkpointer.load(blank)
    assert content(blank) == before, "a load that was refused changed the state"
    with pytest.raises(kind) as again:
        fs.open(checkpoint.parent).check()
    assert str(again.value) == str(caught.value)
    assert "next" in caught.value.facts
    return caught.value


# The manifest


@pytest.mark.parametrize("kept", [0, 1, 30, 31, 32, 400, -1])
def test_a_truncated_manifest_is_named(checkpoint: Path, kept: int) -> None:
    path = checkpoint / "manifest.json"
    path.write_bytes(path.read_bytes()[:kept])
    error = refused(checkpoint)
    assert error.message == f"{path} is truncated or was altered: it does not end with its digest"
    assert error.facts["found"] == f"{path.stat().st_size} bytes"


def test_an_altered_manifest_is_named_with_both_digests(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"ranks": 1', b'"ranks": 2'))
    error = refused(checkpoint)
    assert error.message == f"{path} was altered: its bytes do not match the digest at its end"
    assert error.facts["expected"] != error.facts["found"]


def test_a_manifest_with_something_behind_it_is_named(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    path.write_bytes(path.read_bytes() + b"\n")
    assert "does not end with its digest" in refused(checkpoint).message


def test_a_future_version_is_named_before_its_fields_are_read(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_bytes(with_checksum({"flowstone": 2, "step": "seven", "unknown": []}))
    error = refused(checkpoint, UnsupportedFormatError)
    assert error.message == f"{checkpoint}/manifest.json needs a newer version of Flowstone"
    assert "version up to 1" in str(error.facts["expected"])
    assert error.facts["found"] == "format version 2"
    assert error.facts["next"] == "upgrade flowstone"


def test_an_unknown_critical_feature_is_refused_by_name(checkpoint: Path) -> None:
    edit_manifest(checkpoint, lambda m: m.update(critical=["journal", "codec.zstd"]))
    error = refused(checkpoint, UnsupportedFormatError)
    assert error.facts["found"] == "format version 1, critical feature 'codec.zstd', critical feature 'journal'"


def test_an_unknown_field_that_is_not_critical_is_skipped(checkpoint: Path) -> None:
    edit_manifest(checkpoint, lambda m: m.update(tiers=["s3://elsewhere"]))
    assert fs.open(checkpoint.parent).verify().sound


@pytest.mark.parametrize("version", [0, -1])
def test_a_version_that_never_was_is_refused(checkpoint: Path, version: int) -> None:
    edit_manifest(checkpoint, lambda m: m.update(flowstone=version))
    assert f"format version {version} never existed" in refused(checkpoint).message


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ".", "", "a\0b", ".hidden"])
@pytest.mark.parametrize("entry", ["segment", "index", "objects"])
def test_a_manifest_that_points_outside_its_directory_is_refused(checkpoint: Path, entry: str, name: str) -> None:
    def change(manifest: dict) -> None:
        (manifest["segments"][0] if entry == "segment" else manifest[entry])["name"] = name

    edit_manifest(checkpoint, change)
    error = refused(checkpoint)
    assert error.message == f"{checkpoint}/manifest.json is not valid: {name!r} is not a plain file name"


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "index.safetensors", "objects.json"])
def test_a_link_in_the_place_of_a_file_is_refused(checkpoint: Path, tmp_path: Path, name: str) -> None:
    shutil.move(checkpoint / name, tmp_path / "elsewhere")
    (checkpoint / name).symlink_to(tmp_path / "elsewhere")
    error = refused(checkpoint, StorageError)
    assert error.message == f"cannot {'stat' if name.startswith('rank') else 'read'} {checkpoint}/{name}"
    assert "ELOOP" in str(error.facts["reason"])
    assert "a store must not contain symbolic links" in str(error.facts["next"])
    (finding,) = fs.open(checkpoint.parent).inspect().findings
    assert finding.file == name
    assert "a store must not contain symbolic links" in finding.what


def test_a_link_in_the_place_of_the_manifest_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    shutil.move(checkpoint / "manifest.json", tmp_path / "elsewhere")
    (checkpoint / "manifest.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=r"cannot read .*manifest\.json") as caught:
        fs.open(checkpoint.parent)
    assert "ELOOP" in str(caught.value.facts["reason"])
    assert "symbolic links" in str(caught.value.facts["next"])


def test_a_segment_of_another_checkpoint_needs_its_feature(checkpoint: Path) -> None:
    edit_manifest(checkpoint, lambda m: m["segments"][0].update(home="step-00000001"))
    message = refused(checkpoint).message
    assert "is from checkpoint 'step-00000001', but the critical feature 'delta' is missing" in message


def test_a_file_listed_twice_is_refused(checkpoint: Path) -> None:
    edit_manifest(checkpoint, lambda m: m["segments"].append(m["segments"][0] | {"id": 1}))
    assert "'rank-00000.safetensors' is listed twice" in refused(checkpoint).message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["segments"][0].update(id=3), "segment 3 is listed at position 0"),
        (lambda m: m["segments"][0].update(header_bytes=4), "but a header of 4"),
        (lambda m: m["segments"][0].update(header_bytes=1 << 60), f"but a header of {1 << 60}"),
        (lambda m: m["index"]["chunks"].append("0" * 16), "has 2 digests for"),
        (lambda m: m["objects"].update(bytes=-5), "has -5 bytes"),
        (lambda m: m.update(step=-1), "step -1 is negative"),
        (lambda m: m.update(step="7"), "Expected `int`, got `str` - at `$.step`"),
        (lambda m: m.pop("segments"), "missing required field `segments`"),
        (lambda m: m["index"].update(name="other.safetensors"), "'other.safetensors' instead of 'index.safetensors'"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    checkpoint: Path, change: Callable[[dict], object], message: str
) -> None:
    edit_manifest(checkpoint, change)
    assert message in refused(checkpoint).message


def test_a_checkpoint_under_another_steps_name_is_refused(checkpoint: Path) -> None:
    moved = checkpoint.rename(checkpoint.parent / "step-00000009")
    error = refused(moved)
    assert error.message == f"{moved}/manifest.json is in the wrong directory"
    assert (error.facts["expected"], error.facts["found"]) == ("step 9", f"step {STEP}")
    with pytest.raises(DamagedError, match="is in the wrong directory"):
        fs.open(moved)


def test_a_checkpoint_opens_under_any_name_that_is_no_steps(checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "best so far")
    assert fs.open(copy).verify().step == STEP
    assert fs.open(copy, step=STEP).step == STEP
    with pytest.raises(NoCheckpointError, match=f"is the checkpoint of step {STEP}, not a store"):
        fs.open(copy, step=3)


# Sizes


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "index.safetensors", "objects.json"])
@pytest.mark.parametrize("change", [-1, -4096, 1, 4096])
def test_a_file_of_another_size_is_named_with_both_sizes(checkpoint: Path, name: str, change: int) -> None:
    path, size = checkpoint / name, (checkpoint / name).stat().st_size
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + bytes(change))
    error = refused(checkpoint)
    assert error.message == f"{path} is too {'short' if change < 0 else 'long'}"
    assert error.facts["expected"] == f"{size} bytes"
    assert error.facts["found"] == f"{max(0, size + change)} bytes"


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "index.safetensors", "objects.json"])
def test_a_missing_file_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    assert refused(checkpoint).message == f"{checkpoint}/{name} is missing"


# The index


def _flip_dtypes(columns: Columns) -> None:
    columns["dtypes"] = columns["dtypes"].replace("bfloat16", "quaternion")


def _overlap(columns: Columns) -> None:
    offset, length = columns["piece.offset"], columns["piece.bytes"]
    order = np.argsort(offset)
    offset[order[1]] = offset[order[0]] + length[order[0]] - 1


def _twice(columns: Columns) -> None:
    columns["tensor.name"] = np.frombuffer(bytes(columns["tensor.name"]).replace(b"many.1", b"many.2"), np.uint8)


def _immense_without_elements(columns: Columns) -> None:
    entry = {"tensor.name": [ord("z")], "tensor.name_bytes": [1], "tensor.dtype": [0], "tensor.ndim": [2],
             "tensor.shape": [1 << 63, 0]}
    for name, more in entry.items():
        columns[name] = np.append(columns[name], np.array(more, columns[name].dtype))


def _edit(name: str, change: Callable[[np.ndarray], object]) -> Callable[[Columns], None]:
    def apply(columns: Columns) -> None:
        changed = change(columns[name])
        if isinstance(changed, np.ndarray):
            columns[name] = changed

    return apply


def _set(name: str, position: int, value: int) -> Callable[[Columns], None]:
    return _edit(name, lambda column: column.__setitem__(position, value))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_overlap, "two pieces or chunks overlap in a file"),
        (_set("piece.offset", 0, 8), "a piece or chunk lies outside of its segment"),
        (_set("piece.offset", 0, (1 << 64) - 4096), "a piece or chunk lies outside of its segment"),
        (_set("piece.segment", 0, 1), "a segment that the manifest does not list"),
        (_set("piece.bytes", 0, 1 << 63), "piece.bytes of a piece does not match its box"),
        (_set("piece.box", 0, 1), "the box of a piece lies outside of its tensor"),
        (_set("piece.box", 1, (1 << 64) - 1), ""),
        (_set("piece.tensor", 0, 99), "piece.tensor is not sorted, or refers to a tensor that does not exist"),
        (_set("chunk.bytes", 0, 5), "the stored length of a chunk is not possible for its codec and its data"),
        (_set("chunk.codec", 0, 1), "unknown codec 1"),
        (_set("tensor.dtype", 0, 77), ""),
        (_set("tensor.ndim", 0, 2), "tensor.ndim does not match the length of tensor.shape"),
        (_set("tensor.ndim", 0, 65), "tensor.ndim does not match the length of tensor.shape"),
        (_set("tensor.name_bytes", 0, 2), "the lengths of the names do not add up to the length of their text"),
        (_set("tensor.name", 0, 0xFF), "codec can't decode byte"),
        (_set("alias.tensor", 0, 99), "an alias refers to a tensor that does not exist"),
        (_set("tensor.shape", 0, 1 << 62), "too many elements"),
        (_set("tensor.shape", 0, 1 << 63), "too many elements"),
        (_immense_without_elements, "too many elements"),
        (_edit("chunk.digest", lambda c: c[:-1]), "the columns chunk.* do not have an entry for each chunk"),
        (_edit("piece.segment", lambda c: c[:-1]), "the columns piece.* are not of the same length"),
        (_flip_dtypes, "unknown dtypes ['quaternion']"),
        (_twice, "two tensors or aliases have the same name"),
        (lambda columns: columns.pop("piece.offset"), "piece.offset"),
        (_edit("chunk.bytes", lambda c: c.astype(np.uint64)), "column 'chunk.bytes' has the type U64"),
        (_edit("piece.bytes", lambda c: c.reshape(1, -1)), ""),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(
    checkpoint: Path, change: Callable[[Columns], object], message: str
) -> None:
    edit_index(checkpoint, change)
    error = refused(checkpoint)
    assert error.message.startswith(f"{checkpoint}/index.safetensors contradicts itself: ")
    assert message in error.message


def test_an_index_without_a_header_is_refused(checkpoint: Path) -> None:
    vouch_for(checkpoint, "index", b"\xff" * 100)
    assert "index.safetensors has no valid safetensors header" in refused(checkpoint).message


def test_columns_with_a_hole_between_them_are_refused(checkpoint: Path) -> None:
    data = (checkpoint / "index.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    last = max((k for k in header if k != "__metadata__"), key=lambda k: header[k]["data_offsets"][1])
    header[last]["data_offsets"] = [n + 8 for n in header[last]["data_offsets"]]
    text = json.dumps(header).encode()
    vouch_for(checkpoint, "index", len(text).to_bytes(8, "little") + text + data[8 + length :] + bytes(8))
    assert "has no valid safetensors header" in refused(checkpoint).message


def test_a_damaged_index_is_named_with_its_range(checkpoint: Path) -> None:
    path = checkpoint / "index.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)
    error = refused(checkpoint)
    assert error.message == f"{path} is damaged: chunk 0 does not match its digest"
    assert error.facts["range"] == f"bytes 0..{len(data)}"


# Objects


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (b"[]", DamagedError, "objects.json matches its digest, but its content is not valid"),
        (b"{", DamagedError, "objects.json matches its digest, but its content is not valid"),
        (b'{"replicated": {}}', DamagedError,
         "its digest, but its content is not valid: Object missing required field `per_rank`"),
        (b'{"replicated": {"objects": {"$code": "x"}}, "per_rank": {}}', UnsupportedFormatError,
         "the object 'objects' is of a type that this version cannot read"),
        (b'{"replicated": {"objects": {"$int": "zz"}}, "per_rank": {}}', DamagedError,
         "the stored object 'objects' is invalid"),
        (b'{"replicated": {"objects": ' + b"[" * 5000 + b"]" * 5000 + b'}, "per_rank": {}}', DamagedError, "objects"),
    ],
)
def test_objects_that_no_writer_makes_are_refused(
    checkpoint: Path, data: bytes, kind: type[FormatError], message: str
) -> None:
    vouch_for(checkpoint, "objects", data)
    assert message in refused(checkpoint, kind).message


# Segment headers


def test_a_damaged_header_is_named(checkpoint: Path) -> None:
    path = checkpoint / "rank-00000.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"big"', b'"pig"', 1))
    error = refused(checkpoint)
    assert error.message == f"the header of {path} does not match its digest"
    assert str(error.facts["range"]).startswith("bytes 0..")


def test_a_header_that_tells_other_readers_something_else_is_found_by_verify(checkpoint: Path) -> None:
    edit_header(checkpoint, lambda header: header.replace(b'"big"', b'"pig"', 1))
    whats = [finding.what for finding in fs.open(checkpoint.parent).inspect().findings]
    assert whats == ["entry 'big' differs between header and index", "entry 'pig' differs between header and index"]


def test_the_unspoilt_checkpoint_loads(checkpoint: Path) -> None:
    blank = state(0.0)
    with fs.Checkpointer(checkpoint.parent) as checkpointer:
        assert checkpointer.load(blank).step == STEP
    assert content(blank) == content(state())
    assert torch.equal(fs.open(checkpoint.parent).read("big"), state()["big"])
