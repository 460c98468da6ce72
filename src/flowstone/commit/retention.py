"""Retention: which of a store's own checkpoints are removed, and in what order (docs/ORDERING.md, Retention)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import msgspec

from flowstone.commit import catalog, removal
from flowstone.commit.entries import Entry, step_directory
from flowstone.commit.manifests import inside, read_manifest, read_marker
from flowstone.config import Keep, KeepRule
from flowstone.errors import FormatError, NoCheckpointError, StorageError
from flowstone.format.manifest import MANIFEST_NAME
from flowstone.log import log
from flowstone.store.base import Names, Store

_LISTED_MAX = 5  # steps that one log line lists, the newest



class Verdict(msgspec.Struct, frozen=True):
    """Retention's decision about one step, and the reason. `foreign`: another store's step, which stays."""

    step: int
    keep: bool
    reason: str
    foreign: bool = False


def decide(
    existing: Sequence[int], keep: Keep | KeepRule | None, *, committed: int | None = None,
    foreign: Callable[[int], str | None] | None = None, awaited: Collection[int] = (),
) -> tuple[Verdict, ...]:
    """A verdict on each of `existing` (steps with a manifest, ascending). Foreign steps stay, and do not count.

    committed  the step just committed: it and newer ones stay; newer ones do not count
    foreign    why a step is not this store's own, None if it is; called only if the answer matters
    awaited    steps that another tier is still to get: they stay, and count like others
    """
    if keep is None:
        return tuple(Verdict(step, True, "everything is kept") for step in existing)
    if not isinstance(keep, Keep):
        decided = _decide_by_rule(existing, keep, committed, foreign)
    else:
        decided = _decide_by_number(existing, keep, committed, foreign)
    if not awaited:
        return decided
    waiting = set(awaited)
    return tuple(
        Verdict(one.step, True, "another tier is still to get it") if not one.keep and one.step in waiting else one
        for one in decided
    )


def _decide_by_number(
    existing: Sequence[int], keep: Keep, committed: int | None, foreign: Callable[[int], str | None] | None
) -> tuple[Verdict, ...]:
    verdicts, counted = [], 0
    for step in reversed(existing):
        is_newer = committed is not None and step > committed
        if not is_newer and counted >= keep.last and keep.every is not None and step % keep.every == 0:
            verdicts.append(Verdict(step, True, f"a multiple of {keep.every}"))
        elif step != committed and foreign is not None and (why := foreign(step)) is not None:
            verdicts.append(Verdict(step, True, why, foreign=True))
        elif is_newer:
            verdicts.append(Verdict(step, True, f"newer than {committed}, which was just committed"))
        elif counted < keep.last:
            counted += 1
            verdicts.append(Verdict(step, True, f"among the newest {keep.last}"))
        else:
            verdicts.append(Verdict(step, False, f"older than the newest {keep.last}"))
    return tuple(reversed(verdicts))


def _decide_by_rule(
    existing: Sequence[int], rule: KeepRule, committed: int | None, foreign: Callable[[int], str | None] | None
) -> tuple[Verdict, ...]:
    """The same by a rule of the caller's, which sees only the store's own steps up to the committed one."""
    verdicts = {}
    for step in existing:
        if committed is not None and step > committed:
            verdicts[step] = Verdict(step, True, f"newer than {committed}, which was just committed")
        elif step != committed and foreign is not None and (why := foreign(step)) is not None:
            verdicts[step] = Verdict(step, True, why, foreign=True)
    own = tuple(step for step in existing if step not in verdicts)
    chosen = {*rule(own), *own[-1:]} if own else set()
    for step in own:
        says = "kept by the rule" if step in chosen else "given up by the rule"
        verdicts[step] = Verdict(step, step in chosen, says)
    return tuple(verdicts[step] for step in existing)


def prune(
    store: Store, verdicts: Iterable[Verdict], on_removed: Callable[[str, str, StorageError | None], None],
    on_left: Callable[[str, str], None] | None = None, later: Callable[[Callable[[], None]], None] = removal.at_once,
) -> None:
    """Remove each step that its verdict gives up, oldest first. Needs the lock, and checks it before each removal.

    on_removed  called with each directory, the reason, and the error if it could not be removed; a later sweep removes
                the rest
    on_left     called with what stays of a removed step
    later       is given what empties a directory that is no step any more, to call it
    raises      LockedError once the lock is lost
    """
    for verdict in verdicts:
        if verdict.keep:
            continue
        name = step_directory(verdict.step)
        try:
            store.check_lock()
            retired = removal.retire(store, verdict.step)
        except StorageError as error:
            on_removed(name, verdict.reason, error)
        else:
            later(partial(empty, store, retired, name, verdict.reason, on_removed, on_left))


def empty(
    store: Store, retired: Entry, name: str, reason: str, on_removed: Callable[[str, str, StorageError | None], None],
    on_left: Callable[[str, str], None] | None = None,
) -> None:
    """Remove the files of what had that `name`, and is no step or journal now; tell as `prune` does. Any thread."""
    try:
        left = catalog.finish_deletion(store, retired)
    except StorageError as error:
        on_removed(name, reason, error)
    else:
        on_removed(name, reason, None)
        if left and on_left is not None:
            on_left(name, left)


def whose(store: Names, step: int, store_id: str) -> str | None:
    """Why a step does not belong to the store with that identity; None if it does.

    raises  StorageError if that cannot be found out
    """
    directory = step_directory(step)
    if store.is_link(directory):
        return "is a link"
    try:
        manifest = read_manifest(store, directory)
    except NoCheckpointError:
        return "no longer has a manifest"
    except FormatError as error:
        return f"has a manifest that cannot be read ({error.message})"
    return None if manifest.store == store_id else "was saved into another store"


def foreign_or_own(store: Names, step: int) -> str:
    """A step, as text for a message; if it is not the store's own, with the reason."""
    why: str | None = None
    try:
        if store.exists(step_directory(step)):  # else it is still being moved
            why = whose(store, step, read_marker(store).store)
    except (FormatError, StorageError):
        why = None  # safe: the message only lacks one fact
    return f"step {step}" if why is None else f"step {step}, which {why}"


class Retention:
    """Retention of one job. Remembers for each step whether it is the store's own.

    on_left  called once for each step that stays because it is not
    awaited  is asked for the steps that another tier is still to get from this store
    """

    def __init__(
        self, store: Store, store_id: str, keep: Keep | KeepRule | None,
        on_removed: Callable[[str, str, StorageError | None], None], on_left: Callable[[str, str], None],
    ) -> None:
        self._store, self._store_id, self._keep = store, store_id, keep
        self.awaited: Callable[[], Collection[int]] = tuple
        self._on_removed, self._on_left = on_removed, on_left
        self._known: dict[int, tuple[str, str | None]] = {}  # step -> stamp of its manifest, why it is foreign
        self._told: set[tuple[int, str]] = set()

    def run(self, committed: int, later: Callable[[Callable[[], None]], None] = removal.at_once) -> None:
        """Remove the steps that `keep` gives up, after a step was committed. Raises LockedError, StorageError.

        later  see `prune`
        """
        if self._keep is None:
            return
        existing = catalog.steps(self._store)
        verdicts = decide(existing, self._keep, committed=committed, foreign=self._foreign, awaited=self.awaited())
        self._tell([verdict for verdict in verdicts if verdict.foreign], committed)
        prune(self._store, verdicts, self._on_removed, self._stays, later)
        here = set(existing)
        self._known = {step: known for step, known in self._known.items() if step in here}

    def _tell(self, foreign: Sequence[Verdict], committed: int) -> None:
        """Report each foreign step once; one log line for all, since there may be many."""
        lines = []
        for verdict in foreign:
            if (verdict.step, verdict.reason) not in self._told:
                self._told.add((verdict.step, verdict.reason))
                newer = f"; it is newer than step {committed}, so load() takes it" * (verdict.step > committed)
                name, why = step_directory(verdict.step), f"{verdict.reason}{newer}"
                lines.append(f"{name} {why}")
                self._on_left(name, why)
        if lines:
            more = f" (and {len(lines) - _LISTED_MAX} more)" * (len(lines) > _LISTED_MAX)
            listed = "; ".join(lines[-_LISTED_MAX:])
            log.warning("not saved by this store and left alone, in %s: %s%s", self._store.location, listed, more)

    def _stays(self, name: str, why: str) -> None:
        log.warning("%s/%s: %s", self._store.location, name, why)
        self._on_left(name, why)

    def _foreign(self, step: int) -> str | None:
        """See `whose`; each manifest is read once. A step that cannot be checked now counts as foreign for now."""
        directory = step_directory(step)
        try:
            if self._store.is_link(directory):
                return "is a link"
            stamp = self._store.stamp(inside(directory, MANIFEST_NAME)) or ""
            if self._known.get(step, ("", None))[0] != stamp or not stamp:
                self._known[step] = stamp, whose(self._store, step, self._store_id)
            return self._known[step][1]
        except StorageError as error:
            return f"cannot be read ({error.message})"


