"""Where the XLA:CPU compiler must not fuse.

XLA:CPU fuses elementwise work (norms, activations, residual sums) into its neighbours and computes it again
for every consumer; around matrix products that costs more than the products. Two things avoid it: an
optimization barrier at the seams of a block, and activations of rank 2, `[batch * seq, embed]`. Together
they make a training step about twice as fast. Other backends fuse well, and there both would only hinder
(a sharded sequence axis cannot be merged with the batch), so nothing is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Shaped


def on_cpu() -> bool:
    """Tell whether the computation being traced is for a CPU: the mesh in scope decides, or the default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (device.platform if device is not None else jax.default_backend()) == "cpu"


def fence(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    r"""Return `x`, computed once and kept apart from its consumers if on a CPU.

    $f(x) = x$ and $\partial f / \partial x = I$, with the cotangent fenced too.

    Args:
        x: Activations.

    Example:
        >>> float(fence(jax.numpy.float32(3.0))), float(jax.grad(fence)(3.0))
        (3.0, 1.0)
    """
    return jax.lax.optimization_barrier(x) if on_cpu() else x


def rows(x: Shaped[Array, "batch seq embed"]) -> Shaped[Array, "..."]:
    """Merge batch and sequence if on a CPU.

    Args:
        x: Activations.

    Returns:
        `[batch * seq, embed]` on a CPU, `x` elsewhere.
    """
    return x.reshape(-1, x.shape[-1]) if on_cpu() else x
