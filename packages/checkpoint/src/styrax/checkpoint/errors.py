"""What can go wrong with a checkpoint, said to a user."""

import errno
import functools
import shutil
from pathlib import Path

from styrax.core import UserError


class CheckpointError(UserError):
    """A checkpoint that cannot be written, read or trusted; the text says why and what to do."""


class Damaged(CheckpointError):
    """Bytes of a checkpoint are not those that were saved, or not there."""


@functools.lru_cache(maxsize=1024)
def sized(count: int) -> str:
    """Write a number of bytes for people.

    Example:
        >>> sized(999), sized(1_500_000)
        ('999 B', '1.5 MB')
    """
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("the last unit takes any size")


def explain(error: BaseException, directory: Path, what: str) -> CheckpointError:
    """Turn what the file system or Orbax raised into an error that names the cause and the cure.

    Args:
        error: Raised while writing.
        directory: The folder of the checkpoints.
        what: What was attempted, as the beginning of the text.

    Returns:
        The error to raise, with the given one as its cause; a `CheckpointError` comes back itself.
    """
    if isinstance(error, CheckpointError):
        return error
    code = getattr(error, "errno", None)
    text = f"{type(error).__name__}: {error}".strip()
    # TensorStore reports the system's error as text inside a ValueError.
    if code in (errno.ENOSPC, errno.EDQUOT) or "No space left" in text or "quota exceeded" in text.lower():
        cause = f"no space is left{_free(directory)}"
        cure = "free some, or keep fewer checkpoints (keep_last, keep_every)"
    elif code == errno.EROFS or "Read-only file system" in text:
        cause, cure = "the file system is read-only", "choose a directory that can be written"
    elif code in (errno.EACCES, errno.EPERM) or "Permission denied" in text:
        cause = "this user may not write there"
        cure = "change the folder's permissions, or choose another directory"
    elif not directory.is_dir():
        cause, cure = "the folder is not there (any more)", "mount or make it, then save again"
    elif code == errno.EMFILE:
        cause, cure = "this process has too many open files", "raise the limit (ulimit -n)"
    else:
        cause, cure = text, ""
    found = CheckpointError(
        f"{what} in {directory}: {cause}. Checkpoints made before are untouched{cure and '; '}{cure}"
    )
    found.__cause__ = error
    return found


def _free(directory: Path) -> str:
    try:
        return f" ({sized(shutil.disk_usage(directory).free)} free)"
    except OSError:
        return ""
