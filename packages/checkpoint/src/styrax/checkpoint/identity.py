"""Which process this is, on which start of which machine, and whether another one still runs."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def me() -> dict[str, Any]:
    """Describe this process, as JSON: `pid`, `host` and `boot`."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "boot": boot_id()}


def boot_id() -> str | None:
    """Give what is different each time this machine starts; `None` where there is no such thing."""
    with contextlib.suppress(OSError):
        return _BOOT.read_text().strip()
    return None


def runs(pid: int) -> bool:
    """Tell whether a process of this machine still runs.

    Example:
        >>> runs(os.getpid())
        True
    """
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    # A process that was killed and not yet waited for has ended too.
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True
