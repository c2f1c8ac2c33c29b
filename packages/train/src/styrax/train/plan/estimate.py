"""How long a step takes at best, and what a run then costs; what is not known stays None."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from styrax.train.plan.chips import Chip
from styrax.train.plan.collectives import Collective

DAY = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The least time of each part of a step, in seconds: what the chip's peak figures allow.

    Nothing reaches its peak, and parts overlap only so far: a step takes longer than the longest of these. Of good
    programs about half of the time is arithmetic.

    Attributes:
        compute: Arithmetic of a device over its peak, recomputation included.
        memory: Bytes to and from memory over its bandwidth.
        network: Bytes sent within a slice over the bandwidth of all of a chip's links.
        slices: Bytes sent between slices over the network that joins them.
    """

    compute: float | None
    memory: float | None
    network: float | None
    slices: float | None

    @property
    def seconds(self) -> float | None:
        """The longest part: none of them can be hidden behind itself. None if none is known."""
        known = [part for part in (self.compute, self.memory, self.network, self.slices) if part is not None]
        return max(known) if known and self.compute is not None else None

    @property
    def bound(self) -> str | None:
        """Name of the longest part."""
        parts = {name: getattr(self, name) for name in ("compute", "memory", "network", "slices")}
        known = {name: value for name, value in parts.items() if value is not None}
        return max(known, key=known.__getitem__) if known and self.compute is not None else None


def roofline(
    chip: Chip | None,
    *,
    flops: float | None,
    bytes_accessed: float | None,
    exchanged: Sequence[Collective] | None,
    across: Sequence[str] = (),
) -> Roofline:
    """Work out the parts.

    Args:
        chip: Peak figures; None for an accelerator that is not known.
        flops: Of a device and a step.
        bytes_accessed: Likewise.
        exchanged: What devices send one another; None if it is not known.
        across: Mesh axes that go over slices.

    >>> from styrax.train.plan.chips import chip_named
    >>> roofline(chip_named("v5p"), flops=459e12, bytes_accessed=None, exchanged=()).compute
    1.0
    >>> roofline(None, flops=1.0, bytes_accessed=1.0, exchanged=()).seconds is None
    True
    """
    if chip is None:
        return Roofline(compute=None, memory=None, network=None, slices=None)
    within, between = (0.0, 0.0) if exchanged is not None else (None, None)
    for each in exchanged or ():
        outside = bool(set((each.axes or "").split("+")) & set(across))
        if each.wire_bytes is None:
            within, between = (within, None) if outside else (None, between)
        elif outside and between is not None:
            between += each.wire_bytes
        elif not outside and within is not None:
            within += each.wire_bytes

    def over(amount: float | None, rate: float | None) -> float | None:
        return None if amount is None or rate is None else amount / (rate / chip.devices)

    return Roofline(
        compute=over(flops, chip.flops),
        memory=over(bytes_accessed, chip.hbm_bandwidth),
        network=over(within, chip.ici_bandwidth),
        slices=over(between, chip.dcn_bandwidth),
    )


@dataclass(frozen=True, kw_only=True)
class Journey:
    """A whole run, at the least time of a step and at shares of the peak that good runs reach.

    Attributes:
        tokens: In all.
        steps: Of this batch.
        days: At best, by the roofline.
        days_at_half: If half of the chips' peak goes into the model's arithmetic.
        chip_hours: At half of the peak.
        cost: At half of the peak, in the currency of the price.
    """

    tokens: float
    steps: int
    days: float | None
    days_at_half: float | None
    chip_hours: float | None
    cost: float | None


def journey(
    *,
    tokens: float,
    tokens_per_step: int,
    step_seconds: float | None,
    flops_per_token: float | None,
    peak: float | None,
    chips: int,
    price: float | None,
) -> Journey:
    """Work out a run.

    Args:
        tokens: In all.
        tokens_per_step: Of the whole batch.
        step_seconds: The least time of a step.
        flops_per_token: Of the model, without recomputation.
        peak: Operations a second of a chip.
        chips: How many.
        price: Of one chip for an hour.

    >>> run = journey(tokens=1e6, tokens_per_step=1000, step_seconds=86.4, flops_per_token=1e3, peak=1e6, chips=1,
    ...     price=2.0)
    >>> run.steps, run.days, round(run.days_at_half, 4), run.cost is not None
    (1000, 1.0, 0.0231, True)
    """
    steps = -(-int(tokens) // tokens_per_step)
    half = None if flops_per_token is None or peak is None else tokens * flops_per_token / (peak * chips * 0.5) / DAY
    hours = None if half is None else half * 24 * chips
    return Journey(
        tokens=tokens,
        steps=steps,
        days=None if step_seconds is None else steps * step_seconds / DAY,
        days_at_half=half,
        chip_hours=hours,
        cost=None if hours is None or price is None else hours * price,
    )
