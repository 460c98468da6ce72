"""Data that several ranks of a node need is read once, and passed on through shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import Ranks, run

import flowstone as fs
from flowstone.config import MIB, SHARED_READ_BYTES_MIN
from node_reads import SIZES

REPLICAS = 4 * sum(SIZES)
WHOLE = REPLICAS + 12 * MIB  # with the shards: of that each rank wants a part of every chunk
ALONE = 4 * SIZES[4]


@pytest.fixture
def path(tmp_path: Path) -> str:
    run(1, "node_reads", "save", str(tmp_path / "run"))
    return str(tmp_path / "run")


def test_replicas_are_read_once_whatever_the_number_of_ranks(path: str) -> None:
    results = run(3, "node_reads", "load_replicas", path)
    assert sum(read for read, _ in results) <= 1.05 * REPLICAS  # type: ignore[misc]
    assert [taken for _, taken in results] == [REPLICAS] * 3  # type: ignore[misc]
    assert all(read > 0.2 * REPLICAS for read, _ in results), "each reads its part"  # type: ignore[misc]


def test_chunks_of_which_ranks_want_parts_are_read_once_and_what_one_wants_alone_by_that_one(path: str) -> None:
    shared, apart = run(2, "node_reads", "load", path, True), run(2, "node_reads", "load", path, False)
    assert sum(read for read, _ in shared) <= 1.05 * WHOLE  # type: ignore[misc]
    assert [taken for _, taken in shared] == [WHOLE - ALONE] * 2  # type: ignore[misc]
    assert apart == [[WHOLE, 0], [WHOLE - ALONE, 0]]


def test_what_goes_through_the_page_cache_is_read_by_each_rank(path: str) -> None:
    """The kernel reads it once for all; to pass it on as well gains nothing."""
    assert REPLICAS >= SHARED_READ_BYTES_MIN
    assert run(2, "node_reads", "load_through_the_cache", path) == [[REPLICAS, 0]] * 2


def test_ranks_that_do_not_see_each_others_memory_read_for_themselves(path: str) -> None:
    assert run(3, "node_reads", "load_strangers", path) == [[WHOLE, 0], [WHOLE - ALONE, 0], [WHOLE - ALONE, 0]]


def test_a_rank_that_gets_no_threads_for_it_reads_for_itself(path: str) -> None:
    assert run(3, "node_reads", "load_with_few_threads", path) == [[WHOLE, 0], [WHOLE - ALONE, 0], [WHOLE - ALONE, 0]]


def test_damage_that_one_rank_reads_is_told_to_all_and_nobody_saves_what_is_left(path: str) -> None:
    segment = Path(path) / "step-00000001" / "rank-00000.safetensors"
    with segment.open("r+b") as file:
        file.seek(segment.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    results = run(3, "node_reads", "load_damaged", path)
    assert sum(str(words).startswith("DamagedError") for words in results) == 1
    for words in results:
        assert "stored bytes do not match their digests" in str(words)


def test_a_rank_that_dies_in_the_middle_of_a_load_is_named_by_its_neighbours(path: str) -> None:
    victim = 2
    ranks = Ranks(3, "node_reads", "load_and_die", path, victim)
    ranks.end(60)
    for rank in {0, 1, 2} - {victim}:
        assert f"rank {victim}" in Path(f"{path}.told-{rank}").read_text()
    fs.open(path).verify()
