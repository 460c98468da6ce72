"""Claims: one process at a time saves to a target, and a dead process does not keep its claim."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import flowstone as fs
from flowstone.adapters.dcp.claim import SaveClaim, claim_file, is_claimed


def test_a_forked_child_neither_keeps_nor_removes_a_claim(tmp_path: Path) -> None:
    claim = SaveClaim(tmp_path, "x")
    begin, end = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        claim.release()
        os.read(begin, 1)
        os._exit(0)
    assert is_claimed(tmp_path, "x")
    claim.release()
    again = SaveClaim(tmp_path, "x")
    assert again.is_held
    again.release()
    os.close(end)
    os.close(begin)
    os.waitpid(child, 0)


def test_a_claim_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / claim_file("x")).symlink_to("x")
    with pytest.raises(fs.StorageError):
        is_claimed(tmp_path, "x")
