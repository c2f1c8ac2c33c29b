"""Rotary position embedding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from styrax.core import UserError
from styrax.models.rope_config import Llama3, Rope, Yarn

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

_TURN = 2.0**32


class Rotation(NamedTuple):
    """Cosine and sine of every position's angles.

    Attributes:
        cos: `[batch or 1, seq, 1, half]` float32, for the first `2 * half` channels of a head.
        sin: The same shape.
    """

    cos: Float[Array, "batch seq 1 half"]
    sin: Float[Array, "batch seq 1 half"]


def rotation(positions: Int[Array, "batch seq"], head_dim: int, rope: Rope | float) -> Rotation:
    r"""Make cosine and sine of the angles $p f_i$ of positions $p$.

    Angles are right to about 1e-6 radians at any int32 position: products of float32 numbers are wrong by up to
    0.06 at position $2^{20}$, and bfloat16 ones by a radian at 4096. The frequencies of the kind "dynamic" are
    float32 beyond its original length, and there the angles are as inexact as such products.

    The frequencies of "dynamic" and "longrope" depend on the length, which is the largest of all positions in this
    call, plus 1. So rows of one batch share them, and keys that a cache holds from earlier calls keep the
    frequencies of their own call, as in Hugging Face transformers. (There "dynamic" also remembers the longest
    call; here each call stands alone.)

    Args:
        positions: $p$; any integers.
        head_dim: Width of a head.
        rope: How positions turn into angles; a number is the base $\theta$ of `Rope(theta=...)`.

    Raises:
        UserError: The rotary width does not fit `head_dim`.

    Example:
        >>> turn = rotation(jnp.array([[0, 1]]), 4, Rope(theta=10_000.0))
        >>> turn.cos.shape, float(turn.sin[0, 0, 0, 0])
        ((1, 2, 1, 2), 0.0)
    """
    if not isinstance(rope, Rope):
        rope = Rope(theta=rope)
    made, factor = frequencies(rope, head_dim)
    length = jnp.max(positions) + 1
    angles = _angles(positions, made)
    if rope.kind == "longrope":
        long, _ = frequencies(rope, head_dim, _original(rope) + 1)
        angles = jnp.where(length > _original(rope), _angles(positions, long), angles)
    elif rope.kind == "dynamic":
        angles = jnp.where(length > _original(rope), _stretched_angles(positions, made, rope, length), angles)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return Rotation(cos, sin) if factor == 1 else Rotation(cos * factor, sin * factor)


def rotate(
    x: Float[Array, "batch seq heads head_dim"], by: Rotation, *, interleaved: bool = False
) -> Float[Array, "batch seq heads head_dim"]:
    r"""Turn each pair of channels $(a, b)$ by its angle, so that a product of two depends on their distance.

    $(a \cos - b \sin,\; b \cos + a \sin)$. Pair $i$ of the first $d$ channels, $d/2$ the width of the rotation,
    is $(x_i, x_{i+d/2})$, or $(x_{2i}, x_{2i+1})$ if interleaved; each stays in its place. The channels after
    them are left as they are.

    Source: Su et al., "RoFormer" (2021), section 3.4.2.

    Args:
        x: Queries or keys.
        by: From `rotation`.
        interleaved: Whether pairs are neighbours, and not the halves, as in most Hugging Face checkpoints.

    Returns:
        In the dtype of `x`.

    Example:
        >>> quarter = Rotation(jnp.zeros((1, 1, 1, 1)), jnp.ones((1, 1, 1, 1)))
        >>> rotate(jnp.array([[[[1.0, 2.0, 5.0]]]]), quarter).tolist()
        [[[[-2.0, 1.0, 5.0]]]]
    """
    half = by.cos.shape[-1]
    if not half:
        return x
    turned, rest = jnp.split(x, [2 * half], axis=-1)
    wide = turned.astype("float32")
    first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, axis=-1)
    pair = [first * by.cos - second * by.sin, second * by.cos + first * by.sin]
    out = jnp.stack(pair, axis=-1).reshape(turned.shape) if interleaved else jnp.concatenate(pair, axis=-1)
    out = out.astype(x.dtype)
    return jnp.concatenate([out, rest], axis=-1) if rest.shape[-1] else out


def frequencies(rope: Rope, head_dim: int, length: int | None = None) -> tuple[Float[np.ndarray, " half"], float]:
    r"""Compute the frequencies $f_i$, in radians per position, and the factor of cosine and sine.

    Source: the papers named in `styrax.models.rope_config`; the numbers are those of Hugging Face transformers.

    Args:
        rope: What they follow from.
        head_dim: Width of a head.
        length: Tokens, for the kinds "dynamic" and "longrope"; none means not more than the original length.

    Returns:
        float64, one for each pair of rotated channels; and `attention_factor` with its default filled in.

    Raises:
        UserError: The rotary width does not fit `head_dim`; all problems are listed.

    Example:
        >>> frequencies(Rope(theta=100.0), 4)
        (array([1. , 0.1]), 1.0)
        >>> frequencies(Rope(kind="proportional", theta=100.0, fraction=0.5), 4)
        (array([1., 0.]), 1.0)
    """
    if problems := rope.misfits(head_dim):
        raise UserError("\n".join(f"rope.{line}" for line in problems))
    width, factor = rope.rotated(head_dim), rope.factor or 1.0
    made = rope.theta ** (-np.arange(0, width, 2) / max(width, 1))
    match rope.kind:
        case "linear":
            return made / factor, 1.0
        case "proportional":
            turning = int(rope.fraction * head_dim // 2)
            return np.where(np.arange(len(made)) < turning, made / factor, 0.0), 1.0
        case "dynamic":
            stretch = factor * max(length or 0, _original(rope)) / _original(rope) - (factor - 1)
            return made * stretch ** -_dynamic_exponents(width), 1.0
        case "llama3":
            return _llama3(made, factor, _original(rope), rope.llama3 or Llama3()), 1.0
        case "yarn":
            return _yarn(made, factor, rope), _attention_factor(rope)
        case "longrope" if rope.longrope is not None:
            long = length is not None and length > _original(rope)
            divisors = rope.longrope.long_factor if long else rope.longrope.short_factor
            return made / np.asarray(divisors), _attention_factor(rope)
    return made, 1.0


def rope_scale(rope: Rope) -> float:
    r"""Give the factor of the softmax's scale: $(1 + 0.1\, c \ln s)^2$, with $s$ `factor` and $c$ `mscale_all_dim`.

    It is for models whose attention applies it; 1 unless `rope.yarn` has an `mscale_all_dim`.

    Source: DeepSeek-AI, "DeepSeek-V2" (2024), its published code.

    Args:
        rope: What it follows from.

    Example:
        >>> rope_scale(Rope())
        1.0
        >>> long = Rope(kind="yarn", factor=40.0, original_max_len=4096, yarn=Yarn(mscale_all_dim=1.0))
        >>> round(rope_scale(long), 4)
        1.8739
    """
    yarn = rope.yarn or Yarn()
    return 1.0 if yarn.mscale_all_dim is None else _mscale(rope.factor or 1.0, yarn.mscale_all_dim) ** 2


def _original(rope: Rope) -> int:
    assert rope.original_max_len is not None  # the config refused the kinds that need it without it
    return rope.original_max_len


def _mscale(factor: float, coefficient: float) -> float:
    return 1.0 + 0.1 * coefficient * math.log(factor)


def _attention_factor(rope: Rope) -> float:
    factor, yarn = rope.factor or 1.0, rope.yarn or Yarn()
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(_original(rope))) if factor > 1 else 1.0
    if yarn.mscale is not None and yarn.mscale_all_dim is not None:
        return _mscale(factor, yarn.mscale) / _mscale(factor, yarn.mscale_all_dim)
    return _mscale(factor, 1.0)


def _dynamic_exponents(width: int) -> Float[np.ndarray, " half"]:
    # The base's factor to the power d/(d-2), and that to the power 2i/d.
    return np.arange(0, width, 2) / (width - 2)


def _llama3(made: Float[np.ndarray, " half"], factor: float, original: int, ends: Llama3) -> Float[np.ndarray, " half"]:
    turns = original * made / (2 * np.pi)
    kept = (turns - ends.low_freq_factor) / (ends.high_freq_factor - ends.low_freq_factor)
    return _blend(made, factor, np.clip(kept, 0, 1))


def _yarn(made: Float[np.ndarray, " half"], factor: float, rope: Rope) -> Float[np.ndarray, " half"]:
    yarn, width = rope.yarn or Yarn(), 2 * len(made)

    def index(turns: float) -> float:  # of the frequency, were it a real number, that turns so often
        return width * math.log(_original(rope) / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index(yarn.beta_fast), index(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # a step
    return _blend(made, factor, 1 - np.clip((np.arange(len(made)) - low) / (high - low), 0, 1))


def _blend(
    made: Float[np.ndarray, " half"], factor: float, kept: Float[np.ndarray, " half"]
) -> Float[np.ndarray, " half"]:
    return made * kept + made / factor * (1 - kept)


def _angles(positions: Int[Array, "batch seq"], made: Float[np.ndarray, " half"]) -> Float[Array, "batch seq 1 half"]:
    # Whole turns do not matter, and an unsigned product drops them without any rounding if it counts in
    # 1 / 2**32 of a turn. What is left of a frequency is below half of that.
    units = made / (2 * np.pi) * _TURN
    whole = np.round(units)
    left = ((units - whole) / _TURN * 2 * np.pi).astype("float32")
    at = positions[:, :, None, None]
    wrapped = jax.lax.bitcast_convert_type(at.astype("uint32") * (whole % _TURN).astype("uint32"), "int32")
    return wrapped.astype("float32") * np.float32(2 * np.pi / _TURN) + at.astype("float32") * left


def _stretched_angles(
    positions: Int[Array, "batch seq"], made: Float[np.ndarray, " half"], rope: Rope, length: Int[Array, ""]
) -> Float[Array, "batch seq 1 half"]:
    factor, original = rope.factor or 1.0, _original(rope)
    beyond = jnp.maximum(length - original, 0).astype("float32")
    exponents = _dynamic_exponents(2 * len(made)).astype("float32")
    shrink = jnp.exp(-exponents * jnp.log1p(factor / original * beyond))
    return positions[:, :, None, None].astype("float32") * (made.astype("float32") * shrink)
