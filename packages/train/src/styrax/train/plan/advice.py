"""What to change in a run that does not fit its devices, from where its bytes are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HEADROOM = 0.95
"""Share of a device's memory that a plan may fill: the rest is the runtime's, and the compiler's stacks."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What advice looks at.

    Attributes:
        groups: Name of a group of bytes -> bytes of a device, or None.
        total: All that a device needs, as the compiler says or as predicted; None if neither is known.
        hbm_bytes: Memory of a device; None if not known.
        rows: Rows of a batch.
        accumulate: Micro-batches a step.
        shards: Pieces that the mesh cuts the batch into.
        devices: How many.
        remat: What the model recomputes; None if it does not say.
        axes: Mesh axis -> devices along it.
        split: Share of the parameters that one device holds.
    """

    groups: Mapping[str, int | None]
    total: int | None
    hbm_bytes: int | None
    rows: int
    accumulate: int
    shards: int
    devices: int
    remat: str | None
    axes: Mapping[str, int]
    split: float

    @property
    def fits(self) -> bool | None:
        """Whether it does; None if that is not known."""
        if self.total is None or self.hbm_bytes is None:
            return None
        return self.total <= HEADROOM * self.hbm_bytes


def advice(facts: Facts, *, failed: bool = False) -> tuple[str, ...]:
    """List what to change, that with the most effect first; nothing where the run fits or nothing is known.

    Args:
        facts: Of the plan.
        failed: The compiler found no room, whatever was predicted.

    Returns:
        Sentences, each with a setting to write.
    """
    if not (failed or facts.fits is False) or facts.total is None or facts.hbm_bytes is None:
        return ()
    over = facts.total - HEADROOM * facts.hbm_bytes
    found: list[tuple[float, str]] = []
    state = sum(facts.groups.get(name) or 0 for name in ("params", "optimizer", "gradients"))
    replicas = facts.split * facts.devices
    if replicas > 1.5:
        saved = state * (1 - 1 / replicas)
        found.append(
            (
                saved,
                f"split the parameters over more devices: each holds 1/{1 / facts.split:.0f} of them and there are "
                f"{facts.devices}; mesh.axes.fsdp=-1 without other axes leaves {_gb(state - saved)} of {_gb(state)}",
            )
        )
    activations, temporaries = facts.groups.get("activations") or 0, facts.groups.get("temporaries") or 0
    if facts.remat in ("none", "dots"):
        found.append((0.8 * activations, f'recompute more: model.remat="block" instead of "{facts.remat}"'))
    micro = facts.rows // facts.accumulate
    local = micro // facts.shards
    if local > 1:
        times = next(n for n in range(2, local + 1) if local % n == 0)
        wanted = facts.accumulate * times
        found.append(
            (
                (activations + temporaries) * (1 - 1 / times),
                f"cut the batch into more micro-batches: train.accumulate={wanted} (the same updates, more steps of "
                "computing)",
            )
        )
        found.append(
            (
                (activations + temporaries) * (1 - 1 / times) - 1,
                f"or take a smaller batch: data.batch_size={facts.rows // times}",
            )
        )
    elif activations + temporaries > over and facts.axes.get("tensor", 1) == 1 and facts.devices > 1:
        found.append(
            (
                (activations + temporaries) / 2,
                "a device has one row already: split within rows too, such as mesh.axes.tensor=4 beside fsdp=-1, "
                "or take a shorter data.seq_len",
            )
        )
    optimizer = facts.groups.get("optimizer") or 0
    if optimizer > 1.5 * (facts.groups.get("params") or 0):
        found.append((optimizer * 0.7, 'keep less in the optimizer: optim.kind="eight_bit_adamw" or "adafactor"'))
    found.sort(key=lambda each: -each[0])
    lines = [text for _, text in found]
    short = f"it needs {_gb(facts.total)} a device and has {_gb(facts.hbm_bytes)}, of which a plan fills {HEADROOM:.0%}"
    factor = facts.total / (HEADROOM * facts.hbm_bytes)
    if factor < 1:
        return ("the compiler needs more than was predicted, and more than a device has", *lines, "or more devices")
    return (short, *lines, f"or take about {factor:.1f} times the devices, at the same batch")


def _gb(amount: float) -> str:
    return f"{amount / 1e9:.2f} GB"


def split_share(params: Any) -> float:
    """The share of the parameters' bytes that one device holds."""
    import math

    import jax

    leaves = jax.tree.leaves(params)
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    own = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    return own / whole if whole else 1.0
