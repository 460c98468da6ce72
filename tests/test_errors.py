"""How errors are printed."""

from __future__ import annotations

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
    assert error.facts["found"] == f"{long}\nshort", "whoever asks has all of it"


def test_what_is_short_is_printed_as_it_is() -> None:
    assert str(FlowstoneError("a" * 1000, expected="b")) == "a" * 1000 + "\n  expected    b"
