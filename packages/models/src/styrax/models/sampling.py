"""How the next token is drawn from logits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from styrax.core.config import Fraction, NonNegativeFloat, Positive, PositiveFloat, check

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float, Int, UInt32

_CANDIDATES = 1024


@dataclass(frozen=True, kw_only=True)
class Sampling:
    r"""The distribution of the next token, from its logits $z$; the defaults give $\mathrm{softmax}(z)$.

    In this order: penalties change logits; logits are divided by $\tau$; then `top_k`, `top_p` and `min_p` each
    leave some tokens out of those that are left, and the rest share the probability.

    With none of the three the draw is exact. With any, it is from the 1024 most likely tokens at most, or from
    `top_k` of them if that is more.

    Source: Fan et al., "Hierarchical Neural Story Generation" (2018), for `top_k`; Holtzman et al., "The Curious
    Case of Neural Text Degeneration" (2020), for `top_p`; Nguyen et al., "Turning Up the Heat: Min-p Sampling"
    (2024); Keskar et al., "CTRL" (2019), section 4.1, for `repetition_penalty`.

    Attributes:
        temperature: $\tau$; 0 takes the most likely token.
        top_k: Keep the so many most likely tokens.
        top_p: Keep the most likely tokens until their probabilities add up to this.
        min_p: Keep the tokens that are at least this times as likely as the most likely one.
        repetition_penalty: Divide by this the positive logits of tokens that stand in the prompt or the text so far,
            and multiply the negative ones.
        presence_penalty: Subtract this from the logits of tokens that stand in the text so far, the prompt not
            counted.
        frequency_penalty: And this for each time that they do.

    Raises:
        ValueError: A value is of the wrong type or out of its limits; all are listed.

    Example:
        >>> Sampling(temperature=0.7, top_p=0.9).top_k is None
        True
    """

    temperature: NonNegativeFloat = 1.0
    top_k: Positive | None = None
    top_p: Fraction = 1.0
    min_p: Fraction = 0.0
    repetition_penalty: PositiveFloat = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        check(self)
        if self.top_p == 0:
            raise ValueError("top_p: expected above 0, got 0.0; temperature = 0 takes the most likely token")

    @property
    def limited(self) -> bool:
        """Whether some tokens are left out."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    @property
    def penalised(self) -> bool:
        """Whether the draw depends on the tokens before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class Rows(NamedTuple):
    """One value for each row.

    Attributes:
        seed: Of the row's keys.
        temperature: As in `Sampling`, and so on.
        top_k: The vocabulary's size for none.
        limited: Whether the row is drawn from the candidates, not from all tokens.
    """

    seed: UInt32[np.ndarray, " batch"]
    temperature: Float[np.ndarray, " batch"]
    top_k: Int[np.ndarray, " batch"]
    top_p: Float[np.ndarray, " batch"]
    min_p: Float[np.ndarray, " batch"]
    repetition_penalty: Float[np.ndarray, " batch"]
    presence_penalty: Float[np.ndarray, " batch"]
    frequency_penalty: Float[np.ndarray, " batch"]
    limited: Bool[np.ndarray, " batch"]


class Work(NamedTuple):
    """What has to be computed for at least one row of a batch.

    Attributes:
        candidates: How many of the most likely tokens; 0 if no row is drawn from them.
        free: Whether a row is drawn from all tokens.
        penalised: Whether a row has penalties.
    """

    candidates: int
    free: bool
    penalised: bool


def gather(sampling: Sequence[Sampling], seeds: Sequence[int], vocab_size: int) -> tuple[Rows, Work]:
    """Put the settings of all rows together.

    Args:
        sampling: One for each row.
        seeds: One for each row.
        vocab_size: Tokens there are.

    Example:
        >>> gather([Sampling(temperature=0.0), Sampling(top_k=5)], [0, 0], 100)[1]
        Work(candidates=100, free=False, penalised=False)
    """
    kept = [min(each.top_k or vocab_size, vocab_size) for each in sampling]
    limited = [k < vocab_size or each.top_p < 1 or each.min_p > 0 for k, each in zip(kept, sampling, strict=True)]
    drawn = [each.temperature > 0 for each in sampling]

    def column(name: str) -> Float[np.ndarray, " batch"]:
        return np.array([getattr(each, name) for each in sampling], np.float32)

    names = ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    rows = Rows(
        seed=np.array(seeds, np.uint32),
        temperature=column("temperature"),
        top_k=np.array(kept, np.int32),
        limited=np.array(limited),
        **{name: column(name) for name in names},
    )
    # Their number is the same for nearly all settings, so that a row's draw does not hang on what others ask for.
    asked = [k for k, each in zip(kept, sampling, strict=True) if each.top_k is not None and k < vocab_size]
    most = max([_CANDIDATES, *(1 << (k - 1).bit_length() for k in asked)])
    cut, free = any(a and b for a, b in zip(limited, drawn)), any(b and not a for a, b in zip(limited, drawn))
    return rows, Work(min(most, vocab_size) if cut else 0, free, any(each.penalised for each in sampling))


@functools.partial(jax.jit, static_argnames="work", donate_argnames="counts")
def draw(
    logits: Float[Array, "batch vocab"],
    positions: Int[Array, " batch"],
    rows: Rows,
    prompt: Bool[Array, "batch vocab"] | None = None,
    counts: Int[Array, "batch vocab"] | None = None,
    *,
    work: Work,
) -> tuple[Int[Array, " batch"], Int[Array, "batch vocab"] | None]:
    """Draw one token for each row, with the key `fold_in(key(seed), position)`.

    Args:
        logits: Of the next token.
        positions: Its place in the text, the prompt included.
        rows: From `gather`.
        prompt: Which tokens the prompt has; only with penalties.
        counts: How often each token is in the text so far; only with penalties. Its memory is used again.
        work: From `gather`.

    Returns:
        The tokens, and the counts with them.
    """
    logits = logits.astype("float32")
    if work.penalised:
        assert prompt is not None
        assert counts is not None
        logits = _penalised(logits, rows, prompt, counts)
    best = jnp.argmax(logits, axis=-1).astype("int32")
    tokens, drawn = best, rows.temperature > 0
    # A tiny temperature is the greedy limit, and must not divide by 0.
    tau = jnp.where(drawn, rows.temperature, 1.0)[:, None]
    keys = jax.vmap(lambda seed, at: jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), at))(
        rows.seed, positions
    )
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / tau
    if work.free:
        free = jax.vmap(jax.random.categorical)(keys, scaled)
        tokens = jnp.where(drawn & ~rows.limited, free.astype("int32"), tokens)
    if work.candidates:
        cut = _from_candidates(keys, scaled, rows, work.candidates)
        tokens = jnp.where(drawn & rows.limited, cut, tokens)
    if work.penalised:
        assert counts is not None
        counts = counts.at[jnp.arange(len(tokens)), tokens].add(1)
    return tokens, counts


def _penalised(
    logits: Float[Array, "batch vocab"],
    rows: Rows,
    prompt: Bool[Array, "batch vocab"],
    counts: Int[Array, "batch vocab"],
) -> Float[Array, "batch vocab"]:
    said, factor = counts > 0, rows.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = jnp.where(said | prompt, repeated, logits)
    often = rows.frequency_penalty[:, None] * counts.astype("float32")
    return logits - often - jnp.where(said, rows.presence_penalty[:, None], 0.0)


def _from_candidates(
    keys: Array, scaled: Float[Array, "batch vocab"], rows: Rows, candidates: int
) -> Int[Array, " batch"]:
    best, ids = jax.lax.top_k(scaled, candidates)
    weights = jnp.exp(best)  # the most likely one weighs 1
    kept = jnp.arange(candidates) < rows.top_k[:, None]
    total = jnp.where(
        rows.top_k < scaled.shape[1],
        jnp.where(kept, weights, 0.0).sum(axis=-1),
        jnp.exp(scaled).sum(axis=-1),  # without top_k, tokens beyond the candidates have their share too
    )
    before = jnp.cumsum(weights, axis=-1) - weights
    everything = rows.top_p[:, None] >= 1  # a sum may be rounded to more than the total
    kept &= everything | (before < (rows.top_p * total)[:, None])
    kept &= weights >= rows.min_p[:, None]
    chosen = jax.vmap(jax.random.categorical)(keys, jnp.where(kept, best, -jnp.inf))
    return jnp.take_along_axis(ids, chosen[:, None], axis=1)[:, 0].astype("int32")
