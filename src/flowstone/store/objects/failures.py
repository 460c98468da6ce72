"""Failures of object stores: whether they may pass, and the StorageError for each, with advice on what to do."""

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
_REDIRECT = "Received redirect"  # the beginning of an obstore message
# servers that obstore asks for credentials if none are set
_METADATA_HOSTS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
_CREDENTIALS = (
    "set credentials in the environment: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY; or an AWS profile (boto3 has to be installed); or run "
    "where an instance role provides them"
)


class ServerError(msgspec.Struct, frozen=True):
    """An object store's error.

    status  HTTP status; None: no answer came, or the store is not on a server
    code    the store's own error code; "" if it has none
    """

    status: int | None
    code: str
    text: str


def server_error_of(error: BaseException) -> ServerError:
    """Get status and code from the text of an obstore exception, which has no fields for them."""
    text = str(error).partition("\n\nDebug source")[0]
    status, code = _STATUS.search(text), _CODE.search(text)
    return ServerError(
        None if status is None else int(status[1]), "" if code is None else code[1] or code[2], " ".join(text.split())
    )


def is_missing(error: BaseException) -> bool:
    """Whether the error means that the object does not exist. False if the bucket itself does not exist."""
    return isinstance(error, FileNotFoundError) and server_error_of(error).code not in _NO_BUCKET_CODES


def is_taken(error: BaseException) -> bool:
    """Whether the error means that a conditional put has failed, because the object exists or has another tag than
    expected.
    """
    if type(error).__name__ not in ("AlreadyExistsError", "PreconditionError"):
        return isinstance(error, FileExistsError)
    return server_error_of(error).code not in _PASSING_CODES


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later, since the server is busy, the connection broke, or no answer came."""
    if not type(error).__module__.startswith("obstore"):  # the error is of a file system
        return isinstance(error, ConnectionError | TimeoutError) or (
            isinstance(error, OSError) and error.errno in _PASSING_ERRNOS
        )
    refusal = server_error_of(error)
    if refusal.code in _PASSING_CODES or refusal.status in _PASSING:
        return True
    if refusal.status is not None or any(word in refusal.text for word in (*_METADATA_HOSTS, _REDIRECT)):
        return False
    return any(word in refusal.text.lower() for word in _BROKEN)


def storage_error(
    location: str, operation: str, path: str, error: BaseException, *, tried_s: float = 0, outcome: str = ""
) -> StorageError:
    """The error for an obstore exception, in the store at `location`.

    tried_s  how long the request was retried, in seconds
    outcome  what may have happened: a text for a request that may have changed the store although it failed
    """
    refusal = server_error_of(error)
    full_path = f"{location}/{path}" if path else location
    facts: dict[str, object] = {"reason": refusal.text[:_DETAIL_CHARS_MAX]}
    if tried_s:
        facts["tried"] = f"for {tried_s:.0f} s"
    if outcome:
        facts["outcome"] = outcome
    code, remedy = _meaning(location, operation, refusal, error)
    facts["next"] = remedy
    if code == errno.ENOSPC:
        return FullError(f"no space to {operation} {full_path}", errno=code, **facts)
    return StorageError(f"cannot {operation} {full_path}", errno=code, **facts)


def _meaning(location: str, operation: str, refusal: ServerError, error: BaseException) -> tuple[int, str]:
    """The errno of an error, and the advice on what to do next."""
    if isinstance(error, OSError) and error.errno in _FULL_ERRNOS:
        return errno.ENOSPC, "free space, or prune old checkpoints; the previous checkpoint is untouched"
    if isinstance(error, OSError) and error.errno == errno.ENOTSUP:
        return errno.ENOTSUP, "use another file system, or a directory"
    if refusal.code in _NO_BUCKET_CODES:
        return errno.ENODEV, f"create the bucket of {location}, or check its name, region and endpoint"
    if isinstance(error, FileNotFoundError):
        return errno.ENOENT, "check the path"
    if is_taken(error):
        return errno.EEXIST, "an object has that name; remove it, or choose another path"
    if refusal.code in _REDIRECT_CODES or refusal.status in (301, 307) or _REDIRECT in refusal.text:
        region = _REGION.search(refusal.text)
        named = "it" if region is None else region[1] or region[2]
        return errno.EREMOTE, f"the bucket is in another region; set AWS_REGION to {named}, or correct AWS_ENDPOINT_URL"
    if refusal.code in _EXPIRED_CODES:
        return errno.EACCES, "the credentials have expired; renew them, and start the job again from its last step"
    if refusal.code in _UNKNOWN_CODES:
        return errno.EACCES, "the store does not know these credentials; check the keys and the endpoint"
    if refusal.status == 401 or any(host in refusal.text for host in _METADATA_HOSTS):
        return errno.EACCES, _CREDENTIALS
    if refusal.status == 403 or type(error).__name__ in (
        "PermissionDeniedError", "UnauthenticatedError", "PermissionError"
    ):
        return errno.EACCES, f"let these credentials list, read, write and delete there (refused: {operation})"
    if refusal.status == 507 or refusal.code in _FULL_CODES:
        return errno.ENOSPC, "raise the quota, or prune old checkpoints; the previous checkpoint is untouched"
    if refusal.status == 501 or isinstance(error, NotImplementedError) or type(error).__name__ == "NotSupportedError":
        return errno.ENOTSUP, "use a store with conditional puts (If-None-Match, If-Match)"
    if refusal.status in (429, 503) or refusal.code == "SlowDown":
        return errno.EBUSY, "the store is busy; try again later, or run fewer jobs on it at the same time"
    if is_transient(error):
        return errno.ETIMEDOUT, "check the network and the endpoint (AWS_ENDPOINT_URL), and try again"
    code = error.errno if isinstance(error, OSError) else None
    return code or errno.EIO, "check the URL, and the store's own log"


def begins_behind(error: BaseException) -> bool:
    """Whether a range was refused because it begins after the object's end."""
    refusal = server_error_of(error)
    return refusal.status == 416 or "Wanted range starting at" in refusal.text or "range was invalid" in refusal.text
