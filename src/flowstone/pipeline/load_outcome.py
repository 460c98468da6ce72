"""What loads leave for the next save to know."""

from __future__ import annotations

from dataclasses import dataclass

from flowstone.errors import DamagedError


@dataclass(slots=True)
class LoadOutcome:
    """Of the last load of one Checkpointer.

    unfinished        why the state must not be saved: a load that may have changed a part of it, and did not finish
    superseded_above  a load fell back to this step: the next save sets newer ones aside
    """

    unfinished: str | None = None
    superseded_above: int | None = None

    def check_whole(self) -> None:
        """Raise DamagedError where a part of the state may be another step's than the rest."""
        if self.unfinished is not None:
            raise DamagedError(
                f"cannot save the state: {self.unfinished}, and part of the state has changed",
                next="load a checkpoint successfully first",
            )
