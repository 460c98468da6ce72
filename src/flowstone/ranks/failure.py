"""A failure of one rank, as all ranks learn it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowstone.errors import FlowstoneError, RankError


class Failure(msgspec.Struct, frozen=True):
    """A failure of one rank, in words and numbers that every rank understands."""

    rank: int
    phase: str
    kind: str
    message: str
    errno: int = 0
    facts: dict[str, str] = {}
    is_silence: bool = False  # another rank has waited for `rank` in vain, or was told so
    is_absence: bool = False  # the rank has not come to this phase
    undecided: bool = False  # known to one rank alone: the rank that was to decide is gone
    ahead: int | None = None
    left: int = 0  # number of the call of `rank` that an exception has ended there

    def error(self) -> RankError:
        said = f"rank {self.rank} failed: {self.message}"
        words = self.message if self.is_silence else said
        return RankError(
            words, rank=self.rank, phase=self.phase, errno=self.errno, kind=self.kind, undecided=self.undecided,
            ahead=self.ahead,
            **{name: fact for name, fact in self.facts.items() if name not in ("rank", "phase", "errno", "kind")},
        )


def own_failure(rank: int, phase: str, error: Exception) -> Failure:
    """The failure of a rank from its error. An error about another rank is not a root cause."""
    failure = failure_of(rank, phase, error)
    if isinstance(error, RankError):
        return msgspec.structs.replace(failure, rank=error.rank, is_silence=True)
    return failure


def failure_of(rank: int, phase: str, error: Exception) -> Failure:
    message = error.message if isinstance(error, FlowstoneError) else name_of(error)
    facts = {name: str(fact) for name, fact in error.facts.items()} if isinstance(error, FlowstoneError) else {}
    return Failure(rank, phase, type(error).__name__, message, int(getattr(error, "errno", 0) or 0), facts)


def name_of(error: BaseException) -> str:
    """The error's type and message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def first_failure(failures: Sequence[Failure]) -> Failure | None:
    """The root cause: a rank's own failure before the failures of ranks that waited for it; then the lowest rank."""
    return min(failures, key=lambda one: (one.is_silence, one.rank), default=None)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """"rank 3", "ranks 3, 7", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more"."""
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
