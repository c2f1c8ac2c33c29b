"""One report on a folder of checkpoints: whether the next save will work, and what a restart would find."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from styrax.checkpoint import host
from styrax.checkpoint.commit import contents
from styrax.checkpoint.errors import CheckpointError, sized
from styrax.checkpoint.leftovers import leftovers
from styrax.checkpoint.locate import all_steps
from styrax.checkpoint.manifest import FILE, Manifest, list_incomplete, list_steps, read_manifest, step_name
from styrax.checkpoint.verify import verify

_FEW = 5
_SKEW = datetime.timedelta(minutes=1)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        severity: `ok`; `note`: worth knowing; `problem`: something is lost or will fail.
        subject: What was looked at, in a word.
        text: What was found.
        cure: What to do; empty if nothing.
    """

    severity: Literal["ok", "note", "problem"]
    subject: str
    text: str
    cure: str = ""


def examine(
    directory: str | Path, *, deep: bool = False, progress: Callable[[str, int], None] | None = None
) -> list[Finding]:
    """Look at a folder of checkpoints, without changing anything or taking its lock.

    Args:
        directory: The folder.
        deep: Read everything and compare digests, not only sizes.
        progress: Called with the name and bytes of each file that was compared.

    Returns:
        What was found, in a fixed order of subjects.

    Raises:
        CheckpointError: It is no folder.

    Example:
        >>> import tempfile
        >>> from styrax.checkpoint import Store
        >>> folder = tempfile.mkdtemp()
        >>> with Store(folder) as store:
        ...     for step in (1, 2):
        ...         ticket = store.save(step, {"run": {"step": step}})
        >>> {finding.subject: finding.text for finding in examine(folder)}["fallback"]
        'step 2 is whole by its sizes, and so is step 1, to fall back on'
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a folder; give that of a run, or the one that holds its checkpoints")
    manifests: dict[int, Manifest] = {}
    for step in list_steps(directory):
        with contextlib.suppress(CheckpointError):
            manifests[step] = read_manifest(directory / step_name(step))
    mode = "checksum" if deep else "size"
    problems = {
        step: verify(directory / step_name(step), mode=mode, blame=deep, progress=progress)
        for step in all_steps(directory)
    }
    alive = host.lock_state(directory)
    return [
        *_file_system(directory),
        *_writable(directory),
        *_space(directory, manifests),
        *_lock(alive),
        *_leftovers(directory, alive.held),
        *_steps(directory, problems, deep),
        *_fallback(problems, deep),
        *_foreign(directory, manifests),
        *_clock(manifests),
        *_versions(manifests),
    ]


def _file_system(directory: Path) -> Iterator[Finding]:
    kind = host.file_system(directory)
    if kind is None:
        yield Finding(severity="ok", subject="file system", text="of unknown type")
        return
    severity, trap, cure = host.trap(kind)
    yield Finding(severity=severity, subject="file system", text=f"{kind}{trap and ': '}{trap}", cure=cure)


def _writable(directory: Path) -> Iterator[Finding]:
    if host.read_only(directory):
        yield Finding(
            severity="problem",
            subject="writable",
            text="the file system is mounted to be read only",
            cure="mount it to be written, or save in another folder; reading works",
        )
    elif not os.access(directory, os.W_OK | os.X_OK):
        yield Finding(
            severity="problem",
            subject="writable",
            text="this user may not write here",
            cure="change the folder's owner or permissions, or save in another folder; reading works",
        )
    else:
        yield Finding(severity="ok", subject="writable", text="this user may write here")


def _space(directory: Path, manifests: dict[int, Manifest]) -> Iterator[Finding]:
    free = shutil.disk_usage(directory).free
    if not manifests:
        yield Finding(severity="ok", subject="space", text=f"{sized(free)} free")
        return
    newest = manifests[max(manifests)]
    text = f"{sized(free)} free, the newest checkpoint has {sized(newest.nbytes)}"
    cure = "free some before the next save, or keep fewer (`styrax checkpoint rm DIR --keep-last N`)"
    inodes = host.free_inodes(directory)
    if free < newest.nbytes:
        yield Finding(severity="problem", subject="space", text=f"{text}: the next save will fail", cure=cure)
    elif inodes is not None and inodes < 2 * len(newest.files):
        count = f"{inodes} more files can be made, a checkpoint has {len(newest.files)}"
        yield Finding(severity="problem", subject="space", text=count, cure=cure)
    elif free < 3 * newest.nbytes:
        yield Finding(severity="note", subject="space", text=f"{text}: two more at most", cure=cure)
    else:
        yield Finding(severity="ok", subject="space", text=text)


def _lock(state: host.LockState) -> Iterator[Finding]:
    severity = "ok" if state.held is False or not state.owner else "note"
    cure = ""
    if state.held:
        cure = "a second writer will be refused; `rm` and `gc` too, until that one ends"
    elif state.held is None:
        cure = "look there whether it still runs; if not, the lock is free"
    yield Finding(severity=severity, subject="lock", text=state.text, cure=cure)


def _leftovers(directory: Path, held: bool | None) -> Iterator[Finding]:
    found = leftovers(directory)
    back = [left for left in found if left.fate == "put back"]
    gone = [left for left in found if left.fate == "delete"]
    for left in back:
        yield Finding(
            severity="note" if held else "problem",
            subject="leftovers",
            text=f"{left.path.name} is a whole checkpoint that has lost its name",
            cure="wait for the writer, which is replacing it" if held else "`styrax checkpoint gc DIR` puts it back",
        )
    if gone:
        total = sized(sum(left.bytes for left in gone))
        whose = "the writer that holds the lock may be at work in them" if held else "of writers that were killed"
        yield Finding(
            severity="note",
            subject="leftovers",
            text=f"{_some([left.path.name for left in gone])}, {total}, {whose}",
            cure="" if held else "`styrax checkpoint gc DIR` deletes them, and so does the next writer",
        )
    if not found:
        yield Finding(severity="ok", subject="leftovers", text="none")


def _steps(directory: Path, problems: dict[int, list[str]], deep: bool) -> Iterator[Finding]:
    incomplete = list_incomplete(directory)
    if incomplete:
        yield Finding(
            severity="problem",
            subject="incomplete",
            text=f"{FILE} is missing in {_some([step_name(step) for step in incomplete])}: no save leaves that",
            cure="copy them again from where they came, or delete them with `styrax checkpoint rm`",
        )
    damaged = {step: texts for step, texts in problems.items() if texts and step not in incomplete}
    for step, texts in damaged.items():
        more = f"; and {len(texts) - _FEW} more" if len(texts) > _FEW else ""
        yield Finding(
            severity="problem",
            subject="damaged",
            text=f"step {step}: {'; '.join(texts[:_FEW])}{more}",
            cure=f"copy it again from a backup, or delete it with `styrax checkpoint rm DIR {step}`",
        )
    if problems and not damaged and not incomplete:
        how = "every digest fits" if deep else "every size fits; --deep compares digests"
        count = f"{len(problems)} checkpoint{'s' * (len(problems) != 1)}"
        yield Finding(severity="ok", subject="damaged", text=f"none of {count}: {how}")


def _fallback(problems: dict[int, list[str]], deep: bool) -> Iterator[Finding]:
    good = [step for step in sorted(problems, reverse=True) if not problems[step]]
    how = "whole" if deep else "whole by its sizes"
    if not problems:
        yield Finding(severity="note", subject="fallback", text="there is no checkpoint yet")
    elif not good:
        yield Finding(
            severity="problem",
            subject="fallback",
            text=f"none of {len(problems)} checkpoints is {how}: there is nothing to resume from",
            cure="copy one from a backup",
        )
    elif good[0] != max(problems):
        yield Finding(
            severity="problem",
            subject="fallback",
            text=f"step {max(problems)} is not whole: a run would go on from step {good[0]}",
            cure="repair or delete what is newer, or resume from there knowingly",
        )
    elif len(good) == 1:
        yield Finding(
            severity="note",
            subject="fallback",
            text=f"step {good[0]} is {how}, and there is no other to fall back on",
            cure="keep two or more (keep_last)",
        )
    else:
        text = f"step {good[0]} is {how}, and so is step {good[1]}, to fall back on"
        yield Finding(severity="ok", subject="fallback", text=text)


def _foreign(directory: Path, manifests: dict[int, Manifest]) -> Iterator[Finding]:
    ours = {"LOCK", *map(step_name, all_steps(directory)), *(left.path.name for left in leftovers(directory))}
    strange = sorted(entry.name for entry in directory.iterdir() if entry.name not in ours)
    for step, manifest in manifests.items():
        known = {FILE, *manifest.files}
        strange += [f"{step_name(step)}/{name}" for name in contents(directory / step_name(step)) if name not in known]
    if strange:
        yield Finding(
            severity="note",
            subject="foreign",
            text=f"{_some(strange)} {'does' if len(strange) == 1 else 'do'} not belong here",
            cure="nothing reads them; what lies in a checkpoint is deleted with it, so keep it elsewhere",
        )
    else:
        yield Finding(severity="ok", subject="foreign", text="no files that do not belong here")


def _clock(manifests: dict[int, Manifest]) -> Iterator[Finding]:
    now = datetime.datetime.now(datetime.UTC)
    ahead = {}
    for step, manifest in manifests.items():
        with contextlib.suppress(ValueError):
            created = datetime.datetime.fromisoformat(manifest.created.replace("Z", "+00:00"))
            if created.tzinfo is not None and created - now > _SKEW:
                ahead[step] = manifest
    if ahead:
        worst = max(ahead.values(), key=lambda manifest: manifest.created)
        yield Finding(
            severity="note",
            subject="clock",
            text=f"{_some([f'step {step}' for step in ahead])} was made in the future (at {worst.created}, on "
            f"{worst.writer.get('host', 'an unknown host')})",
            cure="set the clock there, or here; steps are ordered by number, so nothing else depends on it",
        )
    else:
        yield Finding(severity="ok", subject="clock", text="no checkpoint is of the future")


def _versions(manifests: dict[int, Manifest]) -> Iterator[Finding]:
    if not manifests:
        return
    manifest = manifests[max(manifests)]
    newer = []
    for name, version in manifest.writer.get("versions", {}).items():
        here = _installed(name)
        if here is None:
            newer.append(f"{name} {version}, here not installed")
        elif host.version_key(version) > host.version_key(here):
            newer.append(f"{name} {version}, here {here}")
    if newer:
        yield Finding(
            severity="note",
            subject="versions",
            text=f"step {manifest.step} was written with {'; '.join(newer)}",
            cure="install what it was written with if something cannot be read",
        )
    else:
        yield Finding(severity="ok", subject="versions", text=f"what wrote step {manifest.step} is no newer than here")


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return ", ".join(names[:_FEW]) + more
