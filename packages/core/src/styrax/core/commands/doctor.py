"""`styrax doctor`: what is installed, what jax sees, and what does not fit together."""

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from styrax.core.commands.conflicts import conflicts, installed
from styrax.core.errors import UsageError

HELP = "show versions, devices, environment and known conflicts"

_PREFIXES = ("JAX_", "XLA_", "STYRAX_", "LIBTPU_", "TPU_", "NCCL_", "CUDA_VISIBLE_DEVICES")
_PROBE = """
import json, jax
print(json.dumps({
    "backend": jax.default_backend(),
    "devices": [{"id": d.id, "platform": d.platform, "kind": d.device_kind} for d in jax.local_devices()],
}))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds to wait for jax (default: 60)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; the exit code is 1 when something is wrong."""
    if not 0 < args.timeout <= 86400:
        raise UsageError(f"--timeout: expected seconds, more than 0 and at most a day (86400), got {args.timeout:g}")
    report = examine(args.timeout)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    return 1 if report["conflicts"] or "error" in report["jax"] else 0


def examine(timeout: float = 60.0) -> dict[str, Any]:
    """Collect the report.

    Args:
        timeout: Seconds to wait for jax to find its devices; a driver can hang.

    Returns:
        JSON values: `python`, `platform`, `cpus`, `memory_bytes`, `versions`, `jax`, `environment`,
        `conflicts`.
    """
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "cpus": _cpus(),
        "memory_bytes": _memory(),
        "versions": installed(),
        "jax": devices(timeout),
        "environment": environment(os.environ),
        "conflicts": conflicts(),
    }


def devices(timeout: float) -> dict[str, Any]:
    """Ask jax for its devices in another process, which is ended with its children after `timeout` seconds.

    Returns:
        `backend` and `devices`, or `error`.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _PROBE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL) if os.name == "posix" else process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process stuck in a driver outlives its end
            process.communicate(timeout=2)
        return {"error": f"jax found no devices within {timeout:g} s; a driver may hang"}
    try:
        return json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        last = err.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        return {"error": last[0]}


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Give the variables that change what jax or styrax do, sorted.

    Example:
        >>> environment({"JAX_PLATFORMS": "cpu", "HOME": "/root"})
        {'JAX_PLATFORMS': 'cpu'}
    """
    return {name: environ[name] for name in sorted(environ) if name.startswith(_PREFIXES)}


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> int | None:
    found = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            found.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    return min(found, default=None)


def show(report: dict[str, Any]) -> None:
    """Print a report as tables."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    jax = report["jax"]
    kinds = [f"{d['platform']}:{d['id']} {d['kind']}" for d in jax.get("devices", ())]
    memory = report["memory_bytes"]
    facts = {
        "python": report["python"],
        "platform": report["platform"],
        "cpus": str(report["cpus"]),
        "memory": f"{memory / 2**30:.1f} GiB" if memory else "unknown",
        "devices": jax.get("error") or "\n".join(kinds),
    }
    for title, rows, none in (
        ("machine", facts, ""),
        ("versions", report["versions"], ""),
        ("environment", report["environment"], "none of the variables that jax and styrax read is set"),
        ("known conflicts", {str(n): text for n, text in enumerate(report["conflicts"], 1)}, "none"),
    ):
        console.print(title)
        table = Table(show_header=False, box=None, padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(Text(name), Text(str(value)))
        if not rows:
            table.add_row(none, "")
        console.print(table)
