"""Text from a model, one token at a time."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from styrax.core import UserError
from styrax.core.config import NonNegative, NonNegativeFloat, Positive, Seed, mistakes

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

    from styrax.models.cache import KVCache
    from styrax.models.decoder import Decoder

_SMALLEST_BUCKET = 32


def generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    bos_id: int | None = None,
) -> Iterator[int]:
    r"""Continue a prompt, giving each token as soon as it is decoded.

    Token $t$ of the text is drawn from $\mathrm{softmax}(z / \tau)$ with the key `fold_in(key(seed), t)`, so a
    text depends on the parameters, the prompt and the arguments, and on nothing that ran before.

    The model looks back on at most `config.max_len` tokens. Of a longer prompt the last ones count; when the
    window is full, its older half is dropped and the rest is read again.

    Compiles once per power of two of prompt length and of whole length, not per length.

    Args:
        model: The decoder.
        prompt_ids: What to continue.
        max_tokens: Stop after so many; 0 gives none.
        temperature: $\tau$; 0 takes the most likely token.
        top_k: Draw from the so many most likely tokens only.
        seed: Chooses the text among those possible; in [0, 2**32).
        stop_ids: Tokens that end the text; they are not given.
        bos_id: Stands for an empty prompt.

    Returns:
        An iterator of token ids.

    Raises:
        UserError: At the call, not at the first token: an argument is out of range, or the prompt is empty
            and there is no `bos_id`; all problems are listed.

    Example:
        >>> from flax import nnx
        >>> from styrax.models import DecoderConfig
        >>> model = DecoderConfig(num_layers=1, embed_dim=16, num_heads=2).build(vocab_size=5, rngs=nnx.Rngs(0))
        >>> len(list(generate(model, [1, 2], max_tokens=3)))
        3
    """
    prompt, problems = _ids("prompt_ids", prompt_ids)
    stop, more = _ids("stop_ids", stop_ids)
    if not prompt and not problems:
        prompt = [] if bos_id is None else [bos_id]
        problems += [] if prompt else ["the prompt is empty: give at least one token, or bos_id"]
    problems += [*_outside(prompt, model.vocab_size), *more]
    limits: dict[str, Any] = {
        "max_tokens": (NonNegative, max_tokens),
        "temperature": (NonNegativeFloat, temperature),
        "seed": (Seed, seed),
    }
    problems += mistakes(limits if top_k is None else {**limits, "top_k": (Positive, top_k)})
    if problems:
        raise UserError("\n".join(problems))
    sample = functools.partial(
        _sample,
        temperature=float(temperature),
        top_k=None if top_k is None or top_k >= model.vocab_size else top_k,
    )
    return _tokens(model, prompt, max_tokens, sample, jax.random.key(seed, impl="threefry2x32"), set(stop))


def _ids(name: str, given: Any) -> tuple[list[int], list[str]]:
    expected = f"{name}: expected token ids, a sequence of integers"
    if isinstance(given, (str, bytes)):
        return [], [f"{expected}, got text; encode it with the tokenizer of the model first"]
    try:
        return [operator.index(token) for token in given], []
    except TypeError as error:
        return [], [f"{expected}, got {type(given).__name__} ({error})"]


def _outside(prompt: list[int], vocab_size: int) -> list[str]:
    outside = sorted({token for token in prompt if not 0 <= token < vocab_size})
    if not outside:
        return []
    shown = ", ".join(map(str, outside[:5])) + (", ..." if len(outside) > 5 else "")
    return [f"prompt_ids: expected ids in [0, {vocab_size}), got {shown}; is it another tokenizer's?"]


def _tokens(
    model: Decoder, prompt: list[int], max_tokens: int, sample: Any, key: Array, stop_ids: set[int]
) -> Iterator[int]:
    window = model.config.max_len
    context = prompt[-window:]
    capacity = _bucket(len(context) + max_tokens, window)
    blocks = model.blocks()  # cut once: inside of a step it would copy all parameters for one token
    cache = None
    for position in range(len(prompt), len(prompt) + max_tokens):
        if cache is None:
            logits, cache = _prefill(model, blocks, _padded(context, capacity), len(context), capacity=capacity)
        else:
            logits, cache = _decode(model, blocks, np.asarray([context[-1:]], np.int32), cache)
        token = int(sample(logits, jax.random.fold_in(key, position)))
        if token in stop_ids:
            return
        yield token
        context.append(token)
        if len(context) > capacity:
            context, cache = context[-max(1, capacity // 2) :], None


def _bucket(length: int, limit: int) -> int:
    return min(limit, max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length()))


def _padded(context: list[int], capacity: int) -> Int[np.ndarray, "1 bucket"]:
    tokens = np.zeros((1, _bucket(len(context), capacity)), np.int32)
    tokens[0, : len(context)] = context
    return tokens


@functools.partial(jax.jit, static_argnames="capacity")
def _prefill(
    model: Decoder, blocks: Any, tokens: Int[Array, "1 bucket"], length: Int[Array, ""], *, capacity: int
) -> tuple[Float[Array, " vocab"], KVCache]:
    real = (jnp.arange(tokens.shape[1]) < length)[None].astype("int32")
    x, cache, _ = model.hidden(blocks, tokens, segment_ids=real, cache=model.init_cache(1, capacity))
    assert cache is not None
    last = jax.lax.dynamic_slice_in_dim(x, length - 1, 1, axis=1)
    return model.logits(last)[0, 0], cache


@functools.partial(jax.jit, donate_argnames="cache")
def _decode(
    model: Decoder, blocks: Any, token: Int[Array, "1 1"], cache: KVCache
) -> tuple[Float[Array, " vocab"], KVCache]:
    x, new, _ = model.hidden(blocks, token, cache=cache)
    assert new is not None
    return model.logits(x)[0, 0], new


@functools.partial(jax.jit, static_argnames="top_k")
def _sample(
    logits: Float[Array, " vocab"], key: Array, *, temperature: Float[Array, ""] | float, top_k: int | None
) -> Int[Array, ""]:
    logits = logits.astype("float32")
    greedy = jnp.argmax(logits)
    tokens = jnp.arange(logits.shape[0])
    if top_k is not None:
        logits, tokens = jax.lax.top_k(logits, top_k)
    scaled = (logits - logits.max()) / jnp.where(temperature > 0, temperature, 1.0)
    return jnp.where(temperature > 0, tokens[jax.random.categorical(key, scaled)], greedy)
