"""Which checkpoints exist, which files a sweep removes, and which steps a rewind sets aside."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from recording import Recording

from flowstone.commit import catalog, manifests
from flowstone.errors import DamagedError, NoCheckpointError
from flowstone.store.local import LocalStore
from flowstone.store.wrap import Wrapper


def test_only_directories_with_a_manifest_are_steps(several: Path) -> None:
    for name in ("step-00000009", "step-9", "step-000000007", "step-abcdefgh", ".saving-00000010-ab"):
        (several / name).mkdir()
    for name in ("step-9", "step-000000007", ".saving-00000010-ab"):
        shutil.copy(several / "step-00000001/manifest.json", several / name)
    assert catalog.steps(LocalStore(several)) == (1, 2, 3, 4)


def test_a_directory_that_has_lost_its_manifest_is_a_damaged_step(several: Path) -> None:
    (several / "step-00000004/manifest.json").unlink()
    store = LocalStore(several)
    assert catalog.steps(store) == (1, 2, 3, 4)
    assert catalog.find_committed_step(store, None) == catalog.find_committed_step(store, 4) == 4
    with pytest.raises(DamagedError, match="has no manifest"):
        catalog.newest_manifest(store)
    assert "has no manifest" in str(manifests.list_steps(store)[-1].error)


def test_a_step_that_a_writer_takes_away_while_it_is_looked_at_is_not_damaged(checkpoint: Path) -> None:
    several = checkpoint.parent
    shutil.copytree(checkpoint, several / "step-00000009")

    class Leaving(Wrapper):
        def read(self, path: str, **how: Any) -> bytes:
            if path == "step-00000009/manifest.json" and (several / path).exists():
                (several / "step-00000009").rename(several / ".deleting-00000009-0123456789abcdef")
            return super().read(path, **how)

    actual = catalog.newest_manifest(Leaving(LocalStore(several)))
    assert actual is not None
    assert actual.step == 7


def test_a_step_that_is_not_there_is_refused_with_those_that_are(several: Path) -> None:
    with pytest.raises(NoCheckpointError) as caught:
        catalog.find_committed_step(LocalStore(several), 9)
    assert caught.value.message == f"no checkpoint of step 9 in {several}"
    assert caught.value.facts["found"] == "steps 1, 2, 3, 4"


def test_sweep_removes_what_dead_writers_left_and_nothing_else(several: Path) -> None:
    kept = {path.name for path in several.iterdir()}
    for name in (".saving-00000005-a", ".deleting-00000001-b"):
        shutil.copytree(several / "step-00000001", several / name)
    (several / ".flowstone.json-00ff").write_text("{")
    (several / ".superseded-00000009-c").mkdir()
    names: list[str] = []
    catalog.sweep_leftovers(LocalStore(several), lambda name, reason, error: names.append(f"{name}: {reason} {error}"))
    assert {path.name for path in several.iterdir()} == kept | {".superseded-00000009-c"}
    assert names == [
        ".deleting-00000001-b: a deletion that never finished None",
        ".flowstone.json-00ff: a marker that was never put in place None",
        ".saving-00000005-a: a save that never finished None",
    ]


def test_rewind_sets_newer_steps_aside_newest_first(several: Path) -> None:
    store = Recording(several)
    store.lock("this job")
    assert catalog.rewind(store, 2) == (4, 3)
    assert [done.split(" .")[0] for done in store.done] == ["rename step-00000004", "rename step-00000003", "sync "]
    assert catalog.steps(store) == (1, 2)
    assert len(list(several.glob(".superseded-*"))) == 2
    assert catalog.rewind(store, 2) == ()
