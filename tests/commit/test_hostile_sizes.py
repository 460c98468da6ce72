"""Sizes in a file from an untrusted source: memory and time follow from verified sizes, not from claimed ones."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Literal
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch

import flowstone as fs
from flowstone.commit import read as contents
from flowstone.errors import DamagedError, StorageError, UnsupportedStateError
from flowstone.format import bounds, objects
from flowstone.format.digest import digest
from flowstone.format.segment import parse_header
from forge import edit_header, edit_index, edit_manifest, sealed_text, vouch_for

GIB, MIB = 1 << 30, 1 << 20
ZEROS = digest(bytes(MIB))


def refused(checkpoint: Path, *, peak_bytes: int) -> DamagedError:
    """The error of a check, which took no more memory than that."""
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError) as caught:
            fs.open(checkpoint.parent).check()
        assert tracemalloc.get_traced_memory()[1] < peak_bytes
    finally:
        tracemalloc.stop()
    assert "next" in caught.value.facts
    return caught.value


def stretch(path: Path, size: int) -> None:
    """Make a file as long as that, without taking room on the disk."""
    os.truncate(path, size)


def claim(checkpoint: Path, entry: str, size: int, chunk: str) -> None:
    """Have the manifest say that an entry's file is so long, and what each chunk's digest is."""
    edit_manifest(checkpoint, lambda m: m[entry].update(bytes=size, chunks=[chunk] * -(-size // MIB)))
    stretch(checkpoint / json.loads((checkpoint / "manifest.json").read_bytes())[entry]["name"], size)


@pytest.mark.parametrize("name", ["flowstone.json", "manifest.json"])
def test_a_sealed_file_of_64_gib_is_refused_before_it_is_read(checkpoint: Path, name: str) -> None:
    path = (checkpoint.parent if name == "flowstone.json" else checkpoint) / name
    stretch(path, 64 * GIB)
    error = refused(checkpoint, peak_bytes=4 * MIB)
    assert error.message == f"{path} is too long"
    assert error.facts["found"] == f"{64 * GIB} bytes"


@pytest.mark.parametrize("name", ["index.safetensors", "objects.json", "rank-00000.safetensors"])
def test_a_file_that_was_stretched_to_64_gib_is_refused_before_it_is_read(checkpoint: Path, name: str) -> None:
    stretch(checkpoint / name, 64 * GIB)
    assert refused(checkpoint, peak_bytes=4 * MIB).message == f"{checkpoint / name} is too long"


@pytest.mark.parametrize("entry", ["index", "objects"])
def test_64_gib_that_the_manifest_claims_are_refused_with_the_limit(checkpoint: Path, entry: str) -> None:
    claim(checkpoint, entry, 64 * GIB, "0" * 16)
    assert f"has {64 * GIB} bytes, above the limit of " in refused(checkpoint, peak_bytes=32 * MIB).message


@pytest.mark.parametrize("entry", ["index", "objects"])
def test_a_gib_that_the_manifest_claims_is_refused_at_its_first_chunk(checkpoint: Path, entry: str) -> None:
    claim(checkpoint, entry, GIB, "0" * 16)
    error = refused(checkpoint, peak_bytes=8 * MIB)
    assert "is damaged: chunk 0 does not match its digest" in error.message
    assert error.facts["range"] == f"bytes 0..{MIB}"


def test_an_index_of_zeros_whose_digests_are_right_is_refused_by_its_header(checkpoint: Path) -> None:
    stretch(checkpoint / "index.safetensors", 0)
    claim(checkpoint, "index", 16 * GIB, ZEROS)
    assert "has no valid safetensors header" in refused(checkpoint, peak_bytes=32 * MIB).message


def test_an_index_that_is_longer_than_its_columns_is_refused_by_its_header(checkpoint: Path) -> None:
    first = (checkpoint / "index.safetensors").read_bytes().ljust(MIB, b"\0")
    claim(checkpoint, "index", 4 * GIB, ZEROS)
    edit_manifest(checkpoint, lambda m: m["index"]["chunks"].__setitem__(0, digest(first)))
    assert "its header lists " in refused(checkpoint, peak_bytes=32 * MIB).message


def test_a_segments_header_of_64_gib_is_refused_before_it_is_read(checkpoint: Path) -> None:
    stretch(checkpoint / "rank-00000.safetensors", 64 * GIB)
    edit_manifest(checkpoint, lambda m: m["segments"][0].update(bytes=64 * GIB, header_bytes=64 * GIB))
    assert f"but a header of {64 * GIB}" in refused(checkpoint, peak_bytes=4 * MIB).message


def test_millions_of_empty_containers_are_refused_before_they_are_parsed(checkpoint: Path) -> None:
    text = b'{"replicated":{"x":[' + b",".join([b"{}"] * (16 * MIB)) + b']},"per_rank":{}}'
    vouch_for(checkpoint, "objects", text)
    error = refused(checkpoint, peak_bytes=3 * len(text))
    assert "holds too many lists and dicts" in error.message


def test_brackets_in_text_are_no_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "OBJECTS_CONTAINERS_MAX", 10)
    assert bounds.count_containers(json.dumps({"a": '[{"' * 50 + "\\", "b": [[], {}]}).encode()) == 4
    assert bounds.count_containers(json.dumps([[]] * 50).encode()) == 51
    assert bounds.count_containers(b'[[[[[[[[[[[{"' + b"[" * 50) == 12, "a string that does not end"


def test_a_state_of_more_containers_than_a_reader_takes_is_refused_by_the_save(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "OBJECTS_CONTAINERS_MAX", 100)
    monkeypatch.setattr(contents, "OBJECTS_CONTAINERS_MAX", 100)
    with fs.Checkpointer(store) as checkpointer:
        save = checkpointer.save(1, {"x": [[i] for i in range(200)]})
        error = save.committed.exception()
        assert isinstance(error, UnsupportedStateError), error
        assert "into a tensor or a numpy array" in str(error)
        checkpointer.save(2, {"x": list(range(200))}).committed.result()


def test_no_memory_for_what_is_read_is_an_error_of_the_system(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(contents, "decode_index", fail)
    with pytest.raises(StorageError, match=r"not enough memory to read .*index\.safetensors") as caught:
        fs.open(checkpoint).tensors  # noqa: B018
    assert caught.value.errno == errno.ENOMEM


# Time


def test_keys_that_all_have_one_hash_are_refused() -> None:
    """Each would be compared with all before it: a minute for 100,000."""
    clash = (1 << 61) - 1
    keys = [{"$int": f"{i * clash:x}"} for i in range(1 << 16, (1 << 16) + 5000)]
    for node in ({"$set": keys}, {"$dict": [[key, 0] for key in keys]}):
        with pytest.raises(DamagedError, match="have the same hash"):
            objects.decode(node, "x")
    assert len(objects.decode({"$set": list(range(5000))}, "x")) == 5000  # type: ignore[arg-type]


def test_a_long_key_is_not_copied_for_each_value_below_it() -> None:
    """It was: 200 GB for this document of 4 MB."""
    key, items = "k" * MIB, list(range(200_000))
    assert objects.decode({key: items}, "x") == {key: items}
    with pytest.raises(DamagedError) as caught:
        objects.decode({key: [0, {"$int": "0"}]}, "x")
    assert len(str(caught.value)) < 1000
    assert ".1' is invalid" in str(caught.value)


# Documents that are no JSON of ours


def test_text_that_is_no_utf_8_is_damage_under_any_seal(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    fields = json.loads(path.read_bytes())
    del fields["digest"]
    path.write_bytes(sealed_text(json.dumps(fields | {"writer": "@"}).encode().replace(b"@", b"\xff")))
    message = r"manifest\.json matches its digest, but its content is not valid.*(?i:utf-8)"
    with pytest.raises(DamagedError, match=message):
        fs.open(checkpoint.parent)


@pytest.mark.parametrize("metadata", [b"[]", b"null", b"3", b'{"dtypes":5}', b'{"dtypes":null}', b"{}"])
def test_metadata_that_is_no_text_by_name_is_damage(checkpoint: Path, metadata: bytes) -> None:
    data = (checkpoint / "index.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    fields = msgspec.json.decode(data[8:end], type=dict[str, msgspec.Raw])
    text = msgspec.json.encode(fields | {"__metadata__": msgspec.Raw(metadata)})
    vouch_for(checkpoint, "index", len(text).to_bytes(8, "little") + text + data[end:])
    with pytest.raises(DamagedError, match=r"index\.safetensors (has no valid|contradicts itself)"):
        fs.open(checkpoint).tensors  # noqa: B018


@pytest.mark.parametrize(
    "part", [b"[" * 100_000, b'{"a":' * 100_000, b"{}," * 100_000, b'"\\ud800"', b"1e999", b"9" * 5000, b"-1", b"null"]
)
def test_an_entry_of_another_kind_takes_no_memory_and_is_damage(part: bytes) -> None:
    for text in (b'{"a":' + part + b"}", b'{"a":{"dtype":"U8","shape":[],"data_offsets":' + part + b"}}"):
        tracemalloc.start()
        with pytest.raises(DamagedError, match="a file has no valid safetensors header"):
            parse_header(len(text).to_bytes(8, "little") + text, path="a file")
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
        tracemalloc.stop()


@pytest.mark.parametrize("field", ["id", "store", "created", "writer"])
@pytest.mark.parametrize("text", ["\x1b]0;title\a", "a\0b", "two\nlines", "x" * 2000])
def test_what_a_terminal_would_obey_is_no_text_of_a_manifest(checkpoint: Path, field: str, text: str) -> None:
    edit_manifest(checkpoint, lambda m: m.update({field: text}))
    with pytest.raises(DamagedError, match=f"{field} .* is not a short printable text"):
        fs.open(checkpoint)


@pytest.mark.parametrize(("make", "end"), [(np.random.MT19937, 624), (np.random.Philox, 4)])
def test_a_generators_place_beyond_its_table_is_refused(
    store: Path, make: Callable[[int], np.random.BitGenerator], end: int
) -> None:
    """numpy believes it, and reads whatever lies behind the table."""
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"g": np.random.Generator(make(1)), "x": torch.ones(1)}).committed.result()
    checkpoint = next(store.glob("step-*"))
    text = (checkpoint / "objects.json").read_bytes()
    for place in (end, end + 1, -1, 1 << 40):
        nodes = json.loads(text)
        state = nodes["replicated"]["g"]
        (state["state"] if "pos" in state["state"] else state)["pos" if end == 624 else "buffer_pos"] = place
        vouch_for(checkpoint, "objects", json.dumps(nodes).encode())
        with fs.Checkpointer(store) as checkpointer:
            if place == end:
                checkpointer.load({"g": np.random.Generator(make(2)), "x": torch.ones(1)})
                continue
            with pytest.raises(fs.MismatchError, match=r"kind +g: wanted the state of"):
                checkpointer.load({"g": np.random.Generator(make(2)), "x": torch.ones(1)})


def test_an_index_column_that_says_another_length_is_refused(checkpoint: Path) -> None:
    edit_index(checkpoint, lambda _: None)
    fs.open(checkpoint).check()
    data = (checkpoint / "index.safetensors").read_bytes()
    spoilt = data.replace(b'"piece.bytes":{"dtype":"U64","shape":[', b'"piece.bytes":{"dtype":"U64","shape":[0')
    assert spoilt != data
    vouch_for(checkpoint, "index", spoilt)
    with pytest.raises(DamagedError):
        fs.open(checkpoint).tensors  # noqa: B018


def test_a_headers_immense_number_is_damage(checkpoint: Path) -> None:
    def change(header: bytes) -> bytes:
        offset = header.index(b'"data_offsets":[') + len(b'"data_offsets":[')
        return (header[:offset] + b"9" * 30 + header[offset:])[: len(header)]

    edit_header(checkpoint, change)
    assert not fs.open(checkpoint).inspect().sound


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_shape_beyond_what_is_stored_is_refused_before_there_is_memory_for_it(
    checkpoint: Path, framework: Literal["torch", "numpy"]
) -> None:
    edit_index(checkpoint, lambda columns: columns["tensor.shape"].__setitem__(slice(None), 1 << 20))
    opened, mapped = fs.open(checkpoint), 0
    for name in opened.tensors:
        if opened.tensors[name].shape:
            mapped += 1
            with pytest.raises(fs.CoverageError):
                opened.read(name, framework=framework)
    assert mapped > 5


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_tensor_that_there_is_no_memory_for_says_how_much_it_needs(
    checkpoint: Path, framework: Literal["torch", "numpy"]
) -> None:
    table = fs.open(checkpoint).tensors
    name = next(name for name in table if table[name].dtype == "float32")
    with (
        mock.patch("torch.empty", side_effect=RuntimeError("can't allocate memory")),
        mock.patch("numpy.empty", side_effect=MemoryError),
        pytest.raises(fs.BudgetError, match="no memory for a tensor of float32 and shape") as caught,
    ):
        fs.open(checkpoint).read(name, framework=framework)
    assert str(caught.value.facts["needed"]).endswith(" bytes")
