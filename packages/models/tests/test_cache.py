import jax
import jax.numpy as jnp
import numpy as np
import pytest

from styrax.core import UserError


def test_layout(build):
    cache = build().init_cache(2, 5)
    (part,) = cache.parts
    assert part.keys.shape == part.values.shape == (2, 2, 2, 5, 6)
    assert cache.capacity == 5
    assert cache.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("scan", ["on", "off"])
@pytest.mark.parametrize("chunks", [[12], [1] * 12, [5, 1, 1, 3, 2]])
def test_chunks_give_what_the_whole_gives(build, tokens, scan, chunks, run):
    model = build(scan=scan)
    cache, pieces = model.init_cache(2, 20), []
    for chunk in np.split(tokens, np.cumsum(chunks)[:-1], axis=1):
        piece, cache = run(model, chunk, cache=cache)
        pieces.append(piece)
    assert cache.lengths.tolist() == [12, 12]
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), run(model, tokens), atol=1e-4)


def test_rows_of_different_length(build, tokens, run):
    """Padding takes no slot, wherever it stands, and rows go on from their own lengths."""
    model = build()
    ids = np.array([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1]], np.int32)
    prompt = np.zeros((2, 5), np.int32)
    prompt[ids == 1] = np.concatenate([tokens[0, :3], tokens[1, :3]])
    logits, cache = run(model, prompt, segment_ids=ids, cache=model.init_cache(2, 6))
    assert cache.lengths.tolist() == [3, 3]
    whole = run(model, tokens)
    np.testing.assert_allclose(logits[0, :3], whole[0, :3], atol=1e-4)
    np.testing.assert_allclose(logits[1, [1, 3, 4]], whole[1, :3], atol=1e-4)
    chunk = np.array([[tokens[0, 3], tokens[0, 4]], [tokens[1, 3], 0]], np.int32)
    logits, cache = run(model, chunk, segment_ids=np.array([[1, 1], [1, 0]], np.int32), cache=cache)
    assert cache.lengths.tolist() == [5, 4]
    np.testing.assert_allclose(logits[0], whole[0, 3:5], atol=1e-4)
    np.testing.assert_allclose(logits[1, 0], whole[1, 3], atol=1e-4)


def test_what_a_slot_held_before_does_not_matter(build, tokens, run):
    model = build()
    clean = model.init_cache(2, 16)
    dirty = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if x.dtype == jnp.float32 else x, clean)
    for chunk in (tokens[:, :6], tokens[:, 6:7]):
        one, clean = run(model, chunk, cache=clean)
        two, dirty = run(model, chunk, cache=dirty)
        assert (one == two).all()


@pytest.mark.slow
def test_overflow_is_an_error_where_it_can_be_known(build, tokens, run):
    model = build(num_layers=1)
    with pytest.raises(UserError, match=r"the cache has 4 slots per row, 0 of them filled, and got 5 more tokens"):
        run(model, tokens[:, :5], cache=model.init_cache(2, 4))  # more than slots: known while tracing
    _, cache = model(tokens[:, :3], cache=model.init_cache(2, 4))
    padding = np.array([[1, 0], [1, 0]], np.int32)
    _, cache = model(tokens[:, 3:5], segment_ids=padding, cache=cache)
    with pytest.raises(UserError, match=r"4 of them filled, and got 1 more tokens; make it longer"):
        model(tokens[:, :1], cache=cache)
    with pytest.raises(UserError, match=r"the cache has 2 rows, the tokens have 1; use init_cache\(1"):
        model(tokens[:1], cache=model.init_cache(2, 20))
    with pytest.raises(UserError, match="expected batch and length of 1 or more, got 0 and 3"):
        model.init_cache(0, 3)


def test_overflow_inside_jit_makes_the_row_nan(build, tokens, run):
    model = build(num_layers=1)
    _, cache = run(model, tokens[:, :3], segment_ids=np.array([[1, 1, 1], [1, 1, 0]]), cache=model.init_cache(2, 3))
    logits, cache = run(model, tokens[:, 3:4], cache=cache)
    assert jnp.isnan(logits[0]).all()
    assert jnp.isfinite(logits[1]).all()
    logits, _ = run(model, tokens[:, 4:5], cache=cache)
    assert jnp.isnan(logits).all()


def test_a_donated_cache_is_updated_in_place(build, tokens):
    model = build()
    step = jax.jit(lambda cache, token: model(token, cache=cache), donate_argnums=0)
    cache = model.init_cache(2, 8)
    _, after = step(cache, tokens[:, :1])
    assert cache.parts[0].keys.is_deleted()
    assert after.lengths.tolist() == [1, 1]
    text = step.lower(after, tokens[:, :1]).compile().as_text()
    assert "input_output_alias" in text
