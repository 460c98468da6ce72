"""Refused reads: only stored bytes that are missing or changed count as damage, not the system's refusals."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from large import ENGINE, blank, loaded, state

import flowstone as fs
from faulty_disk import FaultyDisk, Trouble
from flowstone.errors import is_damage
from flowstone.events.phases import Event
from flowstone.events.rare_events import FellBack
from forge import content

WANT = [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.ETIMEDOUT, errno.ESTALE, errno.EINTR]
LOST = [errno.EIO, errno.EUCLEAN, errno.EBADMSG]
FILES = ["manifest.json", "index.safetensors", "objects.json", "rank-00000.safetensors"]
_named = pytest.mark.parametrize("code", WANT, ids=[errno.errorcode[code] for code in WANT])


@contextmanager
def refused(call: str, path: Path, code: int) -> Iterator[None]:
    """Looking at `path`, or opening it, fails with `code`."""
    real = getattr(os, call)

    def stand_in(asked: object, *arguments: object, **more: object) -> object:
        if not isinstance(asked, int) and os.fspath(asked) == str(path):  # type: ignore[call-overload]
            raise OSError(code, os.strerror(code), str(path))
        return real(asked, *arguments, **more)

    with mock.patch.object(os, call, stand_in):
        yield


@pytest.fixture
def two(store: Path) -> Path:
    """A store with steps 1 and 2."""
    with fs.Checkpointer(store) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": float(step)}).committed.result()
    return store


@_named
@pytest.mark.parametrize(("call", "name"), [
    *(("open", name) for name in FILES),
    ("stat", "manifest.json"), ("stat", "rank-00000.safetensors"),  # the others are read without a look before
])
def test_an_older_step_is_not_taken_for_want_of_anything_but_the_bytes(
    two: Path, call: str, name: str, code: int
) -> None:
    events: list[Event] = []
    into = {"w": 0.0}
    with fs.Checkpointer(two, on_event=events.append) as checkpointer:
        with refused(call, two / "step-00000002" / name, code), pytest.raises(fs.StorageError) as caught:
            checkpointer.load(into, fallback=True)
        assert caught.value.errno == code
        assert name in caught.value.message
        assert into == {"w": 0.0}
        assert checkpointer.load(into, fallback=True).step == 2
        checkpointer.save(3, into).committed.result()
    assert not [event for event in events if isinstance(event, FellBack)]
    assert not list(two.glob(".superseded-*"))


@pytest.mark.parametrize("code", LOST, ids=[errno.errorcode[code] for code in LOST])
@pytest.mark.parametrize("name", FILES)
def test_an_older_step_is_taken_where_the_medium_gives_the_bytes_back_no_more(two: Path, name: str, code: int) -> None:
    into = {"w": 0.0}
    refusal = refused("open", two / "step-00000002" / name, code)
    with fs.Checkpointer(two) as checkpointer, refusal:
        assert checkpointer.load(into, fallback=True).step == 1
    assert into == {"w": 1.0}


@_named
@pytest.mark.parametrize("ask", ["latest", "load", "open", "save"])
def test_a_step_that_cannot_be_looked_at_is_not_taken_for_one_that_is_not_there(
    two: Path, code: int, ask: str
) -> None:
    """From Python 3.14 on, pathlib's exists() says no to any refusal, and the newest step would be passed over."""
    def asked() -> object:
        if ask == "open":
            return fs.open(two)
        with fs.Checkpointer(two) as checkpointer:
            verbs: dict[str, Callable[[], object]] = {
                "latest": checkpointer.latest, "load": lambda: checkpointer.load({"w": 0.0}),
                "save": lambda: checkpointer.save(2, {"w": 0.0}),
            }
            return verbs[ask]()

    manifest = two / "step-00000002" / "manifest.json"
    with refused("stat", manifest, code), refused("open", manifest, code), pytest.raises(fs.StorageError) as caught:
        asked()
    assert caught.value.errno == code


@_named
@pytest.mark.parametrize("name", FILES[1:])
def test_a_file_that_cannot_be_opened_is_no_finding_of_verify(two: Path, name: str, code: int) -> None:
    checkpoint = fs.open(two)
    with refused("open", two / "step-00000002" / name, code), pytest.raises(fs.StorageError) as caught:
        checkpoint.verify()
    assert caught.value.errno == code
    assert checkpoint.verify().sound
    with refused("open", two / "step-00000002" / name, errno.EIO), pytest.raises(fs.DamagedError, match=name):
        checkpoint.verify()


@pytest.mark.parametrize(("code", "step"), [(errno.ENOMEM, None), (errno.EIO, 1)], ids=["ENOMEM", "EIO"])
def test_a_read_that_fails_on_the_way_is_damage_only_where_the_medium_says_so(
    disk: FaultyDisk, code: int, step: int | None
) -> None:
    run = disk.path / "run"
    with fs.Checkpointer(run, engine=ENGINE) as checkpointer:
        for item in (1, 2):
            checkpointer.save(item, state(item)).committed.result()
        # Within the newer one's data, however many requests the address of a tensor leads to: 12 in all where that is a
        # multiple of 4096, else 20. The older one is let through.
        disk.befall(Trouble("read", error=code, name="rank-", spared=8, times=1))
        into = blank()
        before = content(into)
        if step is None:
            with pytest.raises(fs.StorageError) as caught:
                checkpointer.load(into, fallback=True)
            assert caught.value.errno == code
            if content(into) != before:
                assert "changed" in caught.value.facts
                with pytest.raises(fs.DamagedError, match="cannot save the state"):
                    checkpointer.save(3, into)
            assert loaded(checkpointer, 2)
        else:
            assert checkpointer.load(into, fallback=True).step == step
            assert content(into) == content(state(step))


def test_a_format_that_is_too_new_is_no_damage() -> None:
    assert not is_damage(fs.UnsupportedFormatError("too new"))
    assert is_damage(fs.DamagedError("flipped"))
    assert is_damage(fs.RankError("", rank=1, phase="load", kind="DamagedError"))
    assert is_damage(fs.RankError("", rank=1, phase="load", kind="StorageError", errno=errno.EIO))
    assert not is_damage(fs.RankError("", rank=1, phase="load", kind="StorageError", errno=errno.EMFILE))
    assert not is_damage(fs.RankError("", rank=1, phase="load"))
    assert not is_damage(fs.MismatchError("differs"))
