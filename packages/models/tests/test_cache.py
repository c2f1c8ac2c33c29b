import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from styrax.core import UserError
from styrax.models.arch import Arch, Attn, Latent

VOCAB = 23
LATENT = Latent(kv_rank=8, q_rank=6, nope_dim=6, rope_dim=4, v_dim=10)
KINDS = {
    "attn": Arch(),
    "local": Arch(local=Attn(window=5), layers=("local",)),
    "chunk": Arch(local=Attn(chunk=5), layers=("local",)),
    "mixed": Arch(local=Attn(window=3), layers=("local", "attn")),
    "latent": Arch(latent=LATENT, layers=("latent",)),
}


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


@pytest.mark.parametrize("kind", ["attn", "local", "latent"])
def test_what_a_slot_held_before_does_not_matter(build, tokens, run, kind):
    """Of one row all slots were NaN and infinite, since its tokens were none; then the cache is used again."""
    model = build(arch=KINDS[kind], num_layers=1)
    clean = model.init_cache(2, 12)
    wrong = np.where(np.array([[True], [False]]), VOCAB, tokens)
    logits, dirty = run(model, wrong, cache=clean)
    assert jnp.isnan(logits[0]).all()
    np.testing.assert_allclose(logits[1], run(model, tokens)[1], atol=1e-4)
    later, _ = run(model, tokens[:, :1], cache=dataclasses.replace(dirty, lengths=jnp.array([6, 6])))
    assert jnp.isnan(later[0]).all()  # a row that has seen such a token stays NaN
    dirty = dataclasses.replace(dirty, lengths=jnp.zeros_like(dirty.lengths))
    for chunk in (tokens[:, :6], tokens[:, 6:7], tokens[:, 7:9]):
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


@pytest.mark.parametrize(
    ("kind", "chunks"),
    [("local", [1] * 12), ("local", [4, 1, 7]), ("chunk", [9, 1, 1, 1]), ("mixed", [12]), ("mixed", [2, 3, 5, 1, 1])],
)
def test_a_ring_gives_what_the_whole_gives(build, tokens, run, kind, chunks):
    """Calls shorter and longer than the window, and the ring taken several times around."""
    model = build(arch=KINDS[kind])
    cache, pieces = model.init_cache(2, 12), []
    assert {part.keys.shape[3] for part in cache.parts} == {3, 12} if kind == "mixed" else {5}
    for chunk in np.split(tokens, np.cumsum(chunks)[:-1], axis=1):
        piece, cache = run(model, chunk, cache=cache)
        pieces.append(piece)
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), run(model, tokens), atol=1e-4)


@pytest.mark.parametrize("kind", ["local", "chunk"])
def test_a_ring_with_rows_of_different_length_and_padding_anywhere(build, tokens, run, kind):
    model = build(arch=KINDS[kind], num_layers=1)
    whole = np.asarray(run(model, tokens))
    cache, seen, rng = model.init_cache(2, 12), np.zeros(2, int), np.random.default_rng(3)
    for seq in (6, 1, 7, 1, 1, 7, 7):
        real = rng.random((2, seq)) < 0.5
        real &= seen[:, None] + real.cumsum(1) <= 12
        chunk = rng.integers(0, VOCAB, (2, seq), dtype=np.int32)  # what stands at padding does not matter
        for row in range(2):
            chunk[row, real[row]] = tokens[row, seen[row] : seen[row] + real[row].sum()]
        logits, cache = run(model, chunk, segment_ids=real.astype(np.int32), cache=cache)
        for row in range(2):
            end = seen[row] + real[row].sum()
            np.testing.assert_allclose(logits[row, real[row]], whole[row, seen[row] : end], atol=1e-4)
            seen[row] = end
    assert cache.lengths.tolist() == seen.tolist()
    assert min(seen) > 8


def test_beyond_the_capacity_of_a_ring_a_row_is_nan(build, tokens, run):
    model = build(arch=KINDS["local"], num_layers=1)
    padding = np.array([[1] * 6, [1] * 5 + [0]])
    _, cache = run(model, tokens[:, :6], segment_ids=padding, cache=model.init_cache(2, 6))
    logits, _ = run(model, tokens[:, 6:7], cache=cache)
    assert jnp.isnan(logits[0]).all()
    np.testing.assert_allclose(logits[1, 0], run(model, np.r_[tokens[1, :5], tokens[1, 6:7]][None])[0, 5], atol=1e-4)


def test_absorbing_is_the_same_function(build, tokens, run, monkeypatch):
    """Latent attention that makes no keys and values, against that which makes them from the cache."""
    from styrax.models.layers.latent import LatentAttention

    model = build(arch=KINDS["latent"])
    got = []
    for absorbed in (True, False):
        monkeypatch.setattr(LatentAttention, "_absorbing_is_less", lambda *_, absorbed=absorbed: absorbed)
        call = jax.jit(lambda model, tokens, **given: model(tokens, **given))
        ids = np.array([[0, 1, 1, 1, 1], [1] * 5])
        _, cache = call(model, tokens[:, :5], segment_ids=ids, cache=model.init_cache(2, 10))
        text = call.lower(model, tokens[:, 5:7], cache=cache).as_text()
        got.append((call(model, tokens[:, 5:7], cache=cache)[0], "2x10x24" in text))  # values of 10 slots
    np.testing.assert_allclose(got[0][0], got[1][0], atol=5e-5)
    assert [made for _, made in got] == [False, True]


def test_few_queries_absorb_and_many_do_not(build):
    model = build(arch=KINDS["latent"], num_layers=1)
    less = jax.tree.map(lambda leaf: leaf[0], model.layers).attn._absorbing_is_less
    assert less(1, 100)
    assert not less(100, 100)
    assert not less(1, 1)
