"""A failure of one rank, as reported to all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowstone.errors import FlowstoneError, RankError


class Failure(msgspec.Struct, frozen=True):
    """A failure of one rank, in the form that is sent to the other ranks."""

    rank: int
    phase: str
    kind: str
    message: str
    errno: int = 0
    facts: dict[str, str] = {}
    is_silence: bool = False  # reported by another rank, which has waited for `rank` without a result
    is_absence: bool = False  # the rank has not reached this phase
    undecided: bool = False  # only this rank knows the failure, since the rank that had to decide is gone
    ahead: int | None = None
    left: int = 0  # number of the call that an exception has ended on `rank`

    def error(self) -> RankError:
        text = self.message if self.is_silence else f"rank {self.rank} failed: {self.message}"
        return RankError(
            text, rank=self.rank, phase=self.phase, errno=self.errno, kind=self.kind, undecided=self.undecided,
            ahead=self.ahead,
            **{name: fact for name, fact in self.facts.items() if name not in ("rank", "phase", "errno", "kind")},
        )


def own_failure(rank: int, phase: str, error: Exception) -> Failure:
    """The failure that this rank reports for its error. A RankError is about another rank: if that rank reports a
    failure of its own, that one counts as the cause (first_failure).
    """
    failure = failure_of(rank, phase, error)
    if isinstance(error, RankError):
        return msgspec.structs.replace(failure, rank=error.rank, is_silence=True)
    return failure


def failure_of(rank: int, phase: str, error: Exception) -> Failure:
    message = error.message if isinstance(error, FlowstoneError) else error_text(error)
    facts = {name: str(fact) for name, fact in error.facts.items()} if isinstance(error, FlowstoneError) else {}
    return Failure(rank, phase, type(error).__name__, message, int(getattr(error, "errno", 0) or 0), facts)


def error_text(error: BaseException) -> str:
    """The error's type and message, as one text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def first_failure(failures: Sequence[Failure]) -> Failure | None:
    """The cause of several failures: a rank's own failure comes before those of ranks that waited for that rank; then
    the lowest rank comes first.
    """
    return min(failures, key=lambda failure: (failure.is_silence, failure.rank), default=None)


def ranks_text(ranks: Sequence[int]) -> str:
    """The ranks as text, such as "rank 3", "ranks 3, 7", or "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more"."""
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
