"""The lock of a store in a bucket is a lease: an object that names the writer, and that the writer rewrites regularly.

A bucket does not report that a process has died, and clocks of machines differ. So a lease has expired if the object
has not changed for as many seconds as it states, by the clock of the waiting process. On the holder's machine, the
lease has also expired if the holder's process has ended. A writer that hangs for longer than the stated seconds
may lose the lease; `check` detects that (docs/ORDERING.md).
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

# seconds until a lease expires without renewal: longer than delays of a busy store, and shorter than a job's restart
LEASE_S = 30.0
_RENEWALS = 4  # number of renewals within LEASE_S
_TRIES = 8  # attempts to take a lease that other processes change meanwhile


class _LeaseRecord(msgspec.Struct, frozen=True):
    """The content of the object that is the lease.

    holder   describes the writer, for messages; "": the lease was released
    token    a new one each time the lease is taken
    turn     counts renewals, so that each renewal changes the ETag, even if the store computes the ETag from the bytes
    seconds  time until the lease expires, if it is not renewed
    machine, process  identify the holder: see `store.holders.machine_and_process`
    """

    holder: str
    token: str
    turn: int
    seconds: float
    machine: str
    process: str


class ObjectLease:
    """The lease of one store. For one thread at a time. While the lease is held, a background thread renews it.

    lease_s  seconds after which the lease expires if it is not renewed
    """

    def __init__(self, client: Client, lease_s: float = LEASE_S) -> None:
        self._client, self._lease_s = client, lease_s
        self._guard = threading.Lock()
        self._held: _LeaseRecord | None = None
        self._tag: str | None = None
        self._ended = threading.Event()
        self._renewing: threading.Thread | None = None

    def acquire(self, holder: str) -> bool:
        """Become the writer. Returns False if this process was already the writer.

        If another holder may be dead, waits until that is certain, for at most the `seconds` that the lease states.

        raises  LockedError   the holder is alive; the error names it
                StorageError  the thread that renews the lease cannot be started
        """
        if self._held is not None:
            return False
        machine, process = holders.machine_and_process()
        mine = _LeaseRecord(holder, secrets.token_hex(8), 0, self._lease_s, machine, process)
        for _ in range(_TRIES):
            current, tag = self._find()
            if current is None:
                if self._put_first(mine):
                    return True
                continue
            if current.holder and not self._is_given_up(current, tag):
                raise LockedError(
                    f"cannot save into {self._client.location}: another job writes there", holder=current.holder,
                    next="stop that job, or save into another store",
                )
            new_tag = self._client.replace(LOCK_NAME, msgspec.json.encode(mine), tag)
            if new_tag is not None:
                self._begin(mine, new_tag)
                return True
        raise LockedError(
            f"cannot save into {self._client.location}: another program keeps changing {LOCK_NAME}", holder="unknown",
            next="find the program that writes this object, and stop that program",
        )

    def _put_first(self, mine: _LeaseRecord) -> bool:
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

    def _find(self) -> tuple[_LeaseRecord | None, str | None]:
        """The lease record in the lock's object, and the object's ETag; (None, None) if there is no object. Content
        that is not a lease record counts as a released lease.
        """
        result = self._client.find(LOCK_NAME)
        if result is None:
            return None, None
        data, tag = result
        try:
            return msgspec.json.decode(data, type=_LeaseRecord), tag
        except msgspec.DecodeError:
            return _LeaseRecord("", "", 0, 0, "", ""), tag

    def _is_given_up(self, lease: _LeaseRecord, tag: str | None) -> bool:
        if holders.machine_and_process()[0] == lease.machine:
            return holders.has_ended(lease.machine, lease.process)
        log.warning(
            "%s: %s holds the lock; waiting up to %.0f s to see whether it is alive", self._client.location,
            lease.holder, lease.seconds,
        )
        deadline = time.monotonic() + min(lease.seconds, 10 * LEASE_S)
        while time.monotonic() < deadline:
            time.sleep(min(1.0, lease.seconds / _RENEWALS))
            head = self._client.head(LOCK_NAME)
            if head is None or not same_tag(head["e_tag"], tag):
                return head is None or self._find()[0] in (None, _LeaseRecord("", "", 0, 0, "", ""))
        return True

    def _begin(self, mine: _LeaseRecord, tag: str | None) -> None:
        self._held, self._tag = mine, tag
        self._ended = threading.Event()
        thread = threading.Thread(
            target=self._renew_all, args=(self._ended,), name="flowstone-lease", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # without renewals, a waiting job would take the lease
            self.release()
            raise StorageError(
                f"cannot renew the lock of {self._client.location}: cannot start a thread", errno=errno.EAGAIN,
                reason=str(error), next=MORE_THREADS,
            ) from error
        self._renewing = thread

    def _renew_all(self, ended: threading.Event) -> None:
        while not ended.wait(self._lease_s / _RENEWALS):
            try:
                if not self._renew(ended):
                    return
            except FlowstoneError as error:
                log.warning("%s: cannot renew the lock: %s", self._client.location, error.message)

    def _renew(self, ended: threading.Event) -> bool:
        """Renew the lease. Returns False if another process has it now."""
        with self._guard:
            lease = self._held
            if lease is None or ended.is_set():
                return False
            renewed = msgspec.structs.replace(lease, turn=lease.turn + 1)
            tag = self._client.replace(LOCK_NAME, msgspec.json.encode(renewed), self._tag)
            if tag is None:
                return False  # `check` reports that process
            self._held, self._tag = renewed, tag
            return True

    def check(self) -> None:
        """Raise LockedError unless this process still has the lease."""
        lease = self._held
        if lease is None:
            raise LockedError(
                f"the lock of {self._client.location} is not held", next="report this: it is a bug in Flowstone"
            )
        with self._guard:
            tag = self._client.tag(LOCK_NAME)
            if tag is not None and same_tag(tag, self._tag):
                return  # the object is unchanged since this process wrote it
            current, _ = self._find()
        if current is not None and current.token == lease.token:
            return
        new_holder = current is not None and current.holder
        raise LockedError(
            f"this job has lost the lock of {self._client.location}",
            found=f"{new_holder} has taken the lock since" if new_holder else f"{LOCK_NAME} was removed",
            next="stop the other job that writes there; the next save takes the lock again",
        )

    def release(self) -> None:
        """Release the lease, if this process has it. If the store cannot be reached, the lease expires later."""
        self._ended.set()
        with self._guard:
            lease, self._held = self._held, None
            if lease is None:
                return
            try:
                given_up = msgspec.structs.replace(lease, holder="", turn=lease.turn + 1)
                self._client.replace(LOCK_NAME, msgspec.json.encode(given_up), self._tag)
            except FlowstoneError as error:
                log.warning("%s: cannot release the lock: %s", self._client.location, error.message)
        if self._renewing is not None:
            self._renewing.join()  # `_ended` is set, so this thread makes no further request
            self._renewing = None

    def forget(self) -> None:
        """Called in a forked child: forget the lease and the thread, which belong to the parent."""
        self._guard, self._held, self._ended, self._renewing = threading.Lock(), None, threading.Event(), None
