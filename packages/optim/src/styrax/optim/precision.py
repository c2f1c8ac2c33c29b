"""Parameters in 16 bits whose small updates are not lost: a float32 copy, an exact split, chance, or compensation."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType

from styrax.core.config import Seed, mistakes
from styrax.core.errors import UserError, nearest
from styrax.core.tree import flatten, unflatten
from styrax.optim.evaluation import eval_params
from styrax.optim.guard import FusedTransformation, Verdict, check_floating, obeyed

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

Mode = Literal["master", "split", "stochastic", "kahan"]
LOW: tuple[Any, ...] = (jnp.dtype("bfloat16"), jnp.dtype("float16"))


class PrecisionState(NamedTuple):
    """State of `precision`.

    Attributes:
        inner: State of the optimizer, made for float32 parameters.
        seen: Applied updates so far; skipped steps do not count.
        rest: What the 16 bits of each parameter lack, a nested dictionary by path: its float32 value (`master`), an
            int16 (`split`), a number of its own dtype (`kahan`). Wider parameters are not in it, and `stochastic` has
            none.
    """

    inner: Any
    seen: Int[Array, ""]
    rest: dict[str, Any]

    def eval_params(self, params: Any) -> Any:
        """Derive the weights to evaluate from the float32 values; see `styrax.optim.eval_params`."""
        full = full_params(self, params)
        found = eval_params(self.inner, full)
        if found is full:
            return params
        found = flatten(found)
        return unflatten(params, {path: found[path].astype(w.dtype) for path, w in flatten(params).items()})


def precision(inner: optax.GradientTransformation, mode: Mode, *, seed: int = 0) -> FusedTransformation:
    """Train parameters of 16 bits with an optimizer that works on float32 values.

    Most updates are smaller than half a step of bfloat16, and rounding to nearest drops them. With `p` a parameter,
    `r` its part of the state, `W` the float32 value that both stand for, and `u` the update of `inner` for `W`:

        W' = W + u in float32;   q = W' in 16 bits;   update = q - p;   p' = p + update, rounded as `apply_updates` does

        mode         W               q                                     r'                          bytes of p and r
        master       r               W' to nearest, ties to even           W'                          6
        split        bits(p) + r     W' to nearest, ties away from zero    bits(W') - bits(p')         4
        stochastic   p               W' to one of its two neighbours       none                        2
        kahan        p + r           W' to nearest, ties to even           W' - p' in the dtype of p   4

    `bits` reads a float32 as an integer, so `split` is exact: 65,536 float32 values round to one bfloat16, and `r` in
    [-2^15, 2^15) says which it was. (Ties to even would give every other bfloat16 65,537, one too many.) `stochastic`
    goes up with the probability that makes the mean exact, by adding 16 random bits below; its numbers come from
    `seed`, the updates applied so far and the parameter's path, so a resumed run, every replica and every sharding have
    the same. `kahan` keeps about 17 bits of significand.

    `master` and `split` follow the float32 run bit for bit, as far as the compiler rounds both runs alike: where it
    makes one instruction of a product and a sum in one program and not in another, they are a last bit apart. One
    exception in `split`: where a value falls to less than 2^-16 of what it was, `p + update` cannot hit every bfloat16,
    and `W'` moves to what it did hit if that is not within `r`; this is as much as the rounding of `u` itself. `r` is
    always made from `p'` as it will be, so a pair never disagrees. Finite values that round to infinity show as such in
    `p` and are still exact in `split`, but no update can bring `p` back from infinity or NaN: it becomes NaN, and `W`
    with it, but for that of `master`. Subnormal numbers are zeros wherever the device's arithmetic says so. On a step
    that a guard outside skips, nothing changes a bit.

    Args:
        inner: The optimizer: any of optax, or one that takes the guard's verdict. It sees float32 parameters and
            gradients. Extra arguments of `update` are passed to it.
        mode: See above. `split` takes bfloat16 only, the others float16 too. Wider parameters are passed through.
        seed: Of `stochastic`.

    Returns:
        A transformation with state `PrecisionState`, for `guard(precision(...))`, `groups`, and alone. The updates of
        16-bit parameters are float32: add them with `optax.apply_updates`.

    Raises:
        UserError: No such mode or seed; at `init`, no parameter has 16 bits, or some have a dtype that the mode does
            not take (all are listed).
        ValueError: At `init`, a parameter is no real floating array; at `update`, some were not given.

    Source: Micikevicius et al. 2018, arXiv 1710.03740 (master copy); Zamirai et al. 2020, arXiv 2010.06192 (stochastic
        rounding and Kahan summation).

    Example:
        >>> w = {"w": jnp.ones(1, jnp.bfloat16)}
        >>> tx = precision(optax.sgd(1e-3), "split")
        >>> state = tx.init(w)
        >>> for _ in range(3):  # each less than half of 2^-8, the step below 1
        ...     updates, state = tx.update({"w": jnp.ones(1, jnp.bfloat16)}, state, w)
        ...     w = optax.apply_updates(w, updates)
        >>> float(w["w"][0]), round(float(full_params(state, w)["w"][0]), 6)
        (0.99609375, 0.997)
    """
    if mode not in get_args(Mode):
        raise UserError(
            f"precision: no mode {mode!r}{nearest(str(mode), get_args(Mode))}; modes: {', '.join(get_args(Mode))}"
        )
    if problems := mistakes({"seed": (Seed, seed)}):
        raise UserError("\n  ".join(["precision:", *problems]))

    def init(params: Any) -> PrecisionState:
        leaves = flatten(params)
        check_floating(leaves, "parameter")
        _check(leaves, mode)
        rest = {path: REST[mode](w) for path, w in leaves.items() if w.dtype in LOW and mode in REST}
        state = inner.init(unflatten(params, {path: _read(w) for path, w in leaves.items()}))
        return PrecisionState(state, jnp.zeros((), jnp.int32), _nested(rest))

    def update(
        updates: Any, state: Any, params: Any = None, *, verdict: Verdict | None = None, **extra: Any
    ) -> tuple[Any, PrecisionState]:
        weights, rest = flatten(params), flatten(state.rest)
        missing = [path for path in {**flatten(updates), **rest} if path not in weights]
        if missing:
            raise ValueError("precision: `params` was not given or lacks " + ", ".join(map(repr, missing)))
        full = {path: whole(w, rest.get(path)) for path, w in weights.items()}
        grads = unflatten(updates, {path: _at_least_float32(g) for path, g in flatten(updates).items()})
        moved, inner_state = obeyed(inner, verdict, grads, state.inner, unflatten(params, full), extra)
        steps = flatten(moved)
        low = [path for path in steps if weights[path].dtype in LOW]
        keys = _keys(seed, state.seen, low) if mode == "stochastic" else dict.fromkeys(low)
        for path in low:
            p, u = jnp.asarray(weights[path]), steps[path]
            new = full[path] + jnp.asarray(u).astype(jnp.float32)
            # Selected first, so that a master copy can be overwritten before the parameter is made from it.
            new = _keep(verdict, new, full[path])
            step, left = STORE[mode](new, p, keys[path])
            # A negative zero is the only number that adds to every float without changing its bits.
            steps[path] = _keep(verdict, step, jnp.float32(-0.0))
            if left is not None:
                rest[path] = left if left is new else _keep(verdict, left, rest[path])
        seen = _keep(verdict, optax.safe_increment(state.seen), state.seen)
        return unflatten(updates, steps), PrecisionState(inner_state, seen, unflatten(state.rest, rest))

    return FusedTransformation(init, update)


def full_params(state: Any, params: Any) -> Any:
    """Give the float32 values that parameters of 16 bits and an optimizer state stand for.

    Args:
        state: State of `precision` in any mode, or one that holds such states (below `guard`, in `groups`).
        params: The parameters, as they are after the update that made `state`.

    Returns:
        A tree like `params` in float32; exact for `master` and `split`. Parameters of 16 bits that no such state knows
        are cast, and wider ones are as they are.

    Example:
        >>> w = {"w": jnp.full(1, 0.3, jnp.bfloat16)}
        >>> full_params(precision(optax.sgd(0.1), "kahan").init(w), w)["w"].dtype
        dtype('float32')
    """
    rest = {}
    for part in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, PrecisionState)):
        if isinstance(part, PrecisionState):
            rest |= flatten(part.rest)
    return unflatten(params, {path: whole(w, rest.get(path)) for path, w in flatten(params).items()})


def whole(p: Any, rest: Any) -> Any:
    """Give the float32 value of one parameter and its part of the state, which tells the mode by its dtype.

    Example:
        >>> float(whole(jnp.bfloat16(1.0), jnp.int16(-1)))  # the float32 before 1
        0.9999999403953552
    """
    value = _read(p)
    if rest is None:
        return value
    if rest.dtype == jnp.float32:
        return rest
    if rest.dtype == jnp.int16:
        return _float(_bits(value, jnp.int32) + rest.astype(jnp.int32))  # a NaN stays one
    return value + _read(rest)


def _check(leaves: Mapping[str, Any], mode: str) -> None:
    if not any(w.dtype in LOW for w in leaves.values()):
        found = ", ".join(sorted({str(w.dtype) for w in leaves.values()})) or "no parameter at all"
        raise UserError(
            f"precision: no parameter has 16 bits (found {found}), so there is nothing to do in mode {mode!r}; cast "
            "the parameters to bfloat16, or leave `precision` out"
        )
    taken = LOW[:1] if mode == "split" else LOW
    wrong = {path: w.dtype for path, w in leaves.items() if jnp.finfo(w.dtype).bits < 32 and w.dtype not in taken}
    if wrong:
        lines = [f"precision: mode {mode!r} takes {' and '.join(map(str, taken))} besides wider dtypes; cast these:"]
        raise UserError("\n  ".join(lines + [f"{path or '(root)'}: {dtype}" for path, dtype in wrong.items()]))


def _keep(verdict: Verdict | None, new: Any, old: Any) -> Any:
    return new if verdict is None else jnp.where(verdict.apply, new, old)


def _at_least_float32(g: Any) -> Any:
    g = jnp.asarray(g)
    return g if g.dtype.itemsize > 4 else g.astype(jnp.float32)


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Nest leaves by the segments of their paths: a part of a tree, whatever its containers."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = (key.replace("%2F", "/").replace("%25", "%") for key in path.split("/"))
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def _read(p: Any) -> Float[Array, " ..."]:
    """Give a parameter of 16 bits in float32, as it really is, and a wider one unchanged."""
    p = jnp.asarray(p)
    # XLA drops a conversion down and up again in one program (`xla_allow_excess_precision`), but never this.
    return rounded(p.astype(jnp.float32), p.dtype) if p.dtype in LOW else p


def rounded(x: Float[Array, " ..."], dtype: Any) -> Float[Array, " ..."]:
    """Round to nearest, ties to even, as a conversion to the dtype does, and stay in float32."""
    if dtype == LOW[0]:
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    tiny = jnp.round(x * 2.0**24) * 2.0**-24  # `reduce_precision` has no subnormal numbers
    return jnp.where(jnp.abs(x) < 2.0**-14, tiny, jax.lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10))


def _bits(x: Float[Array, " ..."], kind: Any) -> Any:
    return jax.lax.bitcast_convert_type(x, kind)


def _float(bits: Any) -> Float[Array, " ..."]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _step(q: Any, p: Any) -> tuple[Any, Any]:
    """Give the update from `p` towards `q`, and what `optax.apply_updates` makes of it, in float32."""
    old = _read(p)
    step = jnp.where(q == old, jnp.float32(-0.0), q - old)
    return step, rounded(old + step, p.dtype)


def _master(new: Any, p: Any, key: Any) -> tuple[Any, Any]:
    del key
    return _step(rounded(new, p.dtype), p)[0], new


def _split(new: Any, p: Any, key: Any) -> tuple[Any, Any]:
    del key
    near = _float((_bits(new, jnp.uint32) + jnp.uint32(0x8000)) & jnp.uint32(0xFFFF0000))
    step, left = _step(jnp.where(jnp.isnan(new), new, near), p)
    off = _bits(new, jnp.int32) - _bits(left, jnp.int32)
    fits = (off >= -0x8000) & (off < 0x8000) & ~jnp.isnan(left)
    return step, jnp.where(fits, off, 0).astype(jnp.int16)


def _keys(seed: int, seen: Any, paths: list[str]) -> dict[str, Any]:
    """Give each parameter two random words for this update."""
    root = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), seen)
    names = jnp.array([zlib.crc32(path.encode()) for path in paths], jnp.uint32)
    words = jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(root, names))
    return {path: words[i] for i, path in enumerate(paths)}


def random_bits(key: Any, like: Any) -> Any:
    """Give 32 random bits for each element, from its index and the key's two words alone.

    The bits are hashed within the loop over the array, by the finalizer of MurmurHash3 after each word: those of
    `jax.random` are written to memory first, more of it than this mode of `precision` saves.
    """
    where = jax.typeof(like).sharding
    lies = where if AxisType.Explicit in getattr(where.mesh, "axis_types", ()) else None
    bits = jnp.zeros_like(like, jnp.uint32)
    for axis, size in enumerate(like.shape):
        place = jax.lax.broadcasted_iota(jnp.uint32, like.shape, axis, out_sharding=lies)
        bits = bits * jnp.uint32(size % 2**32) + place
    for word in (key[0], key[1]):
        bits = bits ^ word
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
        bits = bits ^ (bits >> 16)
    return bits


def _stochastic(new: Any, p: Any, key: Any) -> tuple[Any, Any]:
    noise = random_bits(key, p)
    if p.dtype == LOW[0]:
        bits = _bits(new, jnp.uint32)
        q = _float((bits + (noise & jnp.uint32(0xFFFF))) & jnp.uint32(0xFFFF0000))
    else:
        # In units of the last place, which do not shrink below the smallest normal number.
        power = jnp.maximum(_bits(jnp.abs(new), jnp.int32) >> 23, 127 - 14) - 10
        unit = _float(power << 23)
        scaled = jnp.abs(new) / unit
        down = jnp.floor(scaled)
        chance = (noise >> 8).astype(jnp.float32) * 2.0**-24
        q = jnp.sign(new) * (down + (chance < scaled - down)) * unit
    return _step(jnp.where(jnp.isfinite(new), q, new), p)[0], None


def _kahan(new: Any, p: Any, key: Any) -> tuple[Any, Any]:
    del key
    step, left = _step(rounded(new, p.dtype), p)
    rest = new - left
    return step, jnp.where(jnp.isfinite(rest), rest, 0.0).astype(p.dtype)


REST: Mapping[str, Callable[[Any], Any]] = {
    "master": _read,
    "split": lambda w: jnp.zeros_like(w, jnp.int16),
    "kahan": jnp.zeros_like,
}
"""Mode -> what the state begins with, if there is any."""

STORE: Mapping[str, Callable[[Any, Any, Any], tuple[Any, Any]]] = {
    "master": _master,
    "split": _split,
    "stochastic": _stochastic,
    "kahan": _kahan,
}
"""Mode -> from the new float32 value, the old parameter and a key: the update and the new part of the state."""
