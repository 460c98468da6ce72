"""The lock of a store in a bucket: an object that names the writer, which renews it as long as it lives.

No server tells us that a process has died, and clocks of machines differ. So a lease counts as given up once it has not
changed for as long as its holder promised, by the clock of the one who waits; on the holder's own machine, once that
process is gone. A writer that stands still for longer may lose it, and learns that when it asks (docs/ORDERING.md).
"""

from __future__ import annotations

import errno
import secrets
import threading
import time

import msgspec

from flowstone.errors import FlowstoneError, LockedError, StorageError
from flowstone.log import log
from flowstone.store import holders
from flowstone.store.lock import LOCK_NAME
from flowstone.store.objects.client import Client, same_tag
from flowstone.store.os_errors import MORE_THREADS

LEASE_S = 30.0  # without a renewal: longer than a busy store keeps one waiting, shorter than a restart
_RENEWALS = 4  # within that time
_TRIES = 8  # to take a lease that others change meanwhile


class _Lease(msgspec.Struct, frozen=True):
    """What the object says.

    holder  for people; "": it was given up
    token   of one holding
    turn    counts renewals: a store that tags objects by their bytes gives each another tag
    seconds until it counts as given up, if it is not renewed
    machine, process  where the holder runs: see `store.holders.here`
    """

    holder: str
    token: str
    turn: int
    seconds: float
    machine: str
    process: str


class ObjectLease:
    """The lease of one store. Calls come from one thread at a time; a thread of its own renews it while it is held.

    lease_s  that this holder promises to renew it in
    """

    def __init__(self, client: Client, lease_s: float = LEASE_S) -> None:
        self._client, self._lease_s = client, lease_s
        self._guard = threading.Lock()
        self._held: _Lease | None = None
        self._tag: str | None = None
        self._ended = threading.Event()
        self._renewing: threading.Thread | None = None

    def take(self, holder: str) -> bool:
        """Become the writer; whether this was not the writer before.

        Waits for a lease whose holder may be dead until that is certain, for the lease's `seconds` at most.

        raises  LockedError   names the holder, which is alive
                StorageError  no thread can be started that would renew it
        """
        if self._held is not None:
            return False
        machine, process = holders.here()
        mine = _Lease(holder, secrets.token_hex(8), 0, self._lease_s, machine, process)
        for _ in range(_TRIES):
            found, tag = self._find()
            if found is None:
                if self._put_first(mine):
                    return True
                continue
            if found.holder and not self._is_given_up(found, tag):
                raise LockedError(
                    f"cannot save into {self._client.location}: another job writes there", holder=found.holder,
                    next="stop that job, or save into another store",
                )
            taken = self._client.replace(LOCK_NAME, msgspec.json.encode(mine), tag)
            if taken is not None:
                self._begin(mine, taken)
                return True
        raise LockedError(
            f"cannot save into {self._client.location}: {LOCK_NAME} changes again and again", holder="unknown",
            next="find the program that replaces it, and stop it",
        )

    def _put_first(self, mine: _Lease) -> bool:
        data = msgspec.json.encode(mine)
        try:
            tag = self._client.put_new(LOCK_NAME, data, mine.token)
        except FlowstoneError:
            if self._find()[0] is None:
                raise
            return False
        if tag is None:
            tag = self._find()[1]
        self._client.check_conditional(LOCK_NAME, data)
        self._begin(mine, tag)
        return True

    def _find(self) -> tuple[_Lease | None, str | None]:
        """What the object says, and its tag; an object of anything else counts as a lease that was given up."""
        found = self._client.find(LOCK_NAME)
        if found is None:
            return None, None
        data, tag = found
        try:
            return msgspec.json.decode(data, type=_Lease), tag
        except msgspec.DecodeError:
            return _Lease("", "", 0, 0, "", ""), tag

    def _is_given_up(self, found: _Lease, tag: str | None) -> bool:
        if holders.here()[0] == found.machine:
            return holders.has_ended(found.machine, found.process)
        log.warning(
            "%s: %s holds the lock; waiting up to %.0f s to see whether it is alive", self._client.location,
            found.holder, found.seconds,
        )
        deadline = time.monotonic() + min(found.seconds, 10 * LEASE_S)
        while time.monotonic() < deadline:
            time.sleep(min(1.0, found.seconds / _RENEWALS))
            head = self._client.head(LOCK_NAME)
            if head is None or not same_tag(head["e_tag"], tag):
                return head is None or self._find()[0] in (None, _Lease("", "", 0, 0, "", ""))
        return True

    def _begin(self, mine: _Lease, tag: str | None) -> None:
        self._held, self._tag = mine, tag
        self._ended = threading.Event()
        renewing = threading.Thread(
            target=self._renew_all, args=(self._ended,), name="flowstone-lease", daemon=True
        )
        try:
            renewing.start()
        except RuntimeError as error:  # a lease that is not renewed is taken by the next job that waits for it
            self.release()
            raise StorageError(
                f"cannot renew the lock of {self._client.location}: no thread can be started", errno=errno.EAGAIN,
                reason=str(error), next=MORE_THREADS,
            ) from error
        self._renewing = renewing

    def _renew_all(self, ended: threading.Event) -> None:
        while not ended.wait(self._lease_s / _RENEWALS):
            try:
                if not self._renew(ended):
                    return
            except FlowstoneError as error:
                log.warning("%s: the lock could not be renewed: %s", self._client.location, error.message)

    def _renew(self, ended: threading.Event) -> bool:
        """Whether the lease is still ours."""
        with self._guard:
            held = self._held
            if held is None or ended.is_set():
                return False
            renewed = msgspec.structs.replace(held, turn=held.turn + 1)
            tag = self._client.replace(LOCK_NAME, msgspec.json.encode(renewed), self._tag)
            if tag is None:
                return False  # `check` tells who has it
            self._held, self._tag = renewed, tag
            return True

    def check(self) -> None:
        """Raise LockedError unless the lease is still this holding's."""
        held = self._held
        if held is None:
            raise LockedError(
                f"the lock of {self._client.location} is not held", next="report this: it is a mistake in Flowstone"
            )
        with self._guard:
            tag = self._client.tag(LOCK_NAME)
            if tag is not None and same_tag(tag, self._tag):
                return  # the object is the one that this holding has put last
            found, _ = self._find()
        if found is not None and found.token == held.token:
            return
        is_taken = found is not None and found.holder
        raise LockedError(
            f"this job has lost the lock of {self._client.location}",
            found=f"{is_taken} has taken it since" if is_taken else f"{LOCK_NAME} was removed",
            next="stop the other job that writes there; the next save takes the lock again",
        )

    def release(self) -> None:
        """Give it up, if it is held; a store that cannot be reached finds out by itself."""
        self._ended.set()
        with self._guard:
            held, self._held = self._held, None
            if held is None:
                return
            try:
                given_up = msgspec.structs.replace(held, holder="", turn=held.turn + 1)
                self._client.replace(LOCK_NAME, msgspec.json.encode(given_up), self._tag)
            except FlowstoneError as error:
                log.warning("%s: the lock could not be given up: %s", self._client.location, error.message)
        if self._renewing is not None:
            self._renewing.join()  # it asks for nothing more: it has been told
            self._renewing = None

    def forget(self) -> None:
        """In a forked child: the lease is the parent's, and so is the thread."""
        self._guard, self._held, self._ended, self._renewing = threading.Lock(), None, threading.Event(), None
