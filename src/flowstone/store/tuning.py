"""The file tuning.json, which has the results of `flowstone bench tune`. It is in a store and holds for that store, or
in the user's configuration directory and holds for all stores on a mount.

The results are used only on the machine and mount where they were measured. A file that cannot be used is ignored, and
a warning says what to do: a bad tuning file may cost speed, but must not stop a training job.
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
    """The content of a tuning file, which is JSON with a checksum. `trial_bytes`: how many bytes each trial moved.
    `write` or `read` is null if the defaults are as good.
    """

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
    """Decode a tuning file, after checks of its digest, version, fields and their ranges. Raises DamagedError or
    UnsupportedFormatError.
    """
    text = verify_checksum(data, path=path)
    try:
        version = msgspec.json.decode(text, type=_Version).tuning
        if version > TUNING_VERSION:
            raise UnsupportedFormatError(
                f"{path} was written by a newer flowstone", expected=f"version up to {TUNING_VERSION}", found=version,
                next=f"upgrade flowstone, or remove {path}",
            )
        return msgspec.json.decode(text, type=TuningFile)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DamagedError(
            f"{path} is not valid: {error}", next=f"remove {path}, and run `flowstone bench tune` again"
        ) from error


def find_tuning(root: Path) -> Mapping[Direction, Tuning | None]:
    """The tuning for the store at `root`, for each direction: from the store's own file, or else from the mount's file.
    None: the defaults are used.

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
        log.warning("the tuning file is ignored, and defaults are used: %s", error)
        return nothing
    for path in (own, user_file(here)):
        file = None if path is None else _read_valid(path, here, root)
        if file is not None:
            return {"write": file.write, "read": file.read}
    return nothing


def user_file(mount: Mount) -> Path | None:
    """The path of the user's tuning file for a mount. None if this user has no configuration directory."""
    folder = _user_folder()
    key = "\0".join((mount.machine, mount.device, mount.mount_point, mount.file_system))
    return None if folder is None else folder / f"tuning-{digest(key.encode())}.json"


def _user_folder() -> Path | None:
    """The XDG configuration directory. A relative path is ignored, as the XDG specification says."""
    given = os.environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(given):
        return Path(given) / "flowstone"
    try:
        return Path.home() / ".config" / "flowstone"
    except RuntimeError:
        return None  # no home directory: some containers run with a user without an account


def _read_valid(path: Path, here: Mount, root: Path) -> TuningFile | None:
    """The content of the file, if it was measured on this mount. Otherwise None, with a warning if the file exists."""
    try:
        data = _read(path)
        if data is None:
            return None
        file = decode_tuning(data, path=str(path))
    except FlowstoneError as error:
        reason = error.message
    except OSError as error:
        reason = f"{path} cannot be read: {error.strerror}"
    else:
        differences = here.differences(file.mount)
        if not differences:
            return file
        reason = f"{path} was measured on {', '.join(differences)}"
    log.warning(
        "the tuning is ignored: %s; defaults are used. Run `flowstone bench tune %s` here, or remove %s",
        reason, root, path,
    )
    return None


def _read(path: Path) -> bytes | None:
    """The content of the file; None if it does not exist. Never blocks, even if the path is a pipe."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > TUNING_BYTES_MAX:
            raise StorageError(
                f"{path} is not a regular file, or is too large for a tuning file", next=f"remove {path}"
            )
        return os.read(fd, TUNING_BYTES_MAX)
    finally:
        os.close(fd)
