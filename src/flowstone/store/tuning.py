"""tuning.json: results of `flowstone bench tune`, beside a store's marker or, for a whole mount, in the user's files.

They are advice, used only where they were measured. A file that cannot be used is ignored, with a warning that says
what to do: a wrong tuning may cost speed, but never a training job.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from flowstone.config import TUNING_BYTES_MAX, Direction, Tuning
from flowstone.errors import DamagedError, FlowstoneError, StorageError, UnsupportedFormatError
from flowstone.format.checksummed import add_checksum, verify_checksum
from flowstone.format.digest import digest
from flowstone.log import log
from flowstone.store.mount import Mount, mount_of

TUNING_NAME = "tuning.json"
TUNING_VERSION = 1



class TuningFile(msgspec.Struct, frozen=True, kw_only=True):
    """Checksummed JSON. `trial_bytes`: moved in each trial; a direction is null if the defaults are as good."""

    tuning: int = TUNING_VERSION
    created: str
    writer: str
    mount: Mount = msgspec.field(name="place")
    trial_bytes: int
    write: Tuning | None
    read: Tuning | None


class _Version(msgspec.Struct):
    tuning: int


def encode_tuning(file: TuningFile) -> bytes:
    return add_checksum(file)


def decode_tuning(data: bytes, *, path: str) -> TuningFile:
    """Check digest, version, fields and their ranges. Raises DamagedError or UnsupportedFormatError."""
    text = verify_checksum(data, path=path)
    try:
        version = msgspec.json.decode(text, type=_Version).tuning
        if version > TUNING_VERSION:
            raise UnsupportedFormatError(
                f"{path} was written by a newer flowstone", expected=f"version up to {TUNING_VERSION}", found=version
            )
        return msgspec.json.decode(text, type=TuningFile)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DamagedError(f"{path} is not valid: {error}") from error


def find_tuning(root: Path) -> Mapping[Direction, Tuning | None]:
    """The tuning for the store at `root`: its own file, else the mount's, else none.

    Logs a warning for each existing file that is not used.
    """
    nothing: Mapping[Direction, Tuning | None] = {"write": None, "read": None}
    own = root / TUNING_NAME
    folder = _user_folder()
    if not os.path.lexists(own) and (folder is None or not os.path.isdir(folder)):
        return nothing
    try:
        here = mount_of(root)
    except FlowstoneError as error:
        log.warning("no tuning is used: %s", error)
        return nothing
    for path in (own, user_file(here)):
        found = None if path is None else _believed(path, here, root)
        if found is not None:
            return {"write": found.write, "read": found.read}
    return nothing


def user_file(mount: Mount) -> Path | None:
    """The user's file for a mount; None if this user has no configuration directory."""
    folder = _user_folder()
    key = "\0".join((mount.machine, mount.device, mount.mount_point, mount.file_system))
    return None if folder is None else folder / f"tuning-{digest(key.encode())}.json"


def _user_folder() -> Path | None:
    """The XDG configuration directory; a relative path is ignored, as the XDG specification says."""
    given = os.environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(given):
        return Path(given) / "flowstone"
    try:
        return Path.home() / ".config" / "flowstone"
    except RuntimeError:
        return None  # no home: some containers run as a user without an account


def _believed(path: Path, here: Mount, root: Path) -> TuningFile | None:
    try:
        data = _read(path)
        if data is None:
            return None
        file = decode_tuning(data, path=str(path))
    except FlowstoneError as error:
        why = error.message
    except OSError as error:
        why = f"{path} cannot be read: {error.strerror}"
    else:
        differences = here.differences(file.mount)
        if not differences:
            return file
        why = f"{path} was measured on {', '.join(differences)}"
    log.warning(
        "tuning is ignored, defaults are used: %s; run `flowstone bench tune %s` here to measure again, or remove %s",
        why, root, path,
    )
    return None


def _read(path: Path) -> bytes | None:
    """The file's content; None if there is none. Never blocks, not even if a pipe has that name."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > TUNING_BYTES_MAX:
            raise StorageError(f"{path} is not a tuning file")
        return os.read(fd, TUNING_BYTES_MAX)
    finally:
        os.close(fd)
