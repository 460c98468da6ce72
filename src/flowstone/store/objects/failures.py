"""Failures of object stores: which of them may pass, and what they are in our words, with what to do next."""

from __future__ import annotations

import errno
import re

import msgspec

from flowstone.errors import FullError, StorageError

_STATUS = re.compile(r"status code: (\d{3})", re.ASCII)
_CODE = re.compile(r"<Code>(\w+)</Code>|\"code\":\s*\"(\w+)\"", re.ASCII)
_DETAIL_CHARS_MAX = 300
_PASSING = frozenset({408, 429, 500, 502, 503, 504})
_PASSING_CODES = frozenset({
    "SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "ConditionalRequestConflict",
    "OperationAborted",
})
_PASSING_ERRNOS = frozenset({
    errno.EAGAIN, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETRESET, errno.ESTALE,
})
_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
_FULL_CODES = frozenset({"QuotaExceeded", "InsufficientCapacity", "XMinioStorageFull"})
_NO_BUCKET_CODES = frozenset({"NoSuchBucket", "ContainerNotFound"})
_REDIRECT_CODES = frozenset({
    "PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException",
})
_EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
_UNKNOWN_CODES = frozenset({
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidSecurity", "AuthenticationFailed",
})
_REGION = re.compile(r"<Region>([a-z0-9-]+)</Region>|expecting '([a-z0-9-]+)'", re.ASCII)
_BROKEN = ("error performing", "http error", "connection", "timed out", "timeout", "body", "incomplete")
_REDIRECT = "Received redirect"  # obstore's own words
_METADATA_HOSTS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")  # asked where no credentials are set
_CREDENTIALS = (
    "set credentials as other programs take them: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY; or an AWS profile (boto3 has to be installed); or run "
    "where an instance role gives them"
)


class Refusal(msgspec.Struct, frozen=True):
    """What an object store said.

    status  of HTTP; None: there was no answer, or the store is no server
    code    the store's own word; "" where it says none
    """

    status: int | None
    code: str
    text: str


def refusal_of(error: BaseException) -> Refusal:
    """Read the text of an exception of obstore's: it has no other form for the status."""
    text = str(error).partition("\n\nDebug source")[0]
    status, code = _STATUS.search(text), _CODE.search(text)
    return Refusal(
        None if status is None else int(status[1]), "" if code is None else code[1] or code[2], " ".join(text.split())
    )


def is_missing(error: BaseException) -> bool:
    """Whether there is no object of that name; False where there is not even a bucket."""
    return isinstance(error, FileNotFoundError) and refusal_of(error).code not in _NO_BUCKET_CODES


def is_taken(error: BaseException) -> bool:
    """Whether the name of a conditional put has an object already, or another one than was expected."""
    if type(error).__name__ not in ("AlreadyExistsError", "PreconditionError"):
        return isinstance(error, FileExistsError)
    return refusal_of(error).code not in _PASSING_CODES


def may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed later: the server is busy, the connection broke, or no answer came."""
    if not type(error).__module__.startswith("obstore"):  # a file system's
        return isinstance(error, ConnectionError | TimeoutError) or (
            isinstance(error, OSError) and error.errno in _PASSING_ERRNOS
        )
    said = refusal_of(error)
    if said.code in _PASSING_CODES or said.status in _PASSING:
        return True
    if said.status is not None or any(word in said.text for word in (*_METADATA_HOSTS, _REDIRECT)):
        return False
    return any(word in said.text.lower() for word in _BROKEN)


def storage_error(
    location: str, operation: str, path: str, error: BaseException, *, tried_s: float = 0, outcome: str = ""
) -> StorageError:
    """What an exception of obstore's means, for the user of the store at `location`.

    tried_s  for how long it was tried again
    outcome  of a request that changes something, where it is not certain that nothing has changed
    """
    said = refusal_of(error)
    where = f"{location}/{path}" if path else location
    facts: dict[str, object] = {"reason": said.text[:_DETAIL_CHARS_MAX]}
    if tried_s:
        facts["tried"] = f"for {tried_s:.0f} s"
    if outcome:
        facts["outcome"] = outcome
    code, remedy = _meaning(location, operation, said, error)
    facts["next"] = remedy
    if code == errno.ENOSPC:
        return FullError(f"no space to {operation} {where}", errno=code, **facts)
    return StorageError(f"cannot {operation} {where}", errno=code, **facts)


def _meaning(location: str, operation: str, said: Refusal, error: BaseException) -> tuple[int, str]:
    """An errno, and what to do next."""
    if isinstance(error, OSError) and error.errno in _FULL_ERRNOS:
        return errno.ENOSPC, "free space, or prune old checkpoints; the previous checkpoint is untouched"
    if isinstance(error, OSError) and error.errno == errno.ENOTSUP:
        return errno.ENOTSUP, "use another file system, or a directory"
    if said.code in _NO_BUCKET_CODES:
        return errno.ENODEV, f"create the bucket of {location}, or check its name, region and endpoint"
    if isinstance(error, FileNotFoundError):
        return errno.ENOENT, "check the path"
    if is_taken(error):
        return errno.EEXIST, "an object is there; remove it, or choose another path"
    if said.code in _REDIRECT_CODES or said.status in (301, 307) or _REDIRECT in said.text:
        region = _REGION.search(said.text)
        named = "it" if region is None else region[1] or region[2]
        return errno.EREMOTE, f"the bucket is in another region; set AWS_REGION to {named}, or AWS_ENDPOINT_URL"
    if said.code in _EXPIRED_CODES:
        return errno.EACCES, "the credentials have expired; renew them, and start the job again from its last step"
    if said.code in _UNKNOWN_CODES:
        return errno.EACCES, "the store does not know these credentials; check the keys, and whose endpoint it is"
    if said.status == 401 or any(host in said.text for host in _METADATA_HOSTS):
        return errno.EACCES, _CREDENTIALS
    if said.status == 403 or type(error).__name__ in (
        "PermissionDeniedError", "UnauthenticatedError", "PermissionError"
    ):
        return errno.EACCES, f"let these credentials {operation} there: they need to list, read, write and delete"
    if said.status == 507 or said.code in _FULL_CODES:
        return errno.ENOSPC, "raise the quota, or prune old checkpoints; the previous checkpoint is untouched"
    if said.status == 501 or isinstance(error, NotImplementedError) or type(error).__name__ == "NotSupportedError":
        return errno.ENOTSUP, "use a store that puts conditionally (If-None-Match, If-Match)"
    if said.status in (429, 503) or said.code == "SlowDown":
        return errno.EBUSY, "the store is busy; try again later, or let fewer jobs use it at once"
    if may_pass(error):
        return errno.ETIMEDOUT, "check the network and the endpoint (AWS_ENDPOINT_URL), and try again"
    code = error.errno if isinstance(error, OSError) else None
    return code or errno.EIO, "check the URL, and the store's own log"


def begins_behind(error: BaseException) -> bool:
    """Whether a range was refused because the object has no byte of it."""
    said = refusal_of(error)
    return said.status == 416 or "Wanted range starting at" in said.text or "range was invalid" in said.text
