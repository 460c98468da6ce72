"""How a store moves bytes, resolved: the caller's options, else the tuning for this mount, else the defaults.

Once for each direction; directions with equal tuning share an engine. The tuning is the store's `tuning.json`, else the
user's file for the mount; each is used only on the machine, kernel and mount where `flowstone bench tune` measured it
(docs/decisions/005). Whether bytes bypass the page cache also depends on their number. The manifest records the
settings that were used.
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
    """How one direction moves its bytes.

    tuning    settings in use; backend "auto" is resolved when an engine starts
    direct    the caller's option for the page cache; "auto": see `direct_at`
    origin    of the options that the caller did not give: "tuned" or "default"; "explicit" if all were given
    explicit  the options that the caller gave, by name
    """

    tuning: Tuning
    direct: Direct
    origin: Origin
    explicit: tuple[str, ...]

    def direct_at(self, total_bytes: int) -> Direct:
        """The mode for a save or load of `total_bytes`: "on" must work, "auto" is tried, "off" uses the page cache."""
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
    """One direction's settings. Pure."""
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
