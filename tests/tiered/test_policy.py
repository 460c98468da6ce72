"""Impossible lists of tiers are refused when the Checkpointer is created, with the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated import ENGINE

import flowstone as fs
from flowstone.errors import ArgumentError
from flowstone.store.memory import MemoryStore


def _refused(*arguments: object, **options: object) -> str:
    with pytest.raises(ArgumentError) as refusal:
        fs.Checkpointer(*arguments, **options)  # type: ignore[arg-type]
    return str(refusal.value)


def test_an_empty_list() -> None:
    assert "the list of tiers is empty" in _refused([])


def test_a_tier_twice(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert "tiers 1 and 3 are the same store" in _refused([tmp_path / "a", tmp_path / "b", str(tmp_path / "a")])
    assert "tiers 1 and 2 are the same store" in _refused([tmp_path / "a", tmp_path / "link"])
    memory = MemoryStore()
    assert "tiers 2 and 3 are the same store" in _refused([tmp_path / "a", memory, memory])
    assert "one is inside the other" in _refused([tmp_path / "a", tmp_path / "a" / "b"])


def test_policies_that_can_never_flush(tmp_path: Path) -> None:
    for name, value in (("every", 0), ("every", -3), ("every", 10**16), ("lag", 0), ("lag_bytes", -1)):
        with pytest.raises(ArgumentError, match=f"{name}={value}"):
            fs.Tier(tmp_path / "b", **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="bytes_per_s=1000"):
        fs.Tier(tmp_path / "b", bytes_per_s=1000)
    with pytest.raises(ArgumentError, match="every must be an integer, not '10'"):
        fs.Tier(tmp_path / "b", every="10")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="keep"):
        fs.Tier(tmp_path / "b", keep=0)
    with pytest.raises(ArgumentError, match="drain_s"):
        fs.Tier(tmp_path / "b", drain_s=-1)


def test_nothing_durable() -> None:
    assert "none of the 2 tiers is durable" in _refused([MemoryStore(), MemoryStore()])
    alone = _refused([MemoryStore(location="of this process")])  # its saves would never be durable, nor fail
    assert "the only tier is not durable" in alone
    assert "found       of this process" in alone
    assert "pass a single store instead of a list" in alone
    fs.Checkpointer(MemoryStore()).close()


def test_the_first_tier_takes_every_save(tmp_path: Path) -> None:
    assert "has every=10" in _refused([fs.Tier(tmp_path / "a", every=10), tmp_path / "b"])
    assert "has bytes_per_s=4000000" in _refused([fs.Tier(tmp_path / "a", bytes_per_s=4e6)])  # type: ignore[arg-type]
    assert "give only one of them" in _refused([fs.Tier(tmp_path / "a", keep=2), tmp_path / "b"], keep=3)


def test_a_budget_that_does_not_hold_the_flushes(tmp_path: Path) -> None:
    message = _refused([tmp_path / "a", tmp_path / "b"], budget_bytes=32 << 20, engine=ENGINE)
    assert "expected    at least" in message
    assert "budget_bytes=33554432" in message
    fs.Checkpointer([tmp_path / "a", tmp_path / "b"], budget_bytes=64 << 20, engine=ENGINE).close()
    fs.Checkpointer([tmp_path / "a"], budget_bytes=32 << 20, engine=ENGINE).close()


def test_a_journal_is_in_one_store(tmp_path: Path) -> None:
    assert "every_step needs a single store" in _refused([tmp_path / "a", tmp_path / "b"], every_step=True)


def test_what_is_no_store(tmp_path: Path) -> None:
    assert "is not a path" in _refused([tmp_path / "a", 3])
    assert "is a URL" in _refused([tmp_path / "a", "ftp://host/run"])
    assert not list(tmp_path.iterdir()), "nothing is created"
