"""What a load leaves for the next save to check."""

from __future__ import annotations

from dataclasses import dataclass

from flowstone.errors import DamagedError


@dataclass(slots=True)
class LoadOutcome:
    """The outcome of the loads of one Checkpointer, most of it of the last one.

    unfinished        the reason why the state must not be saved: a load changed a part of it and did not finish
    superseded_above  a load fell back to this step: the next save sets newer steps aside
    loads             how many have begun to read
    """

    unfinished: str | None = None
    superseded_above: int | None = None
    loads: int = 0

    def check_whole(self) -> None:
        """Raise DamagedError if a part of the state may be from another step than the rest."""
        if self.unfinished is not None:
            raise DamagedError(
                f"cannot save the state: {self.unfinished}, and part of the state has changed",
                next="load a checkpoint successfully first",
            )
