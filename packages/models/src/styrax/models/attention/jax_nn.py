"""Attention by `jax.nn.dot_product_attention`, which XLA compiles as it likes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

    from styrax.models.attention.call import Call
    from styrax.models.layers.mask import Mask


def supports(call: Call) -> list[str]:
    """Say what it cannot do of a call.

    Args:
        call: What is asked for.
    """
    return call.expects(softcap=[None], sinks=[False], value_dim=[call.head_dim])


def attend(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    value: Float[Array, "batch kv_heads keys head_dim"],
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    implementation: Any = "xla",
) -> Float[Array, "batch seq heads head_dim"]:
    """Attend; see `styrax.models.layers.attend.attend`.

    Args:
        query: And the others: as there; `softcap` and `sinks` are `None`.
        implementation: As for `jax.nn.dot_product_attention`.
    """
    del softcap, sinks
    key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
    arguments = arguments_for(mask)
    return jax.nn.dot_product_attention(query, key, value, scale=scale, implementation=implementation, **arguments)


def arguments_for(mask: Mask) -> dict[str, Any]:
    """Say in the arguments of `jax.nn.dot_product_attention` which pairs are allowed.

    Args:
        mask: In parts, or a table of pairs.

    Returns:
        `local_window_size` counts the keys before a query, without its own, so a window of $W$ is $W - 1$. The table
        is left out if the other two say all.

    Example:
        >>> from styrax.models.layers.mask import document_mask
        >>> place = jax.numpy.arange(4)[None]
        >>> arguments_for(document_mask(4).within(place, place, window=2))
        {'is_causal': True, 'local_window_size': (1, 0)}
    """
    pattern = mask.pattern
    if pattern is None:
        return {"mask": mask.allowed[:, None]}
    arguments: dict[str, Any] = {"is_causal": pattern.causal}
    if pattern.window is not None:
        # Without causality a window limits only what is before; `jax.nn` knows that as no limit on the right.
        arguments["local_window_size"] = (pattern.window - 1, 0 if pattern.causal else mask.allowed.shape[-1])
    if pattern.segments is not None or pattern.chunk is not None:
        arguments["mask"] = mask.allowed[:, None]
    return arguments
