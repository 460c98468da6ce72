"""The golden checkpoint with codec `xor` stays readable."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

import flowstone as fs
from flowstone.format.codec import XOR
from golden import make_xor


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_golden_checkpoint_with_bases_is_read_bit_for_bit() -> None:
    before = digests(make_xor.STORE)
    expected, checkpoint = make_xor.state(make_xor.STEP), fs.open(make_xor.STORE)
    assert checkpoint.manifest.critical == ("delta", "codec.xor")
    assert set(checkpoint.index.chunks.codecs().tolist()) == {XOR.id}
    assert checkpoint.verify().sound
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in expected.items())
    assert digests(make_xor.STORE) == before


def test_todays_writer_stores_the_same_bytes(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path, engine=fs.EngineOptions(compress="max", kept_bytes=1 << 20)) as checkpointer:
        for step in (1, 2):
            again = checkpointer.save(step, make_xor.state(step)).committed.result()
    golden = fs.open(make_xor.STORE)
    assert again.index.chunks.digest.tolist() == golden.index.chunks.digest.tolist()
    assert again.index.chunks.stored is not None
    assert again.index.chunks.stored.bases is not None
    assert golden.index.chunks.stored is not None
    assert golden.index.chunks.stored.bases is not None
    assert again.index.chunks.stored.bases.digest.tolist() == golden.index.chunks.stored.bases.digest.tolist()
