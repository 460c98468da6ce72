"""Which journals continue from a checkpoint that cannot be read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from flowstone.errors import StorageError
from flowstone.journal import journals
from flowstone.store.local import LocalStore
from flowstone.store.wrap import FaultInjectingStore
from journaled import Training, run


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A store with one checkpoint, after which four steps are in its journal."""
    run(Training(width=16), tmp_path / "run", 1, 5)
    return tmp_path / "run"


def refusing(journal: Path, code: int) -> FaultInjectingStore:
    """The store, which refuses to read that checkpoint's manifest."""
    def refuse(verb: str, path: str) -> StorageError | None:
        if (verb, path) != ("read", "step-00000001/manifest.json"):
            return None
        return StorageError(f"cannot read {path}", errno=code, reason=os.strerror(code))

    return FaultInjectingStore(LocalStore(journal), refuse)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.ETIMEDOUT])
def test_a_checkpoint_that_cannot_be_read_now_does_not_make_an_older_step_the_newest(journal: Path, code: int) -> None:
    assert journals.newest_step(LocalStore(journal)) == 5
    for look in (journals.newest_chain, journals.newest_step):
        with pytest.raises(StorageError, match=os.strerror(code)):
            look(refusing(journal, code))


def test_a_journal_that_a_job_removes_while_its_frames_are_read_is_missed_by_nothing(journal: Path) -> None:
    """There is a newer checkpoint then."""
    (name,) = (path.name for path in journal.glob("journal-*"))
    reads = []

    def removing(verb: str, path: str) -> StorageError | None:
        if (verb, path) == ("read", f"{name}/rank-00000.journal"):
            reads.append(path)
            if len(reads) == 4:
                (journal / name).rename(journal / ".deleting-00000001-0000000000000000")
        return None

    assert journals.newest_chain(FaultInjectingStore(LocalStore(journal), removing)) is None
    assert len(reads) == 4, "it was removed in the middle"


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT])
def test_from_a_checkpoint_that_is_damaged_or_gone_nothing_leads_on(journal: Path, code: int) -> None:
    assert journals.newest_chain(refusing(journal, code)) is None
