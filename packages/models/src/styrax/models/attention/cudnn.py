"""Attention by cuDNN's flash kernel, for NVIDIA GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from styrax.models.attention import jax_nn

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

    from styrax.models.attention.call import Call
    from styrax.models.layers.mask import Mask

_WIDTH_MULTIPLE = 8
# Compute capability -> the widest head that its kernels have.
_WIDEST = {(8, 0): 128, (9, 0): 256}


def supports(call: Call) -> list[str]:
    """Say what it cannot do of a call, as jax 0.10 and 0.12 and the GPU of this process, if there is one, have it.

    Args:
        call: What is asked for.
    """
    kinds = {"platform": ["gpu"], "dtype": ["bfloat16", "float16"]}
    problems = call.expects(**kinds, softcap=[None], sinks=[False], value_dim=[call.head_dim])
    problems += call.needs_pattern()
    capability, device = _device() if call.platform == "gpu" else (None, "")
    if capability is not None and capability < min(_WIDEST):
        problems.append(f"device: expected an NVIDIA GPU of compute capability 8.0 or more, got {device}")
    found = [width for least, width in _WIDEST.items() if capability is None or capability >= least]
    widest = max(found, default=128) if capability is not None else 128
    if call.head_dim % _WIDTH_MULTIPLE or call.head_dim > widest:
        problems.append(f"head_dim: expected a multiple of {_WIDTH_MULTIPLE} up to {widest}, got {call.head_dim}")
    if call.window is not None and not call.causal:
        problems.append(f"window: expected none without causal, got {call.window}")
    if (call.segments or call.chunk is not None) and (call.seq % 2 or call.keys % 2):
        problems.append(f"seq: expected an even number of tokens for documents or chunks, got {call.seq}")
    return problems


def attend(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    value: Float[Array, "batch kv_heads keys head_dim"],
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Attend; see `styrax.models.layers.attend.attend`.

    Documents and chunks are given as a table of pairs, which cuDNN adds to the scores piece by piece; the scores of
    all heads are never in memory.

    Args:
        query: And the others: as there; `softcap` and `sinks` are `None`.
    """
    del softcap, sinks
    return jax_nn.attend(query, key, value, mask, scale=scale, implementation="cudnn")


def _device() -> tuple[tuple[int, int] | None, str]:
    """Find the compute capability of the GPU of this process; (0, 0) for one that is not NVIDIA's."""
    try:
        device: Any = jax.local_devices(backend="gpu")[0]
    except RuntimeError:  # compiled ahead, for a GPU that is elsewhere
        return None, "none"
    text = str(getattr(device, "compute_capability", ""))
    parts = text.split(".")
    known = len(parts) == 2 and all(part.isdigit() for part in parts)
    return ((int(parts[0]), int(parts[1])) if known else (0, 0)), f"{device.device_kind} ({text or 'none'})"
