"""Errors of a run that a plan explains: out of memory, and a mesh that does not fit."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from typing import Any

from styrax.core import UserError
from styrax.core.config import Resolved


@contextlib.contextmanager
def fitting(resolved: Resolved, name: str) -> Iterator[None]:
    """Turn errors of devices that lack memory into one that says what was needed and what to do.

    Args:
        resolved: The run's configuration.
        name: How ``styrax plan`` finds it.

    Raises:
        UserError: In place of ``RESOURCE_EXHAUSTED``; all other errors pass.
    """
    import jax

    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(out_of_memory(error, resolved, name)) from error


def misfit(error: UserError, name: str) -> UserError:
    """Add to an error of the mesh where to look for one that fits."""
    return UserError(f"{error}\n`{command(name)} --search` ranks the meshes that do, with the bytes of a device")


def command(name: str, topology: str | None = None) -> str:
    """The command line that plans a run.

    >>> command("runs/my run/config.toml", "v5p:4x4x4"), command("recipe quickstart")
    ("styrax plan 'runs/my run/config.toml' --on v5p:4x4x4", 'styrax plan quickstart')
    """
    words = ["styrax", "plan", name.removeprefix("recipe "), *(["--on", topology] if topology else [])]
    return shlex.join(words)


def out_of_memory(error: BaseException, resolved: Resolved, name: str) -> str:
    """Say what was lacking, what was predicted, and what to change."""
    from styrax.train.plan.make import exhausted

    lines = [
        f"the devices have too little memory for this run: {exhausted(str(error)) if str(error) else 'no memory left'}"
    ]
    try:
        made = predicted_here(resolved)
    except Exception as failed:  # the error at hand must be told, whatever else goes wrong
        lines.append(f"(what it needs could not be predicted: {type(failed).__name__}: {str(failed).splitlines()[0]})")
    else:
        from styrax.train.plan.show import amount, summary

        lines += ["bytes of a device, as predicted:", summary(made)]
        if made.hbm_bytes is not None:
            lines.append(f"  {'a device has':<14}{amount(made.hbm_bytes):>12}")
        lines += [f"- {text}" for text in made.advice[1:]]
    lines.append(f"`{command(name)} --on TOPOLOGY` tells more, and --search what would fit")
    return "\n".join(lines)


def predicted_here(resolved: Resolved) -> Any:
    """Predict the run on the devices that JAX has here, with nothing compiled or allocated."""
    import jax

    from styrax.train.plan.chips import chip_of
    from styrax.train.plan.make import plan
    from styrax.train.plan.topology import CPU, Topology

    device = jax.devices()[0]
    chip, count = chip_of(device.device_kind), jax.device_count()
    kind = chip.name if chip is not None else CPU if device.platform == CPU else device.device_kind
    slices = len({getattr(each, "slice_index", 0) for each in jax.devices()}) if device.platform != CPU else 1
    shape = (count // (chip.devices if chip is not None else 1) // slices,)
    return plan(resolved, topology=Topology(kind=kind, shape=shape, slices=slices), compile=False)
