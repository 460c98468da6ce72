"""Decides how a store moves bytes: by the caller's options; where these say nothing, by the tuning for this mount; and
otherwise by the defaults.

Writes and reads have separate settings; if these are equal, both share an engine. The tuning is in the store's
`tuning.json`, or else in the user's file for the mount. It is used only on the machine, kernel and mount where
`flowstone bench tune` measured it (docs/decisions/005). Whether bytes bypass the page cache also depends on how many
they are. The manifest records the settings that were used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from flowstone.config import CODING_WORKERS, READ_DEFAULTS, WRITE_DEFAULTS, Direct, Direction, EngineOptions, Tuning
from flowstone.store.tuning import find_tuning

Origin = Literal["default", "tuned", "explicit"]

DEFAULTS: Mapping[Direction, Tuning] = {"write": WRITE_DEFAULTS, "read": READ_DEFAULTS}


class Settings(msgspec.Struct, frozen=True):
    """How a store writes, or how it reads.

    tuning    the settings in use; backend "auto" is replaced by an engine when one starts
    direct    the caller's option `direct`; "auto": see `direct_at`
    origin    source of the settings that the caller did not give: "tuned" or "default"; "explicit" if the caller gave
              all
    explicit  the names of the options that the caller gave
    """

    tuning: Tuning
    direct: Direct
    origin: Origin
    explicit: tuple[str, ...]

    def direct_at(self, total_bytes: int) -> Direct:
        """Whether a save or load of `total_bytes` uses O_DIRECT. "on": it must work. "auto": it is tried. "off": the
        page cache is used.
        """
        start = self.tuning.direct_from_bytes
        if self.direct == "auto" and (start is None or total_bytes < start):
            return "off"
        return self.direct


def find_settings(root: Path, options: EngineOptions) -> Mapping[Direction, Settings]:
    """The settings of the store at `root`, for each direction. Reads tuning files only if options are missing."""
    settled = {direction: resolve(direction, options, None) for direction in DEFAULTS}
    if all(settings.origin == "explicit" for settings in settled.values()):
        return settled
    tuned = find_tuning(root)
    return {direction: resolve(direction, options, tuned[direction]) for direction in DEFAULTS}


def resolve(direction: Direction, options: EngineOptions, tuned: Tuning | None) -> Settings:
    """The settings for one direction. `tuned`: from a tuning file, if there is one."""
    base = tuned or DEFAULTS[direction]
    given: dict[str, object] = {
        "backend": options.backend, "direct": options.direct, "queue_depth": options.queue_depth,
        "request_bytes": options.request_bytes, "workers": options.workers,
    }
    in_place = False
    if direction == "read":
        given["read_in_place"] = options.read_in_place
        in_place = base.in_place if options.read_in_place is None else options.read_in_place
    explicit = tuple(name for name, value in given.items() if value not in (None, "auto"))
    tuning = Tuning(
        backend=base.backend if options.backend == "auto" else options.backend,
        queue_depth=options.queue_depth or base.queue_depth,
        request_bytes=options.request_bytes or base.request_bytes,
        workers=options.workers or max(base.workers, CODING_WORKERS if options.compress != "off" else 0),
        in_place=in_place, direct_from_bytes=base.direct_from_bytes,
    )
    left_open: Origin = "default" if tuned is None else "tuned"
    return Settings(tuning, options.direct, "explicit" if len(explicit) == len(given) else left_open, explicit)
