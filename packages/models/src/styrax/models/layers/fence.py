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

_SAME = {"cuda": "gpu", "rocm": "gpu"}


def platform(*arrays: Shaped[Array, "..."]) -> str:
    """Tell what the computation being traced will run on: "cpu", "tpu", "gpu".

    The mesh that is set (`jax.set_mesh`) says it, or that of the arrays. An array that was given to `jax.jit` on a
    mesh has that mesh in its type, and hands it on to what is computed from it. With neither it is the default
    backend, so a program that is compiled on one platform for another has to have one of them; `in_shardings` of
    `jax.jit` alone tells nobody before it is too late.

    Args:
        arrays: Of the computation.

    Example:
        >>> platform(jax.numpy.ones(2))
        'cpu'
    """
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(each).sharding.mesh for each in arrays)]
    found = [mesh.abstract_device.platform for mesh in meshes if mesh.abstract_device is not None]
    name = found[0] if found else jax.default_backend()
    return _SAME.get(name, name)


def on_cpu(*arrays: Shaped[Array, "..."]) -> bool:
    """Tell whether the computation being traced is for a CPU; see `platform`.

    Args:
        arrays: Of the computation.
    """
    return platform(*arrays) == "cpu"


def fence(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    r"""Return `x`, computed once and kept apart from its consumers if on a CPU.

    $f(x) = x$ and $\partial f / \partial x = I$, with the cotangent fenced too.

    Args:
        x: Activations.

    Example:
        >>> float(fence(jax.numpy.float32(3.0))), float(jax.grad(fence)(3.0))
        (3.0, 1.0)
    """
    return jax.lax.optimization_barrier(x) if on_cpu(x) else x


def rows(x: Shaped[Array, "batch seq embed"]) -> Shaped[Array, "..."]:
    """Merge batch and sequence if on a CPU.

    Args:
        x: Activations.

    Returns:
        `[batch * seq, embed]` on a CPU, `x` elsewhere.
    """
    return x.reshape(-1, x.shape[-1]) if on_cpu(x) else x
