"""`save_total_limit`: which checkpoints of a Trainer's run stay."""

from __future__ import annotations

from collections.abc import Collection, Sequence


class Retained:
    """The Trainer's rule: the newest `limit`, and among them, in the place of the oldest, the best.

    limit    None, zero and less keep all
    best_at  for each step that was saved, the best step at that time: a commit may come after later saves
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit or 0
        self.best_at: dict[int, int | None] = {}

    def keep(self, steps: Sequence[int]) -> Collection[int]:
        if self._limit <= 0:
            return steps
        newest = steps[-1]
        kept = {newest}
        best = self.best_at.get(newest)
        if best is not None and best in steps:
            kept.add(best)
        others = [step for step in reversed(steps) if step not in kept]
        kept.update(others[: max(0, self._limit - len(kept))])
        return kept
