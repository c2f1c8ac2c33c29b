"""What the layers of a decoder make of some tokens, in a few numbers for each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from styrax.core import UserError

if TYPE_CHECKING:
    from flax import nnx
    from jax import Array
    from jaxtyping import Bool, Float, Int

    from styrax.models.decoder import Decoder
    from styrax.models.layout import Kind


class Seen(NamedTuple):
    """What a block reports while it is watched.

    Attributes:
        report: Of its router, as else.
        stats: Name -> what `measure` gives: of what the `mixer` and the `mlp` add to the residual stream, and of the
            `residual` stream behind the block.
    """

    report: Any
    stats: dict[str, dict[str, Array]]


def activations(
    model: Decoder,
    tokens: Int[Array, "batch seq"],
    *,
    positions: Int[Array, "batch seq"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    rngs: nnx.Rngs | None = None,
    row_ids: Int[Array, " batch"] | None = None,
) -> dict[str, dict[str, Array]]:
    """Run a decoder up to its head, and measure what each layer makes.

    Layers are watched through what all blocks share. A call of the model itself has nobody watching, and compiles to
    the program that it would be if there was no such thing.

    Args:
        model: Whose.
        tokens: And all the others: as for `Decoder.losses`.

    Returns:
        Path -> what `measure` gives, a number for each layer of a stack, with the layers' numbers in the model as
        `layer`. `layers/attn` (or `delta`) and `layers/mlp` (or `moe`) are what these add to the residual stream, after
        their norm if they have one and before dropout; `layers` is the residual stream behind the block. Where layers
        are of several kinds, each stack has its own: `layers/0`, `layers/0/attn` and so on. `final_norm` is what the
        head takes.

    Raises:
        UserError: The model runs as a pipeline.

    Example:
        >>> from flax import nnx
        >>> from styrax.models import DecoderConfig
        >>> model = DecoderConfig(num_layers=3, embed_dim=8, num_heads=2).build(vocab_size=5, rngs=nnx.Rngs(0))
        >>> found = activations(model, jnp.array([[1, 2, 3]]))
        >>> sorted(found), found["layers/attn"]["rms"].shape
        (['final_norm', 'layers', 'layers/attn', 'layers/mlp'], (3,))
    """
    real = None if segment_ids is None else segment_ids != 0

    def watch(report: Any, **tensors: Array) -> Seen:
        return Seen(report, {name: measure(x, real) for name, x in tensors.items()})

    given: dict[str, Any] = {"positions": positions, "segment_ids": segment_ids, "rngs": rngs, "row_ids": row_ids}
    hidden, stacks = model.hidden(model.blocks(), tokens, watch=watch, **given), model.config.plan[0]
    if [type(seen) for seen in hidden.reports] != [Seen] * len(stacks):
        raise UserError("layers cannot be watched in a pipeline; leave the axis stage out of the mesh")
    found = {}
    for number, (each, seen) in enumerate(zip(stacks, hidden.reports, strict=True)):
        path = "layers" if model.config.uniform else f"layers/{number}"
        layer = jnp.array(each.layers)
        for name, stats in seen.stats.items():
            found[_path(path, name, each.kind)] = {**stats, "layer": layer}
    return {**found, "final_norm": measure(hidden.x, real)}


def measure(x: Float[Array, "*tokens embed"], real: Bool[Array, "batch seq"] | None = None) -> dict[str, Array]:
    r"""Measure activations, in float32.

    Args:
        x: Any; of all places together.
        real: Which places count; `None` counts all.

    Returns:
        `rms`, $\sqrt{\mathrm{mean}(x^2)}$, and `max`, $\max |x|$, of the numbers that are finite; `zeros` and
        `not_finite`, shares of all; `numbers`, how many count.

    Example:
        >>> found = measure(jnp.array([[3.0, 0.0], [-4.0, jnp.nan]]))
        >>> [round(float(found[name]), 3) for name in ("rms", "max", "zeros", "not_finite", "numbers")]
        [2.887, 4.0, 0.25, 0.25, 4.0]
    """
    x = x.astype("float32")
    kept = jnp.ones(x.shape, bool) if real is None else jnp.broadcast_to(real.reshape(*x.shape[:-1], 1), x.shape)
    finite = kept & jnp.isfinite(x)
    most = jnp.max(jnp.where(finite, jnp.abs(x), 0.0))
    scaled = jnp.where(finite, x / jnp.where(most > 0, most, 1.0), 0.0)  # the square of a large number has no float32
    numbers, of = jnp.sum(kept, dtype="float32"), jnp.sum(finite, dtype="float32")
    share = {"zeros": kept & (x == 0), "not_finite": kept & ~finite}
    return {
        "rms": most * jnp.sqrt(jnp.sum(scaled * scaled) / jnp.maximum(of, 1.0)),
        "max": most,
        **{name: jnp.sum(which, dtype="float32") / jnp.maximum(numbers, 1.0) for name, which in share.items()},
        "numbers": numbers,
    }


def _path(stack: str, name: str, kind: Kind) -> str:
    """Where in the tree of the model's parameters a tensor comes from."""
    match name:
        case "mixer":
            return f"{stack}/{'delta' if kind.mixer == 'delta' else 'attn'}"
        case "mlp":
            return f"{stack}/{'moe' if kind.sparse else 'mlp'}"
        case _:
            return stack
