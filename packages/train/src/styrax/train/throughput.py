"""How fast a run is, and how much of what its devices can do it uses."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from typing import Any


class Pace:
    """Tokens a second, and how long a step takes, from the last steps that were not interrupted by anything."""

    def __init__(self, window: int = 50) -> None:
        self._gaps: deque[tuple[float, float]] = deque(maxlen=window)
        self._last: float | None = None

    def pause(self) -> None:
        """Do not count the time until the next step."""
        self._last = None

    def step(self, tokens: float, now: float) -> None:
        """Note that a step of so many tokens ended at ``now`` (seconds)."""
        if self._last is not None:
            self._gaps.append((now - self._last, tokens))
        self._last = now

    @property
    def tokens_per_second(self) -> float | None:
        """Over the window; None before two steps are known."""
        seconds = sum(gap for gap, _ in self._gaps)
        return sum(tokens for _, tokens in self._gaps) / seconds if seconds > 0 else None

    @property
    def seconds_per_step(self) -> float | None:
        """The median of the window; None before two steps are known."""
        return self.quantile(0.5)

    def quantile(self, share: float) -> float | None:
        """The time that this share of the window's steps stays within; None before two steps are known.

        >>> pace = Pace()
        >>> for now in (0.0, 1.0, 2.0, 3.0, 7.0):
        ...     pace.step(10.0, now)
        >>> pace.quantile(0.5), pace.quantile(0.9), pace.tokens_per_second
        (1.0, 4.0, 5.714285714285714)
        """
        gaps = sorted(gap for gap, _ in self._gaps)
        return gaps[min(len(gaps) - 1, int(len(gaps) * share))] if gaps else None


def model_flops(model: Any, *, vocab_size: int, length: int | None) -> dict[str, float] | None:
    """Floating-point operations that training needs per token, if the model's configuration can tell.

    Args:
        model: Configuration of the model; asked for ``train_flops_per_token(vocab_size=, length=)``.
        vocab_size: Of the tokenizer.
        length: Tokens per row.

    Returns:
        Two conventions: ``causal`` counts the pairs of tokens that see one another, about half of all pairs; ``full``
        counts all pairs, as most published figures do. None where it is not known.
    """
    ask = getattr(model, "train_flops_per_token", None)
    if ask is None or length is None:
        return None
    told = ask(vocab_size=vocab_size, length=length)
    return {name: float(told[name]) for name in ("causal", "full")}


def peak_flops(device_kind: str) -> float | None:
    """What a device can do at best, dense bfloat16 products a second, from a table with sources; None if unknown.

    A device that is not in the table has no peak: the nearest one's would make a utilisation that means nothing.
    """
    from styrax.train.plan import chips

    return chips.peak_flops(device_kind)


def utilisation(tokens_per_second: float | None, flops: float | None, peak: float | None, devices: int) -> float | None:
    """Model FLOPs utilisation: ``tokens/s * flops per token / (peak * devices)``; None if any of it is unknown.

    Source: Chowdhery et al. 2022 (PaLM), arXiv 2204.02311, appendix B. Recomputed activations do not count.

    >>> utilisation(1000.0, 6e9, 1e14, 2), utilisation(1000.0, 6e9, None, 2)
    (0.03, None)
    """
    if tokens_per_second is None or flops is None or not peak:
        return None
    return tokens_per_second * flops / (peak * devices)


def machine() -> dict[str, Any]:
    """The devices of this run: kind, number, and peak of each; None where that is not known."""
    import jax

    device = jax.devices()[0]
    return {
        "device_kind": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "peak_flops": peak_flops(device.device_kind),
    }


def memory() -> dict[str, int | None]:
    """Most bytes that were in use so far: on the fullest device of this process, and in its own memory."""
    import jax

    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    known = [peak for peak in peaks if peak is not None]
    return {"device_bytes": max(known) if known else None, "host_bytes": host_bytes()}


def host_bytes() -> int | None:
    """Most bytes of memory that this process had; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def speeds(pace: Pace, facts: Mapping[str, Any]) -> dict[str, float]:
    """What events.jsonl keeps of the pace: only what is known.

    Args:
        pace: Of the last steps.
        facts: ``rows`` a step, ``flops_per_token`` by convention, and what :func:`machine` tells.
    """
    rate, step = pace.tokens_per_second, pace.seconds_per_step
    flops = facts.get("flops_per_token") or {}
    found: dict[str, float | None] = {
        "tokens_per_second": None if rate is None else round(rate, 1),
        "rows_per_second": None if step is None or not facts.get("rows") else facts["rows"] / step,
        "step_seconds": step,
        "step_seconds_p90": pace.quantile(0.9),
    }
    for name in ("causal", "full"):
        found[f"mfu_{name}"] = utilisation(rate, flops.get(name), facts.get("peak_flops"), facts.get("devices", 1))
    return {name: float(f"{value:.6g}") for name, value in found.items() if value is not None}
