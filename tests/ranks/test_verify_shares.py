"""Shares of the segments of several ranks: what they find together is what one finds."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from processes import run

import flowstone as fs
from flowstone.commit.manifests import read_manifest
from flowstone.commit.read import read_index
from flowstone.commit.verify import Checked, Share, check_share, segment_bytes
from flowstone.stage.arena import open_read_arena
from flowstone.store.local import LocalStore
from flowstone.verification import shares


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
        for at in places:
            content[at] ^= 1
        (checkpoint / f"{name}.safetensors").write_bytes(content)
    return checkpoint


@pytest.mark.parametrize("count", [1, 2, 5, 50])
def test_shares_cut_anywhere_find_together_what_one_finds(harmed: Path, count: int) -> None:
    whole = fs.open(harmed).inspect().findings
    assert {finding.file[:10] for finding in whole} == {f"rank-0000{number}" for number in (1, 2, 3, 4)}
    assert len(whole) >= 5
    store = LocalStore(harmed)
    manifest = read_manifest(store, "")
    checked = Checked(store, "", manifest, read_index(store, "", manifest))
    total, arena = segment_bytes(manifest), open_read_arena(store)
    cuts = sorted(random.Random(count).sample(range(1, total), count - 1))
    parts = [check_share(checked, Share(begin, end), arena) for begin, end in pairwise([0, *cuts, total])]
    arena.close()
    found = [finding for part in parts for finding in part]
    assert sorted(found, key=repr) == sorted(whole, key=repr)


@pytest.mark.parametrize("total", [0, 1, 5 << 20, 3 << 40])
@pytest.mark.parametrize("count", [1, 8, 4000])
def test_shares_follow_one_another_to_the_last_byte(total: int, count: int) -> None:
    found = shares(total, count)
    assert (found[0].begin, found[-1].end) == (0, total)
    assert all(one.end == next_one.begin for one, next_one in pairwise(found))
    sizes = [one.end - one.begin for one in found]
    assert max(sizes) <= 8 << 30
    assert len(found) == 1 or min(sizes) >= 1 << 20
