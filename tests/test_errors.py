"""How errors are printed."""

from __future__ import annotations

import pickle

import pytest

import flowstone as fs
from flowstone.errors import FlowstoneError


def test_what_a_file_or_a_name_holds_is_printed_at_a_length_that_a_person_reads() -> None:
    long = "a" * 70_000 + "z"
    error = FlowstoneError(f"cannot read {long}", found=f"{long}\nshort", next="restore it")
    lines = str(error).splitlines()
    assert [len(line) < 1100 for line in lines] == [True] * 4
    assert lines[0].startswith("cannot read aaa")
    assert lines[0].endswith("az")
    assert "[69013 characters more]" in lines[0]
    assert lines[2:] == ["              short", "  next        restore it"]
    assert error.facts["found"] == f"{long}\nshort", "`facts` keep the whole text"


def test_what_is_short_is_printed_as_it_is() -> None:
    assert str(FlowstoneError("a" * 1000, expected="b")) == "a" * 1000 + "\n  expected    b"


@pytest.mark.parametrize(
    "error",
    [
        fs.DamagedError("bad", written=("w",), next="load"),
        fs.StateChangedError("moved", path="p", offset=1, length=2, names=("w",)),
        fs.RankError("gone", rank=3, phase="plan"), fs.MismatchError("not the same", differences=("a",)),
        fs.FullError("full", errno=28, needed=5), fs.NoTensorError("no such tensor"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_between_processes(error: fs.FlowstoneError) -> None:
    actual = pickle.loads(pickle.dumps(error))
    assert type(actual) is type(error)
    assert str(actual) == str(error)
    assert vars(actual) == vars(error)
