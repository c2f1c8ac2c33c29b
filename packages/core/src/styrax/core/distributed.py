"""Joins the processes of a job, from explicit arguments or from what a scheduler put in the environment."""

import atexit
import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from styrax.core.errors import UserError

#: Argument of `initialize` -> the environment variable that stands in for it.
VARIABLES = {
    "coordinator": "STYRAX_COORDINATOR",
    "num_processes": "STYRAX_NUM_PROCESSES",
    "process_id": "STYRAX_PROCESS_ID",
}


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: int = 300,
    heartbeat: int = 30,
    environ: Mapping[str, str] | None = None,
) -> bool:
    """Join a multi-process job; do nothing in a job of one process.

    The first of these that is there decides:

    1. The arguments, each with `STYRAX_COORDINATOR`, `STYRAX_NUM_PROCESSES` or `STYRAX_PROCESS_ID` in its
       place when it is `None`. Either all three are set or none. A coordinator `"auto"` alone leaves
       everything to jax's own detection (a TPU pod on Compute Engine, Open MPI).
    2. A SLURM step of several tasks. With one task per node each process has all of its node's devices,
       otherwise the one with its local number.
    3. A TPU slice of several hosts on GKE, or several slices: left to jax's own detection.

    Call it before anything else uses jax devices. On CPUs the processes talk through gloo. A process that gives no
    sign of life for `heartbeat` seconds counts as dead, and jax then ends all others, even those that wait for it on
    a device.

    Args:
        coordinator: `host:port` of process 0, reachable from all.
        num_processes: How many processes the job has.
        process_id: Which one this is, from 0.
        timeout: Seconds to wait for the others at the start.
        heartbeat: Seconds without a sign of life after which a process counts as dead.
        environ: The environment; `os.environ` by default.

    Returns:
        Whether this process is now one of several.

    Raises:
        UserError: Only a part is set, a value does not fit, or jax was used before.

    Example:
        >>> initialize(environ={})
        False
    """
    environ = os.environ if environ is None else environ
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    plans = (_explicit(given, environ), _slurm(environ), _tpu(environ))
    plan = next((plan for plan in plans if plan is not None), None)
    if plan is None or plan.get("num_processes") == 1:
        return False
    return _join(plan, timeout, heartbeat)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Hold a free port of this machine for a coordinator that is about to be started.

    A port that is merely found free can be taken by anyone, even as the near end of a connection, before the
    coordinator listens on it. This one stays bound, without listening, in the way that lets a server of the same user
    bind it too, as gRPC's do. Where a system has no such way the port is free when it is given out, and no more.

    Example:
        >>> with reserved_port() as port:
        ...     0 < port < 65536
        True
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    holder = socket.socket(family)
    try:
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        shared = getattr(socket, "SO_REUSEPORT", None)
        if shared is not None:
            holder.setsockopt(socket.SOL_SOCKET, shared, 1)
        holder.bind(("", 0))
        port = holder.getsockname()[1]
        if shared is None:
            holder.close()
        yield port
    finally:
        holder.close()


def abandon(code: int = 1) -> None:
    """Let this process end without waiting for the others, when it comes to its end.

    At exit jax waits for all processes of the job. One that failed would so wait for others that wait for it on a
    device, until a timeout of minutes, while its signs of life keep them waiting. What it has to say is said first.

    Args:
        code: Its exit status, whatever it would have been.
    """

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)

    atexit.register(leave)  # what was registered last runs first


def _explicit(given: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, Any] | None:
    values = {
        name: environ.get(variable) or None if given[name] is None else given[name]
        for name, variable in VARIABLES.items()
    }
    unset = [name for name, value in values.items() if value is None]
    if len(unset) == len(values):
        return None
    if values["coordinator"] == "auto" and len(unset) == 2:
        return {}
    if unset:
        known = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        wanted = ", ".join(f"{name} ({VARIABLES[name]})" for name in unset)
        raise UserError(f"multi-process set-up: {known} is set but not {wanted}; set all three or none")
    address = str(values["coordinator"])
    problems = []
    if not re.fullmatch(r".+:\d+", address):
        problems.append(f"coordinator: expected host:port, got {address!r}")
    numbers = {}
    for name in ("num_processes", "process_id"):
        try:
            numbers[name] = int(str(values[name]))
        except ValueError:
            problems.append(f"{name}: expected an integer, got {values[name]!r}")
    if len(numbers) == 2:
        count, number = numbers["num_processes"], numbers["process_id"]
        if count < 1:
            problems.append(f"num_processes: expected 1 or more, got {count}")
        elif not 0 <= number < count:
            problems.append(f"process_id: expected 0 to {count - 1}, got {number}")
    if problems:
        raise UserError("\n  ".join(["multi-process set-up:", *problems]))
    return {"coordinator_address": address, **numbers}


def _slurm(environ: Mapping[str, str]) -> dict[str, Any] | None:
    wanted = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")
    # Only `srun` sets the step's variables: a batch script, or a shell on a login node, is one process.
    if any(name not in environ for name in wanted):
        return None
    tasks = int(environ["SLURM_STEP_NUM_TASKS"])
    first = re.match(r"([^,\[]+)(?:\[(\d+))?", environ["SLURM_STEP_NODELIST"])
    assert first is not None
    # Jobs that share a node need different ports: take one from the ephemeral range by job number.
    port = 61440 + int(environ["SLURM_JOB_ID"]) % 4096
    plan: dict[str, Any] = {
        "coordinator_address": f"{first[1]}{first[2] or ''}:{port}",
        "num_processes": tasks,
        "process_id": int(environ["SLURM_PROCID"]),
    }
    if environ.get("SLURM_STEP_NUM_NODES") != str(tasks):
        plan["local_device_ids"] = [int(environ["SLURM_LOCALID"])]
    return plan


def _tpu(environ: Mapping[str, str]) -> dict[str, Any] | None:
    workers = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES") or ""
    several = len(workers.split(",")) > 1 or "MEGASCALE_COORDINATOR_ADDRESS" in environ
    return {} if several else None


def _join(plan: dict[str, Any], timeout: int, heartbeat: int) -> bool:
    import jax

    if jax.distributed.is_initialized():
        return jax.process_count() > 1
    # Without this jax would detect a cluster again and override the devices of an explicit plan.
    method = "deactivate" if plan else None
    try:
        jax.distributed.initialize(
            **plan,
            cluster_detection_method=method,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=heartbeat,
        )
    except (RuntimeError, ValueError) as error:
        where = plan.get("coordinator_address", "detected by jax")
        raise UserError(f"cannot join the job (coordinator {where}): {error}") from error
    return jax.process_count() > 1
