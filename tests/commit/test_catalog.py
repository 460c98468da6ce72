"""Which checkpoints exist, which go: verdicts as a pure function, then prune, sweep and rewind on a disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.commit import catalog
from flowstone.config import Keep
from flowstone.errors import NoCheckpointError, StorageError
from flowstone.store.local import LocalStore

STEPS = st.sets(st.integers(0, 50)).map(sorted)


@given(STEPS, st.integers(1, 5), st.none() | st.integers(1, 10))
def test_retention_spares_the_newest_and_the_multiples(steps: list[int], last: int, every: int | None) -> None:
    verdicts = catalog.judge(steps, Keep(last=last, every=every))
    kept = {verdict.step for verdict in verdicts if verdict.keep}
    expected = set(steps[-last:]) | {step for step in steps if every is not None and step % every == 0}
    assert kept == expected
    assert [verdict.step for verdict in verdicts] == steps
    assert all(verdict.reason for verdict in verdicts)


@given(STEPS)
def test_without_retention_everything_is_kept(steps: list[int]) -> None:
    assert all(verdict.keep for verdict in catalog.judge(steps, None))


@pytest.mark.parametrize(("last", "every"), [(0, None), (-1, None), (1, 0), (1, -5)])
def test_retention_that_could_keep_nothing_is_refused(last: int, every: int | None) -> None:
    with pytest.raises(ValueError, match="Keep"):
        Keep(last=last, every=every)


@pytest.fixture
def several(checkpoint: Path) -> Path:
    """A store with steps 1 to 4, which are copies of one another as far as the catalogue looks."""
    for step in range(1, 5):
        shutil.copytree(checkpoint, checkpoint.parent / f"step-{step:08d}")
    shutil.rmtree(checkpoint)
    return checkpoint.parent


def test_only_directories_with_a_manifest_are_steps(several: Path) -> None:
    for name in ("step-00000009", "step-9", "step-000000007", "step-abcdefgh", ".saving-00000010-ab"):
        (several / name).mkdir()
    for name in ("step-9", "step-000000007", ".saving-00000010-ab"):
        shutil.copy(several / "step-00000001/manifest.json", several / name)
    assert catalog.steps(LocalStore(several)) == (1, 2, 3, 4)


def test_a_step_that_is_not_there_is_refused_with_those_that_are(several: Path) -> None:
    with pytest.raises(NoCheckpointError) as caught:
        catalog.find(LocalStore(several), 9)
    assert caught.value.message == f"no checkpoint of step 9 in {several}"
    assert caught.value.facts["found"] == "steps 1, 2, 3, 4"


class Recording(LocalStore):
    """Notes each change, and refuses those that `refuse` names."""

    def __init__(self, root: Path, refuse: Callable[[str], bool] = lambda _: False) -> None:
        super().__init__(root)
        self.done: list[str] = []
        self._refuse = refuse

    def _note(self, what: str) -> None:
        if self._refuse(what):
            raise StorageError(f"cannot {what}", errno=5, next="check the disk")
        self.done.append(what)

    def rename(self, source: str, target: str) -> None:
        self._note(f"rename {source} {target}")
        super().rename(source, target)

    def remove(self, path: str) -> None:
        self._note(f"remove {path.rpartition('/')[2]}")
        super().remove(path)

    def sync_directory(self, path: str = "") -> None:
        self._note(f"sync {path}")
        super().sync_directory(path)


def test_prune_takes_the_name_away_first_then_the_manifest(several: Path) -> None:
    store = Recording(several)
    told: list[tuple[str, object]] = []
    catalog.prune(store, catalog.judge((1, 2, 3, 4), Keep(last=3)), lambda name, _, error: told.append((name, error)))
    assert store.done[0].startswith("rename step-00000001 .deleting")
    assert store.done[1] == "sync "
    assert store.done[2] == "remove manifest.json"
    assert store.done[-1].startswith("remove .deleting")
    assert told == [("step-00000001", None)]
    assert catalog.steps(store) == (2, 3, 4)


def test_a_removal_that_fails_is_told_and_the_others_go_on(several: Path) -> None:
    store = Recording(several, refuse=lambda what: what.startswith("rename step-00000001"))
    told: list[tuple[str, str, object]] = []
    verdicts = catalog.judge((1, 2, 3, 4), Keep(last=2))
    catalog.prune(store, verdicts, lambda *one: told.append(one))
    assert [(name, reason) for name, reason, _ in told] == [
        ("step-00000001", "older than the newest 2"), ("step-00000002", "older than the newest 2")
    ]
    assert isinstance(told[0][2], StorageError)
    assert told[1][2] is None
    assert catalog.steps(store) == (1, 3, 4)


def test_sweep_removes_what_dead_writers_left_and_nothing_else(several: Path) -> None:
    kept = {path.name for path in several.iterdir()}
    for name in (".saving-00000005-a", ".deleting-00000001-b"):
        shutil.copytree(several / "step-00000001", several / name)
    (several / ".flowstone.json-00ff").write_text("{")
    (several / ".superseded-00000009-c").mkdir()
    told: list[str] = []
    catalog.sweep(LocalStore(several), lambda name, reason, error: told.append(f"{name}: {reason} {error}"))
    assert {path.name for path in several.iterdir()} == kept | {".superseded-00000009-c"}
    assert told == [
        ".deleting-00000001-b: a deletion that never finished None",
        ".flowstone.json-00ff: a marker that was never put in place None",
        ".saving-00000005-a: a save that never finished None",
    ]


def test_rewind_sets_newer_steps_aside_newest_first(several: Path) -> None:
    store = Recording(several)
    assert catalog.rewind(store, 2) == (4, 3)
    assert [done.split(" .")[0] for done in store.done] == ["rename step-00000004", "rename step-00000003", "sync "]
    assert catalog.steps(store) == (1, 2)
    assert len(list(several.glob(".superseded-*"))) == 2
    assert catalog.rewind(store, 2) == ()
