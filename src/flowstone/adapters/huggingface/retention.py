"""The Trainer's option `save_total_limit`: which checkpoints of a run are kept."""

from __future__ import annotations

from collections.abc import Collection, Sequence


class TrainerRetention:
    """The Trainer's rule: keep the newest `limit` steps. If the best step is not among them, keep it instead of the
    oldest of them. With `limit` 1, keep the newest and the best step.

    limit    None, 0 or less: keep all
    best_at  for each saved step: which step was the best one at that save. It is recorded because a later save may
             change the best step before the commit
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit or 0
        self.best_at: dict[int, int | None] = {}

    def keep(self, steps: Sequence[int]) -> Collection[int]:
        if self._limit <= 0:
            return steps
        newest = steps[-1]
        retained = {newest}
        best = self.best_at.get(newest)
        if best is not None and best in steps:
            retained.add(best)
        others = [step for step in reversed(steps) if step not in retained]
        retained.update(others[: max(0, self._limit - len(retained))])
        return retained
