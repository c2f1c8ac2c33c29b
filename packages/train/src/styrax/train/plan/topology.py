"""Which devices a run is planned for, from text such as ``v5p:8x8x8`` or ``cpu:8``."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from styrax.core import UsageError, UserError, nearest
from styrax.train.plan.chips import CHIPS, Chip, chip_named

CPU = "cpu"
TPUS = tuple(chip.name for chip in CHIPS if chip.dims)
_ALIASES = {"v5litepod": "v5e", "v7x": "tpu7x", "v7": "tpu7x", "ironwood": "tpu7x", "trillium": "v6e"}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Chips of one kind in a grid, once or in several slices.

    Attributes:
        kind: Name of the chip, or "cpu".
        shape: Chips along each dimension of a slice.
        slices: How many slices there are.

    >>> parse("tpu7x:4x4x4", slices=2)
    Topology(kind='tpu7x', shape=(4, 4, 4), slices=2)
    >>> parse("tpu7x:4x4x4", slices=2).devices, str(parse("cpu:8"))
    (256, 'cpu:8')
    """

    kind: str
    shape: tuple[int, ...]
    slices: int = 1

    def __str__(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    @property
    def chip(self) -> Chip | None:
        """What is known of the chip; None for a CPU."""
        return chip_named(self.kind)

    @property
    def chips(self) -> int:
        """Chips in all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        """JAX devices in all slices."""
        return self.chips * (1 if self.chip is None else self.chip.devices)


def parse(text: str, *, slices: int = 1) -> Topology:
    """Read a topology.

    Args:
        text: ``KIND:AxBxC``, chips along each dimension, or ``cpu:N``.
        slices: How many of them.

    Raises:
        UsageError: There is no such kind, or the shape is not one.
    """
    kind, colon, size = text.strip().lower().partition(":")
    kind = _ALIASES.get(kind, kind)
    known = (*TPUS, CPU)
    if kind not in known:
        raise UsageError(
            f"topology {text!r}: no accelerator {kind!r}{nearest(kind, known)}; known: {', '.join(known)}, such as "
            "v5p:4x4x4, v6e:16x16, cpu:8"
        )
    chip = chip_named(kind)
    dims = 1 if chip is None else chip.dims
    wanted = "x".join("ABC"[:dims]) if dims > 1 else "N"
    if not colon or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", size) or len(size.split("x")) != dims:
        hint = ""
        if "-" in text or not colon:
            hint = "; the shape of the slice is needed, not the number of its cores"
        raise UsageError(f"topology {text!r}: expected {kind}:{wanted}, with {dims} size(s) of 1 or more{hint}")
    if slices < 1:
        raise UsageError(f"--slices: expected 1 or more, got {slices}")
    return Topology(kind=kind, shape=tuple(map(int, size.split("x"))), slices=slices)


def of_here(slices: int = 1) -> Topology:
    """The devices that JAX has here, as far as they can be named: CPUs.

    Raises:
        UsageError: They are accelerators, whose shape is for the user to say.
    """
    import jax

    device = jax.devices()[0]
    if device.platform != CPU:
        raise UsageError(
            f"say what to plan for, such as --on v5p:4x4x4; here are {jax.device_count()} x {device.device_kind}"
        )
    return Topology(kind=CPU, shape=(jax.device_count() // slices,), slices=slices)


def prepare(topology: Topology) -> None:
    """Set what JAX and libtpu read when they start: nothing here needs an accelerator, and none is taken.

    Call it before the first import of jax. What is set already stays, except the platform: to plan, JAX must not
    open the accelerators of this machine, which a run may be using.
    """
    os.environ["JAX_PLATFORMS"] = CPU
    if topology.kind != CPU:
        # Several processes may compile at once, and no metadata server is to be asked which TPU this is.
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
        os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        return
    flag = "xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if found := re.search(rf"{flag}=(\d+)", flags):
        if int(found[1]) < topology.devices:
            os.environ["XLA_FLAGS"] = flags.replace(found[0], f"{flag}={topology.devices}")
        return
    import jax

    with contextlib.suppress(RuntimeError):  # the backend has started: see `find`
        jax.config.update("jax_num_cpu_devices", topology.devices)


def find(topology: Topology) -> list[Any]:
    """Give the topology's JAX devices, which need not exist.

    Raises:
        UserError: libtpu is missing, or knows no such topology; or there are fewer CPU devices.
    """
    import jax

    if topology.kind == CPU:
        devices = jax.devices(CPU)
        if len(devices) < topology.devices:
            raise UserError(
                f"{topology} needs {topology.devices} CPU devices, and JAX has started with {len(devices)}; set "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={topology.devices} before"
            )
        return list(devices[: topology.devices])
    if find_spec("libtpu") is None:
        raise UserError(
            f'to compile for {topology} without a TPU, its compiler is needed: pip install "styrax-train[tpu-plan]" '
            "(libtpu, for Linux on x86-64); --no-compile plans without"
        )
    from jax.experimental import topologies

    try:
        with quiet():
            found = topologies.get_topology_desc(
                platform="tpu", topology_name=str(topology), num_slices=topology.slices
            )
    except Exception as error:
        raise UsageError(
            f"topology {str(topology)!r}: the TPU compiler refuses it: {_reason(error)}; whole hosts are 2x2x1 chips, "
            f"so try {_rounded(topology)}"
        ) from error
    return list(found.devices)


def _reason(error: BaseException) -> str:
    return str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ").rstrip(".")


def _rounded(topology: Topology) -> Topology:
    """The nearest shape of even sizes, which whole hosts fill.

    >>> str(_rounded(parse("v5p:3x3x3")))
    'v5p:4x4x3'
    """
    shape = tuple(max(2, 2 * round(size / 2 + 0.1)) for size in topology.shape[:2])
    return replace(topology, shape=(*shape, *topology.shape[2:]))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what native code writes to standard error, such as libtpu that looks for a TPU; Python's own is kept."""
    import sys

    sys.stderr.flush()
    try:
        saved = os.dup(2)
    except OSError:
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    old = sys.stderr
    try:
        os.dup2(null, 2)
        with os.fdopen(os.dup(saved), "w", buffering=1, closefd=True) as kept:
            sys.stderr = kept if old is sys.__stderr__ else old
            yield
    finally:
        sys.stderr = old
        os.dup2(saved, 2)
        os.close(null)
        os.close(saved)
