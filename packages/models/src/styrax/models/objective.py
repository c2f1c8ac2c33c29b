"""All that a decoder is trained by, and what follows a step of training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from styrax.models.block import Block, times
from styrax.models.layers.dropout import of_rows
from styrax.models.layers.fence import rows
from styrax.models.losses import LossTerm, next_token, routers
from styrax.models.mtp import MTP, ahead
from styrax.models.stack import recomputed, remat_of, unstack

if TYPE_CHECKING:
    from flax import nnx
    from jax import Array
    from jaxtyping import Float, Int

    from styrax.models.decoder import Decoder


def losses(
    model: Decoder,
    tokens: Int[Array, "batch seq"],
    targets: Int[Array, "batch seq"],
    mask: Float[Array, "batch seq"],
    *,
    positions: Int[Array, "batch seq"] | None,
    segment_ids: Int[Array, "batch seq"] | None,
    rngs: nnx.Rngs | None,
    row_ids: Int[Array, " batch"] | None,
) -> dict[str, LossTerm]:
    """Compute every part of the objective; see `Decoder.losses`.

    Args:
        model: Whose.
        tokens: And all the others: as there.
    """
    arch, params = model.config.arch, model.head_params()
    places: dict[str, Any] = {"positions": positions, "segment_ids": segment_ids}
    drawn: dict[str, Any] = {"rngs": rngs, "row_ids": row_ids}
    found = model.hidden(model.blocks(), tokens, **drawn, **places)
    size = {"vocab_size": model.vocab_size, "z_loss": model.config.scales.z_loss}
    terms, reports = next_token(model.head_of, params, found.x, targets, mask, **size), found.reports
    if depth := arch.head.mtp:
        further = []
        for name, (x, aims, kept), report in _further(model, found.x, tokens, targets, mask, **drawn, **places):
            loss = next_token(model.head_of, params, x, aims, kept, vocab_size=model.vocab_size)["loss"]
            terms[name] = loss._replace(coef=arch.head.mtp_coef / depth)
            further += [] if report is None else [report]
        reports += (jax.tree.map(lambda *each: jnp.stack(each), *further),) if further else ()
    if arch.moe is None or not reports:
        return terms
    if arch.moe.routing.correction_rate:
        for router, stats in zip(_routers(model), reports, strict=True):
            load = jax.lax.stop_gradient(stats.load)  # [layers, rows, experts]
            router.load[...] = router.load[...] + load.sum(1).reshape(router.load.shape)
    return terms | routers(reports, arch.moe)


def end_step(model: Decoder) -> None:
    """Move what follows from counts of a whole batch; see `Decoder.end_step`.

    Args:
        model: Whose.
    """
    moe = model.config.arch.moe
    if moe is not None and moe.routing.correction_rate:
        for router in _routers(model):
            router.corrected()


def _routers(model: Decoder) -> list[Any]:
    """Give the routers of all stacks with experts, and those of `mtp`, in the order of the reports."""
    stacks = (model.layers,) if isinstance(model.layers, Block) else tuple(model.layers)
    found = [stack.moe.router for stack in stacks if stack.kind.sparse]
    further = model.config.arch.head.mtp and model.mtp.block.kind.sparse
    return [*found, model.mtp.block.moe.router] if further else found


def _further(
    model: Decoder, x: Array, tokens: Array, targets: Array, mask: Array, *, rngs: Any, row_ids: Any, **places: Any
) -> Iterator[tuple[str, tuple[Array, Array, Array], Any]]:
    """Give, for each token beyond the next, the head's input with targets and mask, and the router's report."""
    config, segment_ids = model.config, places["segment_ids"]
    scope = model.scope(tokens, places["positions"], segment_ids, None)
    key = None
    if rngs is not None and config.dropout:
        key = of_rows(rngs.dropout(), jnp.arange(len(tokens)) if row_ids is None else row_ids)
    for number, each in enumerate(unstack(model.mtp)):
        known, aims, kept = ahead(number + 1, tokens, targets, mask, segment_ids)

        def look(each: MTP, x: Array, known: Array, layer: int = config.num_layers + 1 + number) -> Any:
            embedded = rows(times(config.scales.embed_scale, model.embed(known)))
            x, report = each(rows(x), embedded, scope=scope, layer=layer, key=key)
            return x.reshape(*tokens.shape, -1), each.norm(x).reshape(*tokens.shape, -1), report

        x, normed, report = recomputed(look, remat_of(config.remat), prevent_cse=True)(each, x, known)
        yield f"mtp_{number + 1}", (normed, aims, kept), report
