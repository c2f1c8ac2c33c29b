"""Which experts a token goes to, with which weights, and how evenly all tokens do."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from styrax.models.layers.linear import normal
from styrax.models.layers.meshes import mesh_of
from styrax.models.layers.norm import unit
from styrax.models.moe_config import Groups, MoE

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float, Int, Key

    from styrax.core import Policy


class Buffer(nnx.Variable):
    """An array of a model that no gradient trains; it is saved and loaded with the parameters."""


class Choice(NamedTuple):
    """The experts of each token.

    Attributes:
        experts: `[tokens, k]`, the best first; equal ones by number. `num_experts` at padding.
        weights: `[tokens, k]` float32, 0 at padding.
    """

    experts: Int[Array, "tokens k"]
    weights: Float[Array, "tokens k"]


class RouterStats(NamedTuple):
    """Sums over tokens, in float32: of each row, or of all.

    They are to be added over rows, micro-batches and devices, and divided at the end.

    Padding counts nowhere. Only `probs`, `z` and `entropy` carry a gradient.

    Attributes:
        tokens: How many tokens.
        load: `[experts]`, how many tokens chose each, those that found no place included.
        probs: `[experts]`, sums of the router's probabilities; scores that are sigmoids are divided by their sum.
        z: Sum of the squared logarithm of the sum of the exponentials of the logits.
        entropy: Sum of the entropies of the probabilities, in nats.
        dropped: How many choices found no place, in all rows together.
    """

    tokens: Float[Array, "..."]
    load: Float[Array, "... experts"]
    probs: Float[Array, "... experts"]
    z: Float[Array, "..."]
    entropy: Float[Array, "..."]
    dropped: Float[Array, "..."]


class Router(nnx.Module):
    """Scores every expert for every token and chooses; in float32 always.

    Attributes:
        kernel: `[dim, experts]`.
        bias: `[experts]`, of the logits, initially 0.
        correction: `[experts]` float32, initially 0; a `Buffer`, so that it is no `nnx.Param`.
        load: `[experts]` float32, tokens of each expert since the last update of the correction; a `Buffer`, if the
            config's `correction_rate` is not 0.
        scale: `[dim]`, of the normalised input, initially 1.
        expert_scale: `[experts]`, of the weights, initially 1.
    """

    def __init__(self, dim: int, config: MoE, *, std: float, policy: Policy, key: Key[Array, ""]):
        routing, experts = config.routing, config.num_experts
        self.kernel = nnx.Param(normal(key, (dim, experts), std, policy))
        if routing.bias:
            self.bias = nnx.Param(jnp.zeros(experts, policy.param_dtype))
        if routing.correction:
            self.correction = Buffer(jnp.zeros(experts, "float32"))
        if routing.correction_rate:
            self.load = Buffer(jnp.zeros(experts, "float32"))
        if routing.norm_eps is not None:
            self.scale = nnx.Param(jnp.ones(dim, policy.param_dtype))
        if routing.expert_scale:
            self.expert_scale = nnx.Param(jnp.ones(experts, policy.param_dtype))
        self.config = config

    def __call__(
        self, x: Float[Array, "tokens dim"], mask: Bool[Array, " tokens"] | None = None, rows: int | None = None
    ) -> tuple[Choice, RouterStats]:
        """Choose.

        Args:
            x: Any floating dtype; at padding, anything finite.
            mask: False at padding.
            rows: Cut the tokens into so many rows of equal length, and count in each; `None` counts in all.

        Returns:
            The choice, and the statistics with nothing dropped.
        """
        routing = self.config.routing
        logits = self._logits(x.astype("float32"))
        scores = jax.nn.softmax(logits) if routing.score == "softmax" else jax.nn.sigmoid(logits)
        ranking = jax.lax.stop_gradient(self._ranking(logits, scores))
        experts = best(ranking, self.config.experts_per_token)[1]
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if routing.renormalise:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)  # sigmoids can all be 0
        weights = weights * routing.scale
        if routing.expert_scale:
            weights = weights * self.expert_scale[...].astype("float32")[experts]
        if mask is not None:
            experts = jnp.where(mask[:, None], experts, self.config.num_experts)
            weights = jnp.where(mask[:, None], weights, 0)
        return Choice(experts, weights), self._stats(logits, scores, experts, mask, rows)

    def _logits(self, x: Float[Array, "tokens dim"]) -> Float[Array, "tokens experts"]:
        routing = self.config.routing
        if routing.norm_eps is not None:
            x = unit(x, routing.norm_eps) * self.scale[...].astype("float32") * x.shape[-1] ** -0.5
        # Accelerators round the factors of a float32 product unless told otherwise, and a choice can turn on it.
        logits = jnp.matmul(x, self.kernel[...].astype("float32"), precision="highest")
        return logits + self.bias[...].astype("float32") if routing.bias else logits

    def _ranking(
        self, logits: Float[Array, "tokens experts"], scores: Float[Array, "tokens experts"]
    ) -> Float[Array, "tokens experts"]:
        routing = self.config.routing
        if not routing.correction and routing.groups is None:
            return logits  # the same order as of the scores, of which many round to 0 or 1
        if routing.correction:
            scores = scores + self.correction[...]
        return scores if routing.groups is None else _of_groups(scores, routing.groups)

    def _stats(
        self,
        logits: Float[Array, "tokens experts"],
        scores: Float[Array, "tokens experts"],
        experts: Int[Array, "tokens k"],
        mask: Bool[Array, " tokens"] | None,
        rows: int | None,
    ) -> RouterStats:
        real = jnp.ones(len(logits), "float32") if mask is None else mask.astype("float32")
        row = jnp.arange(len(logits)) // (len(logits) // (rows or 1))
        load = jnp.zeros((rows or 1, self.config.num_experts), "int32").at[row[:, None], experts].add(1, mode="drop")

        def summed(x: Float[Array, "tokens ..."]) -> Float[Array, "..."]:
            return x.sum(0) if rows is None else x.reshape(rows, -1, *x.shape[1:]).sum(1)

        if self.config.routing.score == "softmax":
            log_probs = jax.nn.log_softmax(logits)
        else:
            log_scores = jax.nn.log_sigmoid(logits)
            log_probs = log_scores - jax.nn.logsumexp(log_scores, axis=-1, keepdims=True)
        probs = jnp.exp(log_probs)
        entropy = -(probs * log_probs).sum(-1)
        z = jnp.square(jax.nn.logsumexp(logits, axis=-1))
        return RouterStats(
            tokens=summed(real),
            load=(load[0] if rows is None else load).astype("float32"),
            probs=summed(real[:, None] * probs),
            z=summed(real * z),
            entropy=summed(real * entropy),
            dropped=jnp.zeros((), "float32"),
        )

    def corrected(self) -> None:
        r"""Move the correction, $b_e \leftarrow b_e + \gamma\, \mathrm{sign}(\bar n - n_e)$, and count anew.

        $n$ is `load`, and $\gamma$ the config's `correction_rate`. Arrays may have leading axes, of layers.

        Source: DeepSeek-AI, "DeepSeek-V3" (2024), section 2.1.2.
        """
        load = self.load[...]
        step = jnp.sign(load.mean(-1, keepdims=True) - load)
        self.correction[...] = self.correction[...] + self.config.routing.correction_rate * step
        self.load[...] = jnp.zeros_like(load)


def balance_loss(stats: RouterStats, load: Float[Array, "... experts"] | None = None) -> Float[Array, ""]:
    r"""$E \sum_e f_e P_e$, with $f_e$ the part of all choices that fell on expert $e$, $P_e$ its mean probability.

    It is 1 when both are even, whatever the number of experts per token. (transformers does not divide by that
    number, so its loss is as many times larger.)

    The loss of a whole batch is not the mean of its parts' losses, since each part would have an $f$ of its own.
    So add up `stats` over devices before this function is called, and for micro-batches, which are
    differentiated one by one, pass the `load` of the whole batch: $f$ has no gradient, the rest is a mean over
    tokens, and then micro-batches give exactly the gradient of the whole. Where that load is not known yet, that
    of the last step will do.

    Source: Fedus et al., "Switch Transformers" (2021), equation 4, without its coefficient; Qiu et al., "Demons in
    the Detail" (2025), for the load of the whole batch.

    Args:
        stats: From a `Router`. With leading axes, such as one of layers, the result is the mean over them.
        load: Tokens per expert for $f$; none means `stats.load`.

    Example:
        >>> even = jnp.full(4, 8.0)
        >>> zero = jnp.zeros(())
        >>> float(balance_loss(RouterStats(jnp.float32(32.0), even, even, zero, zero, zero)))
        1.0
    """
    load = jax.lax.stop_gradient(stats.load if load is None else load)
    share = load / jnp.maximum(load.sum(-1, keepdims=True), 1)
    return jnp.mean(load.shape[-1] * (share * stats.probs).sum(-1) / jnp.maximum(stats.tokens, 1))


def router_z_loss(stats: RouterStats) -> Float[Array, ""]:
    r"""$\frac{1}{T} \sum_t (\ln \sum_e \exp z_{t,e})^2$: keeps the logits $z$ of $T$ tokens small.

    Source: Zoph et al., "ST-MoE" (2022), equation 5, without its coefficient.

    Args:
        stats: From a `Router`. With leading axes, the result is the mean over them.

    Example:
        >>> zero, one = jnp.zeros(()), jnp.ones(1)
        >>> float(router_z_loss(RouterStats(jnp.float32(2.0), one, one, jnp.float32(3.0), zero, zero)))
        1.5
    """
    return jnp.mean(stats.z / jnp.maximum(stats.tokens, 1))


def best(x: Float[Array, "... n"], k: int) -> tuple[Float[Array, "... k"], Int[Array, "... k"]]:
    """Find the largest values and where they are, the first of equal ones first.

    The compiler knows no other way to split `jax.lax.top_k` over devices than to gather all rows on each; on a mesh the
    largest is taken `k` times.

    Args:
        x: Rows; without NaN.
        k: How many.

    Example:
        >>> [each.tolist() for each in best(jnp.array([[1.0, 3.0, 3.0]]), 2)]
        [[[3.0, 3.0]], [[1, 2]]]
    """
    if all(size == 1 for size in mesh_of(x).free.values()):
        values, places = jax.lax.top_k(x, k)
        return values, places
    left, values, places = x, [], []
    for _ in range(k):
        place = jnp.argmax(left, axis=-1)
        here = jnp.arange(x.shape[-1]) == place[..., None]
        values.append(jnp.max(left, axis=-1))
        places.append(place)
        left = jnp.where(here, -jnp.inf, left)
    return jnp.stack(values, axis=-1), jnp.stack(places, axis=-1)


def _of_groups(scores: Float[Array, "tokens experts"], groups: Groups) -> Float[Array, "tokens experts"]:
    grouped = scores.reshape(len(scores), groups.num, -1)
    each = grouped.max(-1) if groups.score == "max" else best(grouped, 2)[0].sum(-1)
    chosen = best(each, groups.kept)[1]
    kept = (chosen[:, :, None] == jnp.arange(groups.num)).any(1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
