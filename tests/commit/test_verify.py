"""Verification: every byte of every file belongs to something, and every finding names its place."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import flowstone as fs
from flowstone.commit.verify import Finding
from forge import flip, place_of
from small_state import STEP


def findings(checkpoint: Path) -> list[tuple[str, str]]:
    return [(finding.file, finding.what) for finding in fs.open(checkpoint.parent).inspect().findings]


def test_a_sound_checkpoint_is_counted_to_the_byte(checkpoint: Path) -> None:
    pairs: list[tuple[int, int]] = []
    verified = fs.open(checkpoint.parent).verify(lambda done, total: pairs.append((done, total)))
    assert verified.sound
    assert verified.step == STEP
    assert verified.checked_bytes == sum(path.stat().st_size for path in checkpoint.iterdir())


def test_a_flipped_bit_names_its_tensor_and_chunk(checkpoint: Path) -> None:
    path, begin = place_of(checkpoint, "big")
    flip(path, begin + (1 << 20) + 5, bit=3)
    assert findings(checkpoint) == [
        (path.name, f"tensor 'big', chunk 1, bytes {begin + (1 << 20)}..{begin + (2 << 20)}: does not match its digest")
    ]
    with pytest.raises(fs.DamagedError, match="is damaged in 1 place") as caught:
        fs.open(checkpoint.parent).verify()
    assert "tensor 'big', chunk 1" in str(caught.value)
    assert caught.value.facts["next"] == "restore the files from a copy, or load an older step"


def test_every_damaged_chunk_is_listed(checkpoint: Path) -> None:
    path, begin = place_of(checkpoint, "big")
    for chunk in range(3):
        flip(path, begin + (chunk << 20))
    flip(*place_of(checkpoint, "table[2:6,0:4]"))
    whats = [kind for _, kind in findings(checkpoint)]
    assert [name.split(", bytes")[0] for name in whats[:3]] == [f"tensor 'big', chunk {n}" for n in range(3)]
    assert whats[3].startswith("tensor 'table', chunk 0")
    assert len(whats) == 4


def test_a_flipped_bit_in_padding_is_found(checkpoint: Path) -> None:
    path = checkpoint / "rank-00000.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    pads = {name: entry["data_offsets"] for name, entry in header.items() if name.startswith("__pad__.")}
    assert pads
    for begin, end in pads.values():
        for offset in (8 + length + begin, 8 + length + end - 1):
            flip(path, offset, bit=7)
            ((file, name),) = findings(checkpoint)
            assert (file, name.split(",")[0]) == (path.name, "padding")
            flip(path, offset, bit=7)
    assert fs.open(checkpoint.parent).verify().sound


def test_a_file_that_no_manifest_mentions_is_told_and_harmless(checkpoint: Path) -> None:
    (checkpoint / "notes.txt").write_text("best run so far")
    assert fs.open(checkpoint.parent).verify().extra == ("notes.txt",)


def test_damage_in_several_files_is_one_account(checkpoint: Path) -> None:
    (checkpoint / "objects.json").write_bytes(b"{}")
    flip(*place_of(checkpoint, "small"))
    files = [file for file, _ in findings(checkpoint)]
    assert files == ["objects.json", "rank-00000.safetensors"]


def test_a_missing_and_a_short_segment_are_told(checkpoint: Path) -> None:
    path = checkpoint / "rank-00000.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 4096)
    assert findings(checkpoint) == [(path.name, f"has {size - 4096} bytes instead of {size}")]
    path.unlink()
    assert fs.open(checkpoint.parent).inspect().findings == (Finding(path.name, "is missing"),)


def test_the_index_covers_every_byte_of_data_exactly_once(checkpoint: Path) -> None:
    """Extents and padding together are the file: so no byte is without a digest."""
    index = fs.open(checkpoint.parent).index
    with safe_open(checkpoint / "rank-00000.safetensors", "np") as file:
        pads = sum(file.get_tensor(name).size for name in file.keys() if name.startswith("__pad__."))  # noqa: SIM118
    row = fs.open(checkpoint.parent).manifest.segments[0]
    assert int(index.chunks.length.sum()) + pads == row.bytes - row.header_bytes
    assert np.array_equal(np.add.reduceat(index.chunks.stored_lengths(), index.chunks.first[:-1]), index.chunks.length)
