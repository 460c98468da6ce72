"""Which settings count: those of the caller, else a valid tuning for this machine, else the defaults."""

import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from flowstone.config import CODING_WORKERS, MIB, EngineOptions, Tuning, read_workers_for, workers_for
from flowstone.errors import StorageError
from flowstone.store import mount
from flowstone.store.mount import mount_of
from flowstone.store.settings import Settings, find_settings, resolve
from flowstone.store.tuning import user_file
from tunings import READ_DEFAULTS, WRITE_DEFAULTS, edit, put_beside_marker, put_for_mount

TUNED = msgspec.structs.replace(WRITE_DEFAULTS, queue_depth=5, request_bytes=4 * MIB, workers=3, direct_from_bytes=MIB)
TUNED_READ = msgspec.structs.replace(READ_DEFAULTS, queue_depth=7, in_place=True)
EVERYTHING = EngineOptions(
    backend="posix", direct="off", queue_depth=1, request_bytes=2 * MIB, workers=1, read_in_place=True,
)


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own directory for files like these."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def depths(root: Path, options: EngineOptions | None = None) -> tuple[int, int]:
    settings = find_settings(root, options or EngineOptions())
    return settings["write"].tuning.queue_depth, settings["read"].tuning.queue_depth


# Resolution


def test_defaults_hold_where_nothing_else_is_said() -> None:
    assert resolve("write", EngineOptions(), None) == Settings(WRITE_DEFAULTS, "auto", "default", ())
    assert resolve("read", EngineOptions(), None) == Settings(READ_DEFAULTS, "auto", "default", ())


def test_tuning_holds_where_the_caller_says_nothing() -> None:
    assert resolve("write", EngineOptions(), TUNED) == Settings(TUNED, "auto", "tuned", ())


@pytest.mark.parametrize("tuned", [None, TUNED])
def test_each_option_of_the_caller_holds_before_all_else(tuned: Tuning | None) -> None:
    for name, value in (("queue_depth", 9), ("request_bytes", 16 * MIB), ("workers", 6), ("backend", "posix")):
        actual = resolve("write", EngineOptions(**{name: value}), tuned)  # type: ignore[arg-type]
        assert actual.tuning == msgspec.structs.replace(tuned or WRITE_DEFAULTS, **{name: value})
        assert (actual.origin, actual.explicit) == ("tuned" if tuned else "default", (name,))


def test_an_option_of_the_caller_holds_in_both_directions() -> None:
    for direction in ("write", "read"):
        assert resolve(direction, EngineOptions(request_bytes=2 * MIB), None).tuning.request_bytes == 2 * MIB  # type: ignore[arg-type]


def test_what_encodes_and_decodes_has_two_workers_where_there_are_two_processors() -> None:
    for compress in ("auto", "derived", "max"):
        for direction, tuned in (("write", None), ("read", None), ("write", TUNED)):
            count = resolve(direction, EngineOptions(compress=compress), tuned).tuning.workers  # type: ignore[arg-type]
            assert count == max(CODING_WORKERS, (tuned or WRITE_DEFAULTS).workers)
        assert resolve("write", EngineOptions(compress=compress, workers=1), None).tuning.workers == 1  # type: ignore[arg-type]


def test_only_reads_are_in_place() -> None:
    options = EngineOptions(read_in_place=True)
    actual = resolve("read", options, None)
    assert (actual.tuning.in_place, actual.explicit) == (True, ("read_in_place",))
    assert resolve("write", options, None) == Settings(WRITE_DEFAULTS, "auto", "default", ())
    assert not resolve("read", EngineOptions(read_in_place=False), TUNED_READ).tuning.in_place


def test_a_file_that_found_writes_in_place_faster_is_believed_in_all_else(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Earlier versions could write from where the state lies, and their tuning said where to."""
    edit(put_beside_marker(root, write=TUNED), lambda fields: fields["write"].update(in_place=True))
    write = find_settings(root, EngineOptions())["write"]
    assert (write.tuning, write.origin) == (TUNED, "tuned")
    assert not caplog.records


def test_the_option_that_wrote_in_place_is_unknown() -> None:
    with pytest.raises(TypeError, match="write_in_place"):
        EngineOptions(write_in_place=True)  # type: ignore[call-arg]


def test_nothing_left_open_is_explicit() -> None:
    assert resolve("write", EVERYTHING, TUNED).origin == "explicit"
    assert resolve("read", EVERYTHING, TUNED_READ).origin == "explicit"
    assert resolve("read", replace(EVERYTHING, read_in_place=None), TUNED_READ).origin == "tuned"


@pytest.mark.parametrize(
    ("start", "direct", "expected"),
    [(0, "auto", ["auto"] * 3), (100, "auto", ["off", "auto", "auto"]), (None, "auto", ["off"] * 3),
     (100, "on", ["on"] * 3), (None, "on", ["on"] * 3), (0, "off", ["off"] * 3)],
)
def test_size_decides_about_the_page_cache_unless_the_caller_does(start: int, direct: str, expected: list[str]) -> None:
    settings = resolve("write", EngineOptions(direct=direct), msgspec.structs.replace(TUNED, direct_from_bytes=start))  # type: ignore[arg-type]
    assert [settings.direct_at(total) for total in (99, 100, 1 << 40)] == expected


# Files


def test_stores_own_tuning_goes_before_the_mounts(root: Path) -> None:
    assert depths(root) == (16, 16)
    write = msgspec.structs.replace(TUNED, queue_depth=2)
    put_for_mount(root, write=write, read=msgspec.structs.replace(TUNED_READ, queue_depth=3))
    assert depths(root) == (2, 3), "a store without a file of its own, not even made yet"
    put_beside_marker(root, write=TUNED, read=None)
    assert depths(root) == (5, 16), "a direction whose defaults were found best keeps them"
    assert depths(root, EngineOptions(queue_depth=11)) == (11, 11)


def test_tuning_tells_its_origin(root: Path) -> None:
    put_beside_marker(root, write=TUNED)
    settings = find_settings(root, EngineOptions())
    assert (settings["write"].origin, settings["read"].origin) == ("tuned", "default")


def test_no_file_is_looked_at_when_nothing_is_left_open(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    put_beside_marker(root).write_text("broken")
    assert depths(root, EVERYTHING) == (1, 1)
    assert not caplog.records


def _swap(fields: dict, **changes: object) -> None:
    fields.update(changes)


def _elsewhere(**changes: str) -> Callable[[Path], None]:
    return lambda path: edit(path, lambda fields: fields["place"].update(changes))


def _written(**changes: object) -> Callable[[Path], None]:
    return lambda path: edit(path, lambda fields: fields["write"].update(changes))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _replace(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "truncated or was altered"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-40]), "truncated or was altered"),
    "flipped": (_flip, "was altered"),
    "no JSON": (lambda path: path.write_text("request_bytes = 8"), "truncated or was altered"),
    "newer": (lambda path: edit(path, lambda fields: _swap(fields, tuning=2)), "newer flowstone"),
    "no version": (lambda path: edit(path, lambda fields: fields.pop("tuning")), "missing required field"),
    "no place": (lambda path: edit(path, lambda fields: fields.pop("place")), "missing required field"),
    "another machine": (_elsewhere(machine="0" * 16), "another machine"),
    "another kernel": (_elsewhere(kernel="2.6.32"), "another kernel"),
    "another device": (_elsewhere(device="/dev/floppy"), "another device"),
    "another mount": (_elsewhere(mount_point="/elsewhere"), "another mount point"),
    "another file system": (_elsewhere(file_system="fat"), "another file system"),
    "request too short": (_written(request_bytes=4096), "request_bytes 4096"),
    "request not of blocks": (_written(request_bytes=4 * MIB + 1), "request_bytes 4194305"),
    "request too long": (_written(request_bytes=1 << 40), "request_bytes"),
    "no depth": (_written(queue_depth=0), "queue_depth 0"),
    "too deep": (_written(queue_depth=100_000), "queue_depth 100000"),
    "no workers": (_written(workers=0), "workers 0"),
    "too many workers": (_written(workers=65), "workers 65"),
    "unknown backend": (_written(backend="aio"), "aio"),
    "negative size": (_written(direct_from_bytes=-1), "direct_from_bytes -1"),
    "wrong type": (_written(queue_depth="16"), "Expected `int`"),
    "fraction": (_written(workers=1.5), "Expected `int`"),
    "too long": (lambda path: path.write_bytes(b" " * (1 << 20)), "too large for a tuning file"),
    "directory": (_replace(lambda path: path.mkdir()), "too large for a tuning file"),
    "pipe": (_replace(os.mkfifo), "too large for a tuning file"),
    "link to nothing": (_replace(lambda path: path.symlink_to("nowhere")), ""),
    "link to itself": (_replace(lambda path: path.symlink_to(path.name)), "cannot be read"),
    "deep": (lambda path: path.write_bytes(b"[" * 60_000), "truncated or was altered"),
}


@pytest.mark.parametrize("own", [True, False], ids=["store's", "mount's"])
@pytest.mark.parametrize("kind", BAD)
def test_bad_tuning_is_passed_over_with_a_warning_that_helps(
    root: Path, caplog: pytest.LogCaptureFixture, kind: str, own: bool
) -> None:
    spoil, reason = BAD[kind]
    path = put_beside_marker(root, write=TUNED) if own else put_for_mount(root, write=TUNED)
    assert depths(root) == (5, 16)
    spoil(path)
    assert depths(root) == (16, 16)
    if kind == "link to nothing":
        assert not caplog.records, "as where there is no file"
        return
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert re.search(reason, record.getMessage()), record.getMessage()
    assert str(path) in record.getMessage()
    assert f"Run `flowstone bench tune {root}` here" in record.getMessage()


def test_a_bad_file_of_the_store_leaves_the_mounts_its_turn(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    put_for_mount(root, write=msgspec.structs.replace(TUNED, queue_depth=2))
    put_beside_marker(root, write=TUNED).write_text("")
    assert depths(root) == (2, 16)
    assert len(caplog.records) == 1


def test_fields_of_a_later_writer_are_skipped(root: Path) -> None:
    edit(put_beside_marker(root, write=TUNED), lambda fields: _swap(fields, mood="good"))
    assert depths(root) == (5, 16)


def test_where_no_tuning_can_be_none_is_missed(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    put_for_mount(root, write=TUNED)
    root.write_text("a file, and no directory")
    open_before = len(os.listdir("/proc/self/fd"))
    assert depths(root) == (5, 16)
    assert not caplog.records
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_unreadable_tuning_is_passed_over(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    put_beside_marker(root, write=TUNED).chmod(0)
    assert depths(root) == (16, 16)
    assert "Permission denied" in caplog.text


# The user's directory


def test_relative_config_home_counts_as_none(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "config")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    actual = user_file(mount_of(root))
    assert actual is not None
    assert actual.parent == tmp_path / "home/.config/flowstone"


def test_a_user_without_a_home_has_no_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)  # nobody of that number is known
    assert user_file(mount_of(root)) is None
    assert depths(root) == (16, 16)


# Where a directory lies

TABLE = r"""
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:30 / /data rw - nfs4 server:/export rw
23 22 0:31 / /data/fast rw - xfs /dev/md0 rw
24 22 0:32 / /data/fast rw - tmpfs tmp\040fs rw
25 21 0:33 / /with\040blank rw - lustre 10.0.0.1@o2ib:/scratch rw
""".strip()


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(TABLE)
    monkeypatch.setattr(mount, "_MOUNTS", mounts)
    monkeypatch.setattr(mount, "_existing", lambda path: path)
    return mounts


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/", "ext4 on /dev/sda1, mounted at /"), ("/database", "ext4 on /dev/sda1, mounted at /"),
     ("/data/run", "nfs4 on server:/export, mounted at /data"),
     ("/data/fast/run", "tmpfs on tmp fs, mounted at /data/fast"),
     ("/with blank/run", "lustre on 10.0.0.1@o2ib:/scratch, mounted at /with blank")],
)
def test_mount_is_the_last_one_on_the_longest_way(table: Path, path: str, expected: str) -> None:
    assert str(mount_of(Path(path))) == expected


def test_a_path_lies_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/shm")
    if mount_of(Path("/dev/shm")) == mount_of(tmp_path):
        pytest.skip("/dev/shm is no mount of its own here")
    assert mount_of(tmp_path / "link") == mount_of(Path("/dev/shm"))
    assert mount_of(tmp_path / "not/yet/made") == mount_of(tmp_path)


def test_without_a_mount_table_no_tuning_is_believed(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    put_beside_marker(root, write=TUNED)
    monkeypatch.setattr(mount, "_MOUNTS", tmp_path / "nothing")
    assert depths(root) == (16, 16)
    assert "the tuning file is ignored, and defaults are used: cannot find the mount of" in caplog.text
    with pytest.raises(StorageError):
        mount_of(root)


def test_machine_is_not_told_in_clear(root: Path) -> None:
    try:
        identity = Path("/etc/machine-id").read_text().strip()
    except OSError:
        pytest.skip("this machine has no machine-id")
    assert identity
    assert identity not in put_beside_marker(root).read_text()


@pytest.mark.parametrize(
    ("processors", "saving", "loading"),
    [(1, 1, 1), (2, 1, 1), (3, 2, 2), (8, 2, 2), (16, 2, 4), (24, 3, 5), (40, 5, 5), (64, 8, 8), (384, 8, 8)],
)
def test_workers_are_one_in_eight_processors_and_up_to_five_more_load(
    processors: int, saving: int, loading: int
) -> None:
    assert (workers_for(processors), read_workers_for(processors)) == (saving, loading)
