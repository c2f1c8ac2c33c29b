"""The recurrence of the gated delta rule, step by step and in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float

#: Tokens of a chunk; what is written of a chunk is the square of it.
CHUNK = 64
_FEWEST = 8  # steps that are not worth a chunk
_BLOCK = 8


def delta_rule(
    query: Float[Array, "batch seq heads k_dim"],
    key: Float[Array, "batch seq heads k_dim"],
    value: Float[Array, "batch seq heads v_dim"],
    log_decay: Float[Array, "batch seq heads"],
    rate: Float[Array, "batch seq heads"],
    memory: Float[Array, "batch heads k_dim v_dim"],
    *,
    fresh: Bool[Array, "batch seq"],
    chunk: int = CHUNK,
) -> tuple[Float[Array, "batch seq heads v_dim"], Float[Array, "batch heads k_dim v_dim"]]:
    r"""Compute $S_t = \alpha_t (I - \beta_t k_t k_t^\top) S_{t-1} + \beta_t k_t v_t^\top$ and $o_t = S_t^\top q_t$.

    In float32. Long rows are cut into chunks, within which all steps are products of matrices: with
    $\gamma_t = \alpha_1 \cdots \alpha_t$ and $A_{ts} = \beta_t (\gamma_t / \gamma_s)\, k_t^\top k_s$ for $s < t$, the
    steps of a chunk write $U = (I + A)^{-1} \mathrm{diag}(\beta) (V - \mathrm{diag}(\gamma) K S_0)$, so that
    $o_t = \gamma_t S_0^\top q_t + \sum_{s \le t} (\gamma_t / \gamma_s) (q_t^\top k_s)\, u_s$.

    Source: Yang et al., "Gated Delta Networks" (2024), equation 10 and section 3.3.

    Args:
        query: $q$.
        key: $k$, of length 1.
        value: $v$.
        log_decay: $\ln \alpha$, not above 0.
        rate: $\beta$, in [0, 1].
        memory: $S_0$.
        fresh: Where a document begins: its $S_{t-1}$ is 0.
        chunk: Tokens of a chunk.

    Returns:
        $o$ and the last $S$, float32.

    Example:
        >>> one = jnp.ones((1, 1, 1, 1))
        >>> given = one, one, 3 * one, 0 * one[..., 0], one[..., 0], jnp.zeros((1, 1, 1, 1))
        >>> out, memory = delta_rule(*given, fresh=jnp.zeros((1, 1), bool))
        >>> float(out[0, 0, 0, 0]), float(memory[0, 0, 0, 0])
        (3.0, 3.0)
    """
    query, key, value, log_decay, rate, memory = (
        each.astype("float32") for each in (query, key, value, log_decay, rate, memory)
    )
    log_decay = jnp.where(fresh[..., None], 0.0, log_decay)
    if query.shape[1] <= _FEWEST:
        return by_steps(query, key, value, log_decay, rate, memory, fresh)
    return _by_chunks(query, key, value, log_decay, rate, memory, fresh, min(chunk, query.shape[1]))


def by_steps(
    query: Array, key: Array, value: Array, log_decay: Array, rate: Array, memory: Array, fresh: Array
) -> tuple[Array, Array]:
    """Compute the same one step after another: slow for long rows, and a yardstick for them."""

    def step(memory: Array, each: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, log_alpha, beta, begins = each
        alpha = jnp.where(begins[:, None], 0.0, jnp.exp(log_alpha))
        memory = memory * alpha[..., None, None]
        found = jnp.einsum("bhkv,bhk->bhv", memory, k)
        memory = memory + jnp.einsum("bhk,bhv->bhkv", k, (v - found) * beta[..., None])
        return memory, jnp.einsum("bhkv,bhk->bhv", memory, q)

    steps = tuple(each.swapaxes(0, 1) for each in (query, key, value, log_decay, rate, fresh))
    memory, out = jax.lax.scan(step, memory, steps)
    return out.swapaxes(0, 1), memory


def _by_chunks(
    query: Array, key: Array, value: Array, log_decay: Array, rate: Array, memory: Array, fresh: Array, chunk: int
) -> tuple[Array, Array]:
    batch, seq = query.shape[:2]
    count = -(-seq // chunk)

    def cut(x: Array) -> Array:
        """`[batch, seq, heads, ...] -> [count, batch, heads, chunk, ...]`; what is added changes nothing."""
        x = jnp.pad(x, [(0, 0), (0, count * chunk - seq), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(batch, count, chunk, *x.shape[2:]), (1, 3), (0, 2))

    query, key, value, log_decay, rate = (cut(each) for each in (query, key, value, log_decay, rate))
    document = jnp.cumsum(cut(fresh[..., None]), axis=-1)  # 0: goes on from the chunk before
    total = jnp.cumsum(log_decay, axis=-1)
    before = jnp.tril(jnp.ones((chunk, chunk), bool))
    # Outside of the mask the difference may be large: it must not become inf, whose gradient is NaN.
    same = before & (document[..., :, None] == document[..., None, :])
    ratio = jnp.where(same, jnp.exp(jnp.where(same, total[..., :, None] - total[..., None, :], 0.0)), 0.0)
    gamma = jnp.where(document == 0, jnp.exp(total), 0.0)
    last = document[..., -1:] == document
    left = jnp.where(last, jnp.exp(jnp.where(last, total[..., -1:] - total, 0.0)), 0.0)

    mixed = jnp.einsum("nbhtk,nbhsk->nbhts", key, key) * ratio * rate[..., None]
    wanted = jnp.concatenate([value, key * gamma[..., None]], axis=-1) * rate[..., None]
    solved = _solve(jnp.tril(mixed, -1), wanted)
    written, read = jnp.split(solved, [value.shape[-1]], axis=-1)
    seen = jnp.einsum("nbhtk,nbhsk->nbhts", query, key) * ratio

    def step(memory: Array, each: tuple[Array, ...]) -> tuple[Array, Array]:
        written, read, seen, query, kept, fading = each
        new = written - jnp.einsum("bhtk,bhkv->bhtv", read, memory)
        out = jnp.einsum("bhtk,bhkv->bhtv", query, memory) + jnp.einsum("bhts,bhsv->bhtv", seen, new)
        memory = memory * fading[..., None, None] + jnp.einsum("bhtk,bhtv->bhkv", kept, new)
        return memory, out

    kept, query = key * left[..., None], query * gamma[..., None]
    memory, out = jax.lax.scan(step, memory, (written, read, seen, query, kept, gamma[..., -1]))
    return jnp.moveaxis(out, (0, 2), (1, 3)).reshape(batch, count * chunk, *out.shape[2:3], -1)[:, :seq], memory


def _solve(
    below: Float[Array, "... rows rows"], wanted: Float[Array, "... rows width"]
) -> Float[Array, "... rows width"]:
    """Solve `(I + below) x = wanted`, with nothing on and above the diagonal: in blocks of rows, all by products.

    Within a block it is `x = (I - b)(I + b^2)(I + b^4) wanted`. The powers cancel one another, so that larger blocks
    would lose digits; where all keys are equal, those of 8 rows lose three bits.
    """
    parts: list[Array] = []
    for start in range(0, below.shape[-1], _BLOCK):
        rows = slice(start, start + _BLOCK)
        x, power = wanted[..., rows, :], -below[..., rows, rows]
        if parts:
            x = x - below[..., rows, :start] @ jnp.concatenate(parts, axis=-2)
        for _ in range((min(_BLOCK, x.shape[-2]) - 1).bit_length()):
            x, power = x + power @ x, power @ power
        parts.append(x)
    return jnp.concatenate(parts, axis=-2)
