"""Segments divided among several ranks for verification: together they find what one rank finds."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from processes import run

import flowstone as fs
from flowstone.commit.manifests import read_manifest
from flowstone.commit.read import read_index
from flowstone.commit.verify import CheckedFiles, VerifyShare, check_share, segment_bytes
from flowstone.reading.verification import _CheckpointLocation, check_share_in_task, split_shares
from flowstone.stage.arena import open_read_arena
from flowstone.store.local import LocalStore
from forge import edit_index, flip


@pytest.fixture(scope="module")
def harmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six segments: one is missing, one is short, one has another header, one damaged chunks and padding."""
    path = tmp_path_factory.mktemp("saved") / "run"
    run(6, "acts", "save_pattern", str(path), "rows")
    checkpoint = path / "step-00000001"
    (checkpoint / "rank-00001.safetensors").unlink()
    with (checkpoint / "rank-00002.safetensors").open("ab") as segment:
        segment.write(b"more")
    for name, places in (("rank-00003", (20,)), ("rank-00004", (-1, -5000, -60_000))):
        content = bytearray((checkpoint / f"{name}.safetensors").read_bytes())
        for place in places:
            content[place] ^= 1
        (checkpoint / f"{name}.safetensors").write_bytes(content)
    return checkpoint


@pytest.mark.parametrize("count", [1, 2, 5, 50])
def test_shares_cut_anywhere_find_together_what_one_finds(harmed: Path, count: int) -> None:
    whole = fs.open(harmed).inspect().findings
    assert {finding.file[:10] for finding in whole} == {f"rank-0000{number}" for number in (1, 2, 3, 4)}
    assert len(whole) >= 5
    store = LocalStore(harmed)
    manifest = read_manifest(store, "")
    checked = CheckedFiles(store, "", manifest, read_index(store, "", manifest))
    total, arena = segment_bytes(manifest), open_read_arena(store)
    cuts = sorted(random.Random(count).sample(range(1, total), count - 1))
    parts = [check_share(checked, VerifyShare(begin, end), arena) for begin, end in pairwise([0, *cuts, total])]
    arena.close()
    findings = [finding for part in parts for finding in part]
    assert sorted(findings, key=repr) == sorted(whole, key=repr)


@pytest.fixture(scope="module")
def harmed_delta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a step with a base's file, a file of its own, and what is rounded from both, each kind is damaged."""
    path = tmp_path_factory.mktemp("delta") / "run"
    torch.manual_seed(0)
    master, other = torch.randn(1_000_000), torch.randn(700_000)
    with fs.Checkpointer(path, engine=fs.EngineOptions(compress="derived")) as checkpointer:
        for step in (1, 2, 3):
            state = {"master": {"w": master, "o": other}, "working": {"w": master.bfloat16(), "o": other.bfloat16()}}
            checkpointer.save(step, state).committed.result()
            other += 1
            master[600_000] += 1
    checkpoint = path / "step-00000003"
    opened = fs.open(checkpoint)
    stored, names = opened.index.chunks.stored, list(opened.index.tensors.names)
    assert stored is not None
    for name, chunk in (("master.w", 0), ("master.w", 2), ("master.o", 2)):
        number = int(opened.index.chunks.first[names.index(name)]) + chunk
        flip(checkpoint / opened.manifest.segments[int(stored.segment[number])].name, int(stored.offset[number]) + 9)
    assert len({int(segment) for segment in stored.segment[stored.length > 0]}) > 1
    number = int(opened.index.chunks.first[names.index("working.o")])
    edit_index(checkpoint, lambda columns: columns["chunk.digest"].__setitem__(number, 1))
    return checkpoint


@pytest.mark.parametrize("count", [1, 3, 20])
def test_tasks_that_share_a_delta_find_together_what_one_finds(harmed_delta: Path, count: int) -> None:
    """As on a cluster, where each opens the checkpoint for itself; tasks that see it under its own path alone, too."""
    whole = fs.open(harmed_delta).inspect().findings
    assert len(whole) == 3 + 1
    assert {finding.file.partition("-")[0] for finding in whole} == {"from", "rank", "index.safetensors"}
    for root, directory in ((harmed_delta, ""), (harmed_delta.parent, harmed_delta.name)):
        manifest = read_manifest(LocalStore(root), directory)
        place = _CheckpointLocation(str(root), directory, manifest.id)
        actual = [
            item for share in split_shares(segment_bytes(manifest), count) for item in check_share_in_task(place, share)
        ]
        assert sorted(actual, key=repr) == sorted(whole, key=repr)


@pytest.mark.parametrize("total", [0, 1, 5 << 20, 3 << 40])
@pytest.mark.parametrize("count", [1, 8, 4000])
def test_shares_follow_one_another_to_the_last_byte(total: int, count: int) -> None:
    actual = split_shares(total, count)
    assert (actual[0].begin, actual[-1].end) == (0, total)
    assert all(item.end == next_one.begin for item, next_one in pairwise(actual))
    sizes = [entry.end - entry.begin for entry in actual]
    assert max(sizes) <= 8 << 30
    assert len(actual) == 1 or min(sizes) >= 1 << 20
