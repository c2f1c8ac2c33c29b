"""What this machine knows of a folder: its file system, what is free, and whether a writer that lives holds it."""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from styrax.checkpoint import identity, lock

_MOUNTS, _LOCKS = Path("/proc/self/mountinfo"), Path("/proc/locks")

#: Type of file system -> what is wrong with it for checkpoints, and what to do.
_TRAPS: dict[str, tuple[Literal["note", "problem"], str, str]] = {
    "tmpfs": ("note", "it is memory, and gone when the machine is", "copy what you want to keep to a disk"),
    "ramfs": ("note", "it is memory, and gone when the machine is", "copy what you want to keep to a disk"),
    "overlay": (
        "note",
        "it is the layer of a container, and may be gone when that ends",
        "save on a volume that is mounted into it",
    ),
    "9p": ("note", "it is shared with a host that may sync and lock nothing", "save on the guest's own disk"),
    "vboxsf": ("note", "it is shared with a host that may sync and lock nothing", "save on the guest's own disk"),
    "virtiofs": ("note", "it is shared with a host that may sync and lock nothing", "save on the guest's own disk"),
    "cifs": ("note", "locks and renames over SMB depend on its options", "save on NFS 4 or a local disk"),
    "smb3": ("note", "locks and renames over SMB depend on its options", "save on NFS 4 or a local disk"),
    "nfs": ("note", "version 3 keeps locks in a service of its own", "mount it with version 4"),
    "vfat": ("note", "it has no journal, and no files of 4 GiB", "save on ext4 or another POSIX file system"),
    "exfat": ("note", "it has no journal", "save on ext4 or another POSIX file system"),
}
_BUCKETS = re.compile(r"fuse\.(gcsfuse|s3fs|goofys|mount-s3|rclone|blobfuse2?|geesefs)")


@dataclass(frozen=True, kw_only=True)
class LockState:
    """Whether somebody writes in a folder.

    Attributes:
        held: `None` if that cannot be told from here.
        owner: What the lock's file says of who has it, or had it last; empty if it says nothing.
        text: The same in words.
    """

    held: bool | None
    owner: dict[str, Any]
    text: str


def lock_state(directory: Path) -> LockState:
    """Look who holds the lock of a folder, without taking it, even for a moment."""
    path = directory / lock.FILE
    try:
        stat, content = path.stat(), path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return LockState(held=False, owner={}, text="nobody has ever written here")
    except (OSError, ValueError):
        return LockState(held=None, owner={}, text=f"{lock.FILE} cannot be read")
    try:
        owner = json.loads(content)
        where = f"process {owner['pid']} on host {owner['host']}"
        who = f"{where} ({owner['program']}, since {owner['since']})"
    except (ValueError, KeyError, TypeError):
        owner, where, who = {}, "another process", "another process"
    if _locked(stat, owner.get("pid")):
        return LockState(held=True, owner=owner, text=f"held by {who}")
    if not owner:
        return LockState(held=False, owner={}, text="free")
    if owner["host"] != socket.gethostname():
        # The locks of other machines are not seen here.
        return LockState(held=None, owner=owner, text=f"held, or was last, by {who}, which cannot be asked from here")
    if owner.get("boot") not in (None, identity.boot_id()) or not identity.runs(owner["pid"]):
        return LockState(held=False, owner=owner, text=f"free; {where} had it last, and has ended")
    if _LOCKS.exists():
        return LockState(held=False, owner=owner, text=f"free; {where} had it last")
    return LockState(held=None, owner=owner, text=f"held, or was last, by {who}, which still runs")


def file_system(path: Path) -> str | None:
    """Give the type of the file system that holds a folder, such as `ext4`; `None` if that is not known."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    path, best, kind = path.resolve(), -1, None
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        # The kernel writes blanks and backslashes as three octal digits.
        point = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields[4]))
        if (path == point or point in path.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), after.split()[0]  # of two at one place the later one is seen
    return kind


def trap(kind: str) -> tuple[Literal["ok", "note", "problem"], str, str]:
    """Say what is wrong with a type of file system for checkpoints: severity, what, and what to do.

    Example:
        >>> trap("ext4"), trap("fuse.gcsfuse")[0]
        (('ok', '', ''), 'problem')
    """
    if _BUCKETS.fullmatch(kind):
        return (
            "problem",
            "a bucket that is mounted has no rename that happens at once, and may lose what was synced",
            "save on a disk, and upload from there",
        )
    if kind.startswith("fuse."):
        return "note", "what fsync and rename do depends on the program behind it", "ask its manual, or save elsewhere"
    return _TRAPS.get(kind, ("ok", "", ""))


def read_only(path: Path) -> bool:
    """Tell whether a folder is on a file system that is mounted to be read only."""
    return hasattr(os, "statvfs") and bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def free_inodes(path: Path) -> int | None:
    """Give how many files can still be made; `None` where there is no such number."""
    if not hasattr(os, "statvfs"):
        return None
    found = os.statvfs(path)
    return found.f_favail if found.f_files else None


def version_key(version: str) -> tuple[int, ...]:
    """Give what orders versions, without what follows the numbers.

    Example:
        >>> version_key("0.12.8") < version_key("0.12.10.dev1")
        True
    """
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _locked(stat: os.stat_result, owner: int | None) -> bool:
    """Tell whether a process that this one may know of has a lock on a file."""
    try:
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return False
    device = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}"
    for line in lines:
        fields = line.split()
        if len(fields) < 6 or fields[1] != "FLOCK":  # a line of one that waits has an arrow in this place
            continue
        place, _, inode = fields[5].rpartition(":")
        # Some file systems (overlay, btrfs) show another device here than to `stat`; then the process has to fit.
        if inode == str(stat.st_ino) and (place == device or fields[4] == str(owner)):
            return True
    return False
