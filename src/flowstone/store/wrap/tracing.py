"""Wrappers of a store that trace its calls, make them fail, or retry them."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from flowstone.errors import FlowstoneError, StorageError
from flowstone.log import log
from flowstone.store.base import ReadReceipt, Receipt, Store
from flowstone.store.wrap.wrapper import Wrapper

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreCall:
    """A finished call.

    verb   the name of the method; for reads and writes of segments, see Wrapper
    bytes  how many bytes the call moved; 0 if that is not known
    error  the error that the call raised, or that is in its result
    """

    verb: str
    path: str
    seconds: float
    bytes: int
    error: BaseException | None


class TracingStore(Wrapper):
    """Passes each finished call of a store to `on_call`, on the thread that made the call."""

    def __init__(
        self, inner: Store, on_call: Callable[[StoreCall], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(inner)
        self._on_call, self._clock = on_call, clock

    def _call(self, verb: str, path: str, act: Callable[[], T]) -> T:
        return self._timed(verb, path, act)

    def put(self, path: str, data: bytes) -> None:
        self._timed("put", path, lambda: self.inner.put(path, data), len(data))

    def _timed(self, verb: str, path: str, act: Callable[[], T], given_bytes: int = 0) -> T:
        began = self._clock()
        try:
            result = act()
        except BaseException as error:
            self._on_call(StoreCall(verb, path, self._clock() - began, 0, error))
            raise
        seconds = self._clock() - began
        failure = result.error if isinstance(result, Receipt | ReadReceipt) else None
        self._on_call(StoreCall(verb, path, seconds, given_bytes + _moved_bytes(result), failure))
        return result


def _moved_bytes(result: object) -> int:
    if isinstance(result, bytes):
        return len(result)
    if isinstance(result, Receipt):
        return result.io.copied_bytes
    if isinstance(result, ReadReceipt):
        return result.requested_bytes or result.copied_bytes  # files that are mapped into memory need no requests
    return 0


class FaultInjectingStore(Wrapper):
    """Makes calls of a store fail. `before` and `after` are called with the verb and path of each call, and return an
    error or None.

    before  if it returns an error, the call is not made, and the error is raised
    after   if it returns an error, the call is made, but its result is lost. Not used for calls that only start a read
            or write of segments

    For reads and writes of segments, the error is in the result that is returned once they have ended.
    """

    def __init__(
        self, inner: Store, before: Callable[[str, str], FlowstoneError | None] = lambda verb, path: None,
        after: Callable[[str, str], FlowstoneError | None] = lambda verb, path: None,
    ) -> None:
        super().__init__(inner)
        self._before, self._after = before, after

    def _call(self, verb: str, path: str, act: Callable[[], T]) -> T:
        error = self._before(verb, path)
        if error is not None and verb not in ("written", "read_through"):
            raise error
        result = act()
        if error is None and verb not in ("write", "read_extents"):
            error = self._after(verb, path)
        if error is not None and isinstance(result, Receipt | ReadReceipt):
            return replace(result, error=result.error or error)
        if error is not None:
            raise error
        return result


_IDEMPOTENT = frozenset({
    "exists", "is_link", "names", "size", "stamp", "read", "sync_directory", "check_lock", "free_bytes", "read_extents",
    "reads_past_cache",
})
_TRANSIENT = frozenset({
    errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED,
    errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETRESET, errno.ESTALE,
})


class RetryingStore(Wrapper):
    """Repeats a call that failed for a transient reason, if the call may be repeated.

    Calls that create, move or remove are made once: the first attempt may have succeeded although its result was lost.

    attempts       how often each call is tried at most
    first_delay_s  pause before the second attempt; each later pause is twice as long, up to `delay_s_max`
    """

    def __init__(
        self, inner: Store, *, attempts: int = 5, first_delay_s: float = 0.1, delay_s_max: float = 5.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._delays = [min(delay_s_max, first_delay_s * 2**number) for number in range(attempts - 1)]
        self._sleep = sleep

    def _call(self, verb: str, path: str, act: Callable[[], T]) -> T:
        for delay in self._delays if verb in _IDEMPOTENT else ():
            try:
                return act()
            except StorageError as error:
                if error.errno not in _TRANSIENT:
                    raise
                log.warning("%s: %s; trying again in %g s", self.location, error.message, delay)
                self._sleep(delay)
        return act()
