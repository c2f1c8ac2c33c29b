"""What goes wrong with object storage: what is tried again, and what is told, with cause and cure."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from styrax.checkpoint.errors import CheckpointError

#: Seconds before the second attempt; each later wait is twice as long, up to the longest, and varied by a half.
WAIT = 0.5
LONGEST_WAIT = 20.0

_LASTING = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,
    NotImplementedError,
    TypeError,
    ValueError,
)
_LASTING_CODES = (errno.EINVAL, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOSYS)
# Raised by packages that need not be installed, so they are known by name.
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "DefaultCredentialsError")
_UNREACHABLE = ("EndpointConnectionError", "ClientConnectorError", "ConnectTimeoutError", "ReadTimeoutError")

T = TypeVar("T")


def again(attempts: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function, again while it raises what may pass: 429, 5xx, timeouts, broken connections.

    Args:
        attempts: How often at most.
        function: Called with the rest; calling it twice must do no harm.

    Raises:
        Exception: What the last attempt raised.
    """
    for attempt in range(attempts):
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if attempt + 1 == attempts or lasting(error):
                raise
        # Varied, so that many hosts do not come back at once.
        time.sleep(min(WAIT * 2**attempt, LONGEST_WAIT) * random.uniform(0.5, 1.5))
    raise AssertionError("the last attempt returns or raises")


def lasting(error: BaseException) -> bool:
    """Tell whether another attempt cannot help.

    Example:
        >>> lasting(FileNotFoundError()), lasting(TimeoutError()), lasting(OSError("503 Slow Down"))
        (True, False, False)
    """
    if isinstance(error, _LASTING) or type(error).__name__ in _NO_CREDENTIALS:
        return True
    if isinstance(error, OSError) and error.errno in _LASTING_CODES:
        return True
    status = getattr(error, "status", None) or getattr(error, "code", None)  # of HTTP, as gcsfs and aiohttp give it
    return isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429)


def no_bucket(error: BaseException) -> bool:
    """Tell whether the bucket itself is not there, which a missing object looks like otherwise."""
    chain = [error, error.__cause__, error.__context__]
    codes = {getattr(each, "response", {}).get("Error", {}).get("Code") for each in chain if hasattr(each, "response")}
    return "NoSuchBucket" in codes or "bucket does not exist" in str(error).lower()


def explain(error: BaseException, what: str, *, attempts: int) -> CheckpointError:
    """Turn what a file system of fsspec raised into an error that names the cause and the cure.

    Args:
        error: Raised.
        what: What was attempted, with its URL: the beginning of the text.
        attempts: How often an error that may pass was tried.

    Returns:
        The error to raise, with the given one as its cause; a `CheckpointError` comes back itself.
    """
    if isinstance(error, CheckpointError):
        return error
    name, code = type(error).__name__, getattr(error, "errno", None)
    text = f"{name}: {error}".strip().removesuffix(".")
    if name in _NO_CREDENTIALS:
        cause = f"no credentials were found ({text})"
        cure = "set those of the provider (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE), or "
        cure += "pass storage_options"
    elif isinstance(error, PermissionError):
        cause = f"access is denied ({text})"
        cure = "check the credentials, and that they allow to list, get, put and delete there"
    elif no_bucket(error):
        cause, cure = "there is no such bucket", "make it, or check the URL and the endpoint"
    elif isinstance(error, FileNotFoundError):
        cause, cure = f"it is not there ({text})", "check the URL; something else may have deleted it"
    elif code in (errno.ENOSPC, errno.EDQUOT):
        cause, cure = "no space is left there", "free some, or keep fewer checkpoints"
    elif isinstance(error, (TimeoutError, ConnectionError)) or name in _UNREACHABLE:
        cause = f"the server does not answer ({text}), {attempts} times in a row"
        cure = "check the network and the endpoint"
    elif lasting(error):
        cause, cure = text, "check the URL and storage_options"
    else:
        cause, cure = f"{text}, {attempts} times in a row", "check the server, or try again later"
    found = CheckpointError(f"{what}: {cause}; {cure}")
    found.__cause__ = error
    return found
