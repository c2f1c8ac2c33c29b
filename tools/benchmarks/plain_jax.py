"""The quickstart's model and step written by hand in plain JAX: no styrax, no Flax, no Optax.

It is the yardstick of ``train_overhead.py`` and the reference of ``tests/test_reference_curve.py``: a pre-norm
decoder (RMSNorm, rotary embeddings, grouped-query attention, SwiGLU, tied head), mean cross-entropy over the tokens
that count, clipping by the global norm, AdamW with decoupled decay on matrices, warm-up and cosine. One layer
is one dict in a list, the layers are unrolled, and on the CPU the activations are ``[batch * seq, embed]`` with an
identity fence around each operation, which is the fastest form for XLA:CPU that is known to us.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Shape(NamedTuple):
    """Sizes of the decoder."""

    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    theta: float = 10_000.0
    eps: float = 1e-5


@jax.custom_vjp
def fence(x):
    """Identity that XLA does not fuse across, forward and backward."""
    return jax.lax.optimization_barrier(x)


fence.defvjp(lambda x: (jax.lax.optimization_barrier(x), None), lambda _, g: (jax.lax.optimization_barrier(g),))


def rms_norm(x, scale, eps):
    """x / rms(x) * scale, in float32."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps) * scale).astype(x.dtype)


def rotate(x, cos, sin):
    """Rotary embedding of [B, T, H, D] by halves."""
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(q, k, v, allowed):
    """Grouped-query attention: q [B, T, H, D], k and v [B, T, K, D], allowed [B, T, T]."""
    batch, length, heads, width = q.shape
    groups = heads // k.shape[2]
    q = q.reshape(batch, length, k.shape[2], groups, width)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k).astype(jnp.float32) / math.sqrt(width)
    scores = jnp.where(allowed[:, None, None], scores, -jnp.inf)
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True)))
    weights = (weights / jnp.sum(weights, -1, keepdims=True)).astype(v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(batch, length, heads * width)


def forward(params, batch, shape: Shape, wrap: Callable[[Any], Any] = fence, remat: bool = False):
    """Logits [B * T, V] of a packed batch."""
    tokens, positions, segments = batch["tokens"], batch["positions"], batch["segment_ids"]
    rows, length = tokens.shape
    angle = positions[..., None] * shape.theta ** (-jnp.arange(shape.head_dim // 2) * 2 / shape.head_dim)
    cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
    same = (segments[:, :, None] == segments[:, None, :]) & jnp.tri(length, dtype=bool)

    def block(x, layer):
        h = wrap(rms_norm(x, layer["attn_norm"], shape.eps))
        q, k, v = (wrap(h @ layer[name]).reshape(rows, length, -1, shape.head_dim) for name in ("q", "k", "v"))
        y = attention(rotate(q, cos, sin), rotate(k, cos, sin), v, same).reshape(rows * length, -1)
        x = wrap(x + wrap(y) @ layer["o"])
        h = wrap(rms_norm(x, layer["mlp_norm"], shape.eps))
        a = wrap(jax.nn.silu(wrap(h @ layer["gate"])) * wrap(h @ layer["up"]))
        return wrap(x + a @ layer["down"])

    if remat:
        block = jax.checkpoint(block)
    x = params["embed"][tokens].reshape(rows * length, shape.embed)
    for layer in params["layers"]:
        x = block(x, layer)
    return wrap(rms_norm(x, params["norm"], shape.eps)) @ params["embed"].T


def loss(params, batch, shape: Shape, wrap=fence, remat=False):
    """Mean cross-entropy in nats over the tokens that count."""
    logits = forward(params, batch, shape, wrap, remat)
    targets, mask = batch["targets"].reshape(-1), batch["loss_mask"].reshape(-1)
    nll = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[:, None], -1)[:, 0]
    return jnp.sum(nll * mask) / jnp.sum(mask)


class Adam(NamedTuple):
    """First and second moments, and the number of updates done."""

    m: Any
    v: Any
    count: Any


class Hyper(NamedTuple):
    """Optimizer settings; ``warmup`` and ``steps`` in steps."""

    peak: float
    warmup: int
    steps: int
    final: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.1
    clip: float = 1.0


def learning_rate(count, hyper: Hyper):
    """Linear warm-up from 1/warmup, then cosine to ``final`` of the peak."""
    rise = (count + 1) / hyper.warmup
    part = jnp.clip((count - hyper.warmup) / max(hyper.steps - hyper.warmup, 1), 0, 1)
    fall = hyper.final + (1 - hyper.final) * 0.5 * (1 + jnp.cos(jnp.pi * part))
    return hyper.peak * jnp.where(count < hyper.warmup, rise, fall)


def adam_init(params):
    """Zero moments."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    return Adam(zeros, jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))


def make_step(shape: Shape, hyper: Hyper, decayed: Any, wrap=fence, remat: bool = False):
    """The donated step: (params, adam, batch) -> (params, adam, loss, gradient norm)."""

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, adam, batch):
        value, grads = jax.value_and_grad(loss)(params, batch, shape, wrap, remat)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        scale = jnp.minimum(1.0, hyper.clip / norm)
        count = adam.count + 1
        rate = learning_rate(adam.count, hyper)
        c1, c2 = 1 - hyper.b1**count, 1 - hyper.b2**count

        def update(p, g, m, v, decays):
            g = g * scale
            m = hyper.b1 * m + (1 - hyper.b1) * g
            v = hyper.b2 * v + (1 - hyper.b2) * g * g
            u = (m / c1) / (jnp.sqrt(v / c2) + hyper.eps) + (hyper.decay * p if decays else 0.0)
            return p - rate * u, m, v

        out = jax.tree.map(update, params, grads, adam.m, adam.v, decayed)
        params, m, v = (jax.tree.map(lambda _, o, i=i: o[i], params, out) for i in range(3))
        return params, Adam(m, v, count), value, norm

    return step


def from_styrax(params: dict[str, Any], layers: int) -> dict[str, Any]:
    """The same numbers in this file's layout: one dict a layer instead of stacked arrays."""
    stack = params["layers"]
    names = {name: stack["attn"][name]["kernel"] for name in ("q", "k", "v", "o")}
    names |= {name: stack["mlp"][name]["kernel"] for name in ("gate", "up", "down")}
    names |= {name: stack[name]["scale"] for name in ("attn_norm", "mlp_norm")}
    each = [{name: jnp.array(value[i]) for name, value in names.items()} for i in range(layers)]
    return {
        "embed": jnp.array(params["embed"]["embedding"]),
        "norm": jnp.array(params["final_norm"]["scale"]),
        "layers": each,
    }


def decays(params: dict[str, Any]) -> dict[str, Any]:
    """Which arrays decay: the matrices of the layers."""
    return {
        "embed": False,
        "norm": False,
        "layers": [{name: x.ndim == 2 for name, x in layer.items()} for layer in params["layers"]],
    }
