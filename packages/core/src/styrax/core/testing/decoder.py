"""Conformance of a decoder model."""

from __future__ import annotations

from typing import Any

import numpy as np


def check_decoder(model: Any, vocab_size: int, *, tolerance: float = 1e-4, seq: int = 8) -> None:
    """Check that a decoder sees the past only, keeps documents apart, and decodes as it was trained.

    - logits have shape `[batch, seq, vocab]`, a floating dtype and finite values, and do not depend on
      what else is in the batch;
    - a changed token leaves every earlier logit as it was, and does change later ones;
    - with two documents in a row, a change in the first leaves the second's logits as they were, and the
      second's logits are those that it has alone;
    - feeding one token at a time, or a prompt and then tokens, through the cache gives the same logits.

    All calls are compiled with `jax.jit`, the model closed over.

    Args:
        model: `model(tokens, *, positions=None, segment_ids=None, cache=None)` gives logits, or
            `(logits, cache)` with a cache; `model.init_cache(batch, length)`.
        vocab_size: Token ids are in `[0, vocab_size)`; at least 2.
        tolerance: Largest allowed absolute difference of logits; a bfloat16 model needs about `0.1`.
        seq: Tokens per row.

    Raises:
        AssertionError: The model breaks one of these.
    """
    import jax
    import jax.numpy as jnp

    call = jax.jit(lambda tokens, given: model(tokens, **given))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab_size, (2, seq), dtype=np.int32)

    def run(tokens: np.ndarray, **given: Any) -> np.ndarray:
        return _numpy(call(tokens, given))

    raw = call(tokens, {})
    assert raw.shape == (2, seq, vocab_size), f"logits: got {raw.shape}, expected {(2, seq, vocab_size)}"
    assert jnp.issubdtype(raw.dtype, jnp.floating), f"logits: got {raw.dtype}, expected a floating dtype"
    logits = _numpy(raw)
    assert np.isfinite(logits).all(), "logits: not finite"
    _near(run(tokens[:1]), logits[:1], tolerance, "a row alone and in a batch")

    for position in (1, seq // 2, seq - 1):
        changed = _change(tokens, slice(position, position + 1), vocab_size)
        after = run(changed)
        what = f"causality: token {position} changed"
        _near(after[:, :position], logits[:, :position], tolerance, f"{what}, earlier logits")
        assert np.abs(after[:, position:] - logits[:, position:]).max() > 0, f"{what}, no logit did"

    first = seq // 2 - 1  # documents of different length, so that a wrong offset shows
    segment_ids = np.repeat(np.array([[1] * first + [2] * (seq - first)], np.int32), 2, axis=0)
    positions = np.concatenate([np.arange(first), np.arange(seq - first)]).astype(np.int32)[None].repeat(2, 0)
    packed = run(tokens, segment_ids=segment_ids, positions=positions)
    changed = run(_change(tokens, slice(0, first), vocab_size), segment_ids=segment_ids, positions=positions)
    _near(changed[:, first:], packed[:, first:], tolerance, "segments: document 1 changed, document 2's logits")
    _near(run(tokens[:, first:]), packed[:, first:], tolerance, "segments: document 2 alone and packed")
    padded = run(tokens, segment_ids=np.where(segment_ids == 2, 0, 1), positions=positions)
    assert np.isfinite(padded).all(), "segments: logits are not finite with padding (segment 0)"
    _near(padded[:, :first], packed[:, :first], tolerance, "segments: padding after document 1")

    for chunks in ([1] * seq, [seq // 2] + [1] * (seq - seq // 2)):
        cache, pieces, start = model.init_cache(2, seq), [], 0
        for length in chunks:
            piece, cache = call(tokens[:, start : start + length], {"cache": cache})
            pieces.append(_numpy(piece))
            start += length
        _near(np.concatenate(pieces, axis=1), logits, tolerance, f"cache: chunks of {chunks} against no cache")


def _numpy(logits: Any) -> np.ndarray:
    return np.asarray(logits).astype(np.float64)


def _change(tokens: np.ndarray, where: slice, vocab_size: int) -> np.ndarray:
    changed = tokens.copy()
    changed[:, where] = (changed[:, where] + 1) % vocab_size
    return changed


def _near(got: np.ndarray, expected: np.ndarray, tolerance: float, what: str) -> None:
    assert got.shape == expected.shape, f"{what}: got shape {got.shape}, expected {expected.shape}"
    difference = np.abs(got - expected)
    if difference.size and not difference.max() <= tolerance:
        where = tuple(int(i) for i in np.unravel_index(difference.argmax(), difference.shape))
        raise AssertionError(
            f"{what}: logits differ by up to {difference.max():.3g} at [batch, seq, vocab] = {where}, "
            f"at most {tolerance} is allowed"
        )
