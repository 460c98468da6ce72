"""Pickles by a hostile writer: each is refused, in time and memory that the file's length bounds."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import pytest
import torch
from models import raw
from strangers import archive, limited

import flowstone as fs
from flowstone.convert.sources.restricted_unpickler import read_pickle
from flowstone.convert.sources.torch_values import KNOWN

TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x04tQK\x00K\x04\x85K\x01"
    b"\x85\x89ccollections\nOrderedDict\n)RtR"
)
SHAPE = b"K\x04\x85K\x01\x85"
RANGE = b"c__builtin__\nrange\n\x8a\x06\0\0\0\0\0\x01\x85R"  # of 2^40


def doubled(first: bytes, pair: bytes, times: int = 60) -> bytes:
    """A value that holds the one before it twice, and so on: `pair` makes it of two on the stack."""
    steps = (b"h%c" % index + b"h%c" % index + pair + b"q%c0" % (index + 1) for index in range(times))
    return first + b"q\x000" + b"".join(steps) + b"h%c" % times


def doubled_dicts(first: bytes) -> bytes:
    steps = (b"}(U\x01ah%cU\x01bh%cuq%c0" % (index, index, index + 1) for index in range(60))
    return first + b"q\x000" + b"".join(steps) + b"h\x3c"


def called(name: bytes, *arguments: bytes) -> bytes:
    return b"c" + name.replace(b" ", b"\n") + b"\n(" + b"".join(arguments) + b"tR"


def number(value: int) -> bytes:
    return b"\x8a\x0a" + value.to_bytes(10, "little", signed=True)


DAG = doubled(b")", b"\x86")
KEYS = {
    "a tuple in a tuple, and so on": b")" + b"\x85" * 500_000,
    "a tuple that holds another twice, and so on": DAG,
    "a set in a set, and so on": b"(\x91" + b"".join(b"q\x000(h\x00\x91" for _ in range(500)) ,
    "a list": b"]",
}
VALUES = {
    "tuples": b")" + b"\x85" * 200_000, "lists": b"]" * 200_000 + b"a" * 199_999,
    "a list twice in a tuple, and so on": doubled(b"]", b"\x86"),
    "a dict twice in a dict, and so on": doubled_dicts(b"}"),
    "a tensor twice in a dict, and so on": doubled_dicts(TENSOR),
    "a tensor twice in a tuple, and so on": doubled(TENSOR, b"\x86"),
    "a list in itself": b"]q\x00h\x00a", "a dict in itself": b"}q\x00(U\x01ah\x00u",
    "a slice in a slice, and so on": b"c__builtin__\nslice\n" * 100_000 + b"N" + b"\x85R" * 100_000,
    "a list of a range": called(b"__builtin__ list", RANGE), "a set of a range": called(b"__builtin__ set", RANGE),
    "a tuple of a range": called(b"__builtin__ tuple", RANGE),
    "a counter of a range": called(b"collections Counter", RANGE),
    "a dict of a range": called(b"collections OrderedDict", RANGE),
    "a size of a range": called(b"torch Size", RANGE),
    "a size of tuples": called(b"torch Size", DAG),
    "a device of tuples": called(b"torch device", DAG),
    "bytes without end": called(b"__builtin__ bytearray", number(1 << 40)),
    "arguments of a range": b"c__builtin__\nlist\n" + RANGE + b"R",
    "a name of tuples": DAG + b"U\x01a\x93",
    "a tensor with a range as its shape": TENSOR.replace(b"K\x04\x85K", RANGE + b"K"),
    "a tensor of a million dimensions": TENSOR.replace(SHAPE, b"(" + b"K\x01" * 10**6 + b"t2"),
    "a tensor of an unknown type, of tuples": TENSOR.replace(b"v2", b"v3").replace(b"\x89c", b"\x89" + DAG + b"c"),
    "a tensor without memory": TENSOR.replace(SHAPE, b"J\xff\xff\xff\x3fJ\xff\xff\xff\x3f\x86K\0K\0\x86"),
    "a tensor that runs backwards": TENSOR.replace(b"K\x01\x85", b"J\xff\xff\xff\xff\x85"),
    "a tensor of a negative length": TENSOR.replace(b"K\x04\x85", b"J\xfc\xff\xff\xff\x85"),
}


def state(*items: bytes) -> bytes:
    return b"\x80\x02}(U\x01w" + TENSOR + b"".join(items) + b"u."


def refused(path: Path, pickled: bytes) -> fs.FlowstoneError:
    with limited(), pytest.raises(fs.FlowstoneError) as caught:
        fs.import_checkpoint(archive(path / "a.pt", pickled), path / "run")
    assert not (path / "run").exists()
    assert len(str(caught.value)) < 2000
    return caught.value


def test_the_pickles_without_what_is_hostile_come_in(tmp_path: Path) -> None:
    fs.import_checkpoint(archive(tmp_path / "a.pt", state(b"U\x01xK\x01")), tmp_path / "run")
    assert fs.open(tmp_path / "run").objects["x"] == 1


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("way", [b"}%bNs", b"}(%bNu", b"(%bNd", b"(%b\x91", b"\x8f(%b\x90"], ids=repr)
def test_a_key_that_never_ends_is_refused(tmp_path: Path, key: bytes, way: bytes) -> None:
    refused(tmp_path, state(b"U\x01x" + way.replace(b"%b", key)))


@pytest.mark.parametrize("call", [b"__builtin__ set", b"__builtin__ frozenset", b"collections OrderedDict"])
@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_container_that_is_made_by_a_call_takes_no_such_key_either(tmp_path: Path, key: bytes, call: bytes) -> None:
    pair = key + b"N\x86" if call.startswith(b"coll") else key
    refused(tmp_path, state(b"U\x01x" + called(call, b"](" + pair + b"e")))


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_that_never_ends_is_refused(tmp_path: Path, value: bytes) -> None:
    refused(tmp_path, state(b"U\x01x" + value))


def test_keys_that_all_have_one_hash_are_refused_before_they_cost_anything() -> None:
    prime = (1 << 61) - 1
    ints = b"".join(number(prime * index) + b"N" for index in range(1, 20_000))
    one_by_one = b"s".join(ints[offset : offset + 13] for offset in range(0, len(ints), 13))
    for pickled in (b"}(" + ints + b"u", b"(" + ints + b"d", b"}" + one_by_one + b"s"):
        with limited(), pytest.raises(fs.DamagedError, match="the same hash"):
            read_pickle(b"\x80\x02" + pickled + b".", KNOWN, path="a.pt")


@pytest.mark.parametrize("text", [b"\xed\xa0\x80", b"a\0b", b"x" * 70_000], ids=["surrogate", "NUL", "long"])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_key_that_is_no_name_is_refused_by_name(tmp_path: Path, text: bytes, depth: int) -> None:
    key = b"X" + struct.pack("<I", len(text)) + text
    inner = b"}(" + key + TENSOR + b"u"
    for _ in range(depth):
        inner = b"}(U\x01d" + inner + b"u"
    error = refused(tmp_path, b"\x80\x02}(U\x01sK\x01" + (b"U\x01m" + inner if depth else key + TENSOR) + b"u.")
    assert "name" in str(error) or "is nested too deeply" in str(error)


def test_numbers_and_text_that_no_name_has_are_kept_as_values(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "kept": {"lone": "\ud800", "big": 1 << 20_000, 1 << 20_000: 2}}, tmp_path / "a.pt")
    fs.import_checkpoint(tmp_path / "a.pt", tmp_path / "run")
    kept = fs.open(tmp_path / "run").objects["kept"]
    assert kept == {"lone": "\ud800", "big": 1 << 20_000, 1 << 20_000: 2}


def test_containers_of_protocol_2_come_in(tmp_path: Path) -> None:
    held = {
        "b": bytearray(b"\xff\0"), "e": bytearray(), "n": b"", "s": {1, (2, 3)}, "f": frozenset("ab"), "r": range(3),
        "c": 1j, "x": slice(1, None),
    }
    torch.save({"w": torch.ones(2), "held": held}, tmp_path / "a.pt")
    fs.import_checkpoint(tmp_path / "a.pt", tmp_path / "run")
    assert fs.open(tmp_path / "run").objects["held"] == held


@pytest.mark.parametrize("strange", [{"s": {torch.float16, len}}, {(1, len): 2}], ids=["set", "key"])
def test_what_a_set_or_a_key_cannot_hold_is_named_and_may_be_left_out(tmp_path: Path, strange: object) -> None:
    torch.save({"w": torch.ones(2), "held": strange}, tmp_path / "a.pt")
    with pytest.raises(fs.UnsupportedFormatError, match=r"builtin__?s?\.len|torch\.float16"):
        fs.import_checkpoint(tmp_path / "a.pt", tmp_path / "run")
    assert fs.import_checkpoint(tmp_path / "a.pt", tmp_path / "run", rules=fs.Skip("held*")).tensors == ("w",)


def test_tensors_that_share_memory_come_in_up_to_a_limit(tmp_path: Path) -> None:
    mask = torch.ones(1).expand(1000, 1000)
    torch.save({"mask": mask, "same": mask}, tmp_path / "a.pt")
    report = fs.import_checkpoint(tmp_path / "a.pt", tmp_path / "run")
    assert report.aliases == (("model.same", "model.mask"),)
    assert raw(fs.open(tmp_path / "run").read("model.mask")) == raw(mask)
    torch.save({"mask": torch.ones(1).expand(1 << 15, 1 << 14)}, tmp_path / "b.pt")
    with pytest.raises(fs.UnsupportedFormatError, match="would expand from"):
        fs.import_checkpoint(tmp_path / "b.pt", tmp_path / "other")


def test_an_archive_that_says_its_directory_is_endless_is_refused(tmp_path: Path) -> None:
    """zipfile would read it at once, whatever its length."""
    path = archive(tmp_path / "a.pt", pickle.dumps({}))
    content = path.read_bytes()
    end = content.rindex(b"PK\x05\x06")
    with path.open("wb") as opened:
        opened.write(content[:end])
        opened.seek(1 << 38)
        position = opened.tell()
        opened.write(b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 1, 1, 1 << 37, position - (1 << 37)))
        opened.write(b"PK\x06\x07" + struct.pack("<IQI", 0, position, 1))
        opened.write(b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0))
    with limited(), pytest.raises(fs.DamagedError, match="directory of the zip archive takes"):
        fs.import_checkpoint(path, tmp_path / "run")
