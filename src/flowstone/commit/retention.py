"""Retention: decides which of a store's own checkpoints are removed, and removes them in a safe order
(docs/ORDERING.md, Retention).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import msgspec

from flowstone.commit import catalog, removal
from flowstone.commit.entries import StoreEntry, step_directory
from flowstone.commit.manifests import path_inside, read_manifest, read_marker
from flowstone.config import Keep, KeepRule
from flowstone.errors import FormatError, NoCheckpointError, StorageError
from flowstone.format.manifest import MANIFEST_NAME
from flowstone.log import log
from flowstone.store.base import Names, Store

_LISTED_MAX = 5  # how many steps one log line lists, the newest ones


class RetentionDecision(msgspec.Struct, frozen=True):
    """Whether retention keeps a step, and why. `foreign`: whether another store saved the step; such a step is kept."""

    step: int
    keep: bool
    reason: str
    foreign: bool = False


def decide_retention(
    existing: Sequence[int], keep: Keep | KeepRule | None, *, committed: int | None = None,
    foreign: Callable[[int], str | None] | None = None, awaited: Collection[int] = (),
) -> tuple[RetentionDecision, ...]:
    """Decide which of `existing` (the steps with a manifest, ascending) are kept. Steps that another store saved are
    always kept, and do not count against a limit.

    committed  the step that was just committed. It and newer steps are kept; no limit counts the newer ones
    foreign    returns why this store did not save a step; None if it saved the step. Called only if the answer matters
    awaited    steps that must still be copied to another tier. They are kept, and count like others
    """
    if keep is None:
        return tuple(RetentionDecision(step, True, "all steps are kept") for step in existing)
    if not isinstance(keep, Keep):
        decided = _decide_by_rule(existing, keep, committed, foreign)
    else:
        decided = _decide_by_number(existing, keep, committed, foreign)
    if not awaited:
        return decided
    waiting = set(awaited)
    return tuple(
        RetentionDecision(verdict.step, True, "not copied to another tier yet")
        if not verdict.keep and verdict.step in waiting else verdict
        for verdict in decided
    )


def _decide_by_number(
    existing: Sequence[int], keep: Keep, committed: int | None, foreign: Callable[[int], str | None] | None
) -> tuple[RetentionDecision, ...]:
    verdicts, counted = [], 0
    for step in reversed(existing):
        is_newer = committed is not None and step > committed
        if not is_newer and counted >= keep.last and keep.every is not None and step % keep.every == 0:
            verdicts.append(RetentionDecision(step, True, f"a multiple of {keep.every}"))
        elif step != committed and foreign is not None and (why := foreign(step)) is not None:
            verdicts.append(RetentionDecision(step, True, why, foreign=True))
        elif is_newer:
            verdicts.append(RetentionDecision(step, True, f"newer than {committed}, which was just committed"))
        elif counted < keep.last:
            counted += 1
            verdicts.append(RetentionDecision(step, True, f"among the newest {keep.last}"))
        else:
            verdicts.append(RetentionDecision(step, False, f"older than the newest {keep.last}"))
    return tuple(reversed(verdicts))


def _decide_by_rule(
    existing: Sequence[int], rule: KeepRule, committed: int | None, foreign: Callable[[int], str | None] | None
) -> tuple[RetentionDecision, ...]:
    """Decide by the user's own rule. The rule gets only steps that this store saved, up to the committed one."""
    verdicts = {}
    for step in existing:
        if committed is not None and step > committed:
            verdicts[step] = RetentionDecision(step, True, f"newer than {committed}, which was just committed")
        elif step != committed and foreign is not None and (why := foreign(step)) is not None:
            verdicts[step] = RetentionDecision(step, True, why, foreign=True)
    own = tuple(step for step in existing if step not in verdicts)
    chosen = {*rule(own), *own[-1:]} if own else set()
    for step in own:
        says = "kept by the rule" if step in chosen else "expired by the rule"
        verdicts[step] = RetentionDecision(step, step in chosen, says)
    return tuple(verdicts[step] for step in existing)


def remove_expired(
    store: Store, verdicts: Iterable[RetentionDecision], on_removed: Callable[[str, str, StorageError | None], None],
    on_left: Callable[[str, str], None] | None = None,
    run_later: Callable[[Callable[[], None]], None] = removal.run_now,
) -> None:
    """Remove each expired step, oldest first. The caller must hold the store's lock, which is checked before each
    removal.

    on_removed  called for each step: with its directory, the reason, and the error that prevented the removal, or None.
                After an error, a later sweep removes the directory
    on_left     called if files of other programs stay in the directory of a removed step: with its name and a list of
                these files
    run_later   called with a function that empties the directory of a removed step; it must call that function, now or
                later
    raises      LockedError  the lock was lost
    """
    for verdict in verdicts:
        if verdict.keep:
            continue
        name = step_directory(verdict.step)
        try:
            store.check_lock()
            retired = removal.retire_step(store, verdict.step)
        except StorageError as error:
            on_removed(name, verdict.reason, error)
        else:
            run_later(partial(empty_retired, store, retired, name, verdict.reason, on_removed, on_left))


def empty_retired(
    store: Store, retired: StoreEntry, name: str, reason: str,
    on_removed: Callable[[str, str, StorageError | None], None],
    on_left: Callable[[str, str], None] | None = None,
) -> None:
    """Remove the files of a step or journal whose directory was renamed from `name`. Reports as `remove_expired` does.
    Can be called on any thread.
    """
    try:
        left = catalog.finish_deletion(store, retired)
    except StorageError as error:
        on_removed(name, reason, error)
    else:
        on_removed(name, reason, None)
        if left and on_left is not None:
            on_left(name, left)


def why_foreign(store: Names, step: int, store_id: str) -> str | None:
    """Why `step` does not count as saved by the store with the identity `store_id`, as the end of a sentence ("is a
    link"). None if that store saved it.

    raises  StorageError if its manifest cannot be read
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


def describe_step(store: Names, step: int) -> str:
    """A text that names a step, for a message: "step 3"; or, if the step does not count as saved by this store, with
    the reason: "step 3, which is a link".
    """
    why: str | None = None
    try:
        if store.exists(step_directory(step)):  # otherwise another thread is renaming it
            why = why_foreign(store, step, read_marker(store).store)
    except (FormatError, StorageError):
        why = None  # then the message lacks the reason
    return f"step {step}" if why is None else f"step {step}, which {why}"


class Retention:
    """Retention of one job. Remembers for each step whether this store saved it.

    on_left  called once for each step that stays because this store did not save it
    """

    def __init__(
        self, store: Store, store_id: str, keep: Keep | KeepRule | None,
        on_removed: Callable[[str, str, StorageError | None], None], on_left: Callable[[str, str], None],
    ) -> None:
        self._store, self._store_id, self._keep = store, store_id, keep
        self._on_removed, self._on_left = on_removed, on_left
        # step -> state of its manifest file, and why the step is foreign (None: it is not)
        self._ownership: dict[int, tuple[str, str | None]] = {}
        self._reported: set[tuple[int, str]] = set()

    def run(
        self, committed: int, run_later: Callable[[Callable[[], None]], None] = removal.run_now,
        awaited: Collection[int] = (),
    ) -> None:
        """Remove the steps that the option `keep` does not keep. Called after a step was committed. Raises LockedError,
        StorageError.

        run_later  see `remove_expired`
        awaited    see `decide_retention`
        """
        if self._keep is None:
            return
        existing = catalog.steps(self._store)
        verdicts = decide_retention(
            existing, self._keep, committed=committed, foreign=self._foreign, awaited=awaited
        )
        self._report_foreign([verdict for verdict in verdicts if verdict.foreign], committed)
        remove_expired(self._store, verdicts, self._on_removed, self._report_kept, run_later)
        here = set(existing)
        self._ownership = {step: entry for step, entry in self._ownership.items() if step in here}

    def _report_foreign(self, foreign: Sequence[RetentionDecision], committed: int) -> None:
        """Report the steps that other stores saved, each only once, and all in one log line, since there may be many.
        """
        lines = []
        for verdict in foreign:
            if (verdict.step, verdict.reason) not in self._reported:
                self._reported.add((verdict.step, verdict.reason))
                newer = f"; it is newer than step {committed}, so load() loads it" * (verdict.step > committed)
                name, why = step_directory(verdict.step), f"{verdict.reason}{newer}"
                lines.append(f"{name} {why}")
                self._on_left(name, why)
        if lines:
            more = f" (and {len(lines) - _LISTED_MAX} more)" * (len(lines) > _LISTED_MAX)
            listed = "; ".join(lines[-_LISTED_MAX:])
            log.warning(
                "retention keeps checkpoints in %s that were saved into other stores: %s%s",
                self._store.location, listed, more,
            )

    def _report_kept(self, name: str, why: str) -> None:
        log.warning("%s/%s: %s", self._store.location, name, why)
        self._on_left(name, why)

    def _foreign(self, step: int) -> str | None:
        """Like `why_foreign`, but a manifest is read again only if it has changed. A step whose manifest cannot be read
        counts as foreign until the manifest can be read.
        """
        directory = step_directory(step)
        try:
            if self._store.is_link(directory):
                return "is a link"
            stamp = self._store.stamp(path_inside(directory, MANIFEST_NAME)) or ""
            if self._ownership.get(step, ("", None))[0] != stamp or not stamp:
                self._ownership[step] = stamp, why_foreign(self._store, step, self._store_id)
            return self._ownership[step][1]
        except StorageError as error:
            return f"cannot be read ({error.message})"


