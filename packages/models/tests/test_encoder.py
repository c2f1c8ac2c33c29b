"""Encoders against the equations in float64, and what must not change a result."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.core import Policy, UserError, tree
from styrax.models import Encoder, EncoderConfig, TowersConfig
from styrax.models.encoder_config import Image, Pool, Text
from styrax.models.encoder_input import patch_rows

SIZES = {"num_layers": 2, "embed_dim": 12, "num_heads": 3, "mlp_dim": 20}
TEXT = Text(vocab_size=17, max_len=9, num_types=2)
IMAGE = Image(height=4, width=6, patch=2, class_token=True)
BERT = {**SIZES, "input": TEXT, "placement": "sum", "embed_norm": True}
ONE = {**SIZES, "num_layers": 1}
VIT = {**SIZES, "input": IMAGE, "activation": "gelu_tanh"}


def build(policy="f32", seed=0, **fields):
    """Make an encoder whose parameters are large enough that a wrong term shows."""
    config = EncoderConfig(**fields)
    empty = nnx.eval_shape(lambda: config.build(rngs=nnx.Rngs(0), policy=Policy.parse(policy)))
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        noise = rng.normal(size=leaf.shape)
        return jnp.asarray(1 + 0.1 * noise if path.endswith("scale") else 0.3 * noise, leaf.dtype)

    return tree.map_with_path(draw, empty)


def compiled(function, **options):
    """Compile; that is most of the time, and these sizes need no fast code."""
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(function, compiler_options=quick, **options)


def like(model, **changes):
    """Give the same parameters another config."""
    config = dataclasses.replace(model.config, **changes)
    empty = nnx.eval_shape(lambda: config.build(rngs=nnx.Rngs(0), policy=model.policy))
    return tree.unflatten(empty, tree.flatten(model))


def fresh(config):
    return compiled(lambda: config.build(rngs=nnx.Rngs(0)))()


run = compiled(lambda model, inputs, **others: model(inputs, **others), static_argnames="num_segments")


@pytest.fixture
def tokens():
    return np.random.default_rng(1).integers(0, 17, (2, 7), dtype=np.int32)


@pytest.fixture
def images():
    return np.random.default_rng(1).normal(size=(2, 4, 6, 3)).astype("float32")


class Reference:
    """Follows the equations, one document, token by token and head by head."""

    def __init__(self, model):
        self.w = {path: np.asarray(leaf, np.float64) for path, leaf in tree.flatten(model).items()}
        self.config = model.config

    def linear(self, x, path, layer=...):
        return x @ self.w[f"{path}/kernel"][layer] + self.w[f"{path}/bias"][layer]

    def norm(self, x, path, layer=...):
        around = x - x.mean()
        scale, bias = self.w[f"{path}/scale"][layer], self.w[f"{path}/bias"][layer]
        return around / np.sqrt((around**2).mean() + self.config.norm.eps) * scale + bias

    def mlp(self, x, path, layer=...):
        act = {
            "gelu": lambda z: z * (1 + np.vectorize(math.erf)(z / math.sqrt(2))) / 2,
            "gelu_tanh": lambda z: z / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
            "quick_gelu": lambda z: z / (1 + np.exp(-1.702 * z)),
        }[self.config.activation]
        return self.linear(act(self.linear(x, f"{path}/up", layer)), f"{path}/down", layer)

    def attend(self, queries, xs, path, layer=...):
        heads = self.config.num_heads
        width = self.config.embed_dim // heads
        q, k, v = ([self.linear(x, f"{path}/{n}", layer) for x in of] for n, of in zip("qkv", (queries, xs, xs)))
        outs = []
        for query in q:
            parts = []
            for h in range(heads):
                cut = slice(h * width, (h + 1) * width)
                scores = np.exp([key[cut] @ query[cut] / math.sqrt(width) for key in k])
                parts.append(scores @ [value[cut] for value in v] / scores.sum())
            outs.append(self.linear(np.concatenate(parts), f"{path}/o", layer))
        return outs

    def embed(self, document, types=None):
        if isinstance(self.config.input, Text):
            tables = [self.w[f"input/{name}/embedding"] for name in ("tokens", "positions", "types")]
            types = [0] * len(document) if types is None else types
            return [sum(t[i] for t, i in zip(tables, at)) for at in zip(document, range(len(document)), types)]
        p, xs = self.config.input.patch, [self.w["input/class_token"]]
        for row in range(0, document.shape[0], p):
            for column in range(0, document.shape[1], p):
                patch = document[row : row + p, column : column + p]
                xs.append(self.linear(np.concatenate([patch[..., c].ravel() for c in range(3)]), "input/patches"))
        return [x + place for x, place in zip(xs, self.w["input/positions/embedding"], strict=True)]

    def tokens(self, document, types=None):
        xs = self.embed(document, types)
        if self.config.embed_norm:
            xs = [self.norm(x, "embed_norm") for x in xs]
        for layer in range(self.config.num_layers):
            if self.config.placement == "pre":
                normed = [self.norm(x, "layers/attn_norm", layer) for x in xs]
                xs = [x + out for x, out in zip(xs, self.attend(normed, normed, "layers/attn", layer))]
                xs = [x + self.mlp(self.norm(x, "layers/mlp_norm", layer), "layers/mlp", layer) for x in xs]
            else:
                outs = self.attend(xs, xs, "layers/attn", layer)
                xs = [self.norm(x + out, "layers/attn_norm", layer) for x, out in zip(xs, outs)]
                xs = [self.norm(x + self.mlp(x, "layers/mlp", layer), "layers/mlp_norm", layer) for x in xs]
        return [self.norm(x, "final_norm") for x in xs] if self.config.placement == "pre" else xs

    def pooled(self, xs):
        pool = self.config.pool
        if pool.by == "map":
            (out,) = self.attend([self.w["pool/probe"]], xs, "pool/attn")
            out = out + self.mlp(self.norm(out, "pool/norm"), "pool/mlp")
        else:
            out = {"cls": xs[0], "last": xs[-1], "mean": sum(xs) / len(xs)}[pool.by]
        out = out if pool.dense == "none" else self.linear(out, "pool/dense")
        out = np.tanh(out) if pool.dense == "tanh" else out
        return out / np.sqrt((out**2).sum()) if pool.normalise else out


POOLS = [
    Pool(by="mean"),
    Pool(by="cls", dense="tanh", num_classes=4),
    Pool(by="last", dense="linear", dim=5, normalise=True, num_classes=3),
    Pool(by="map", normalise=True),
]


def close(got, expected, atol=2e-5):
    np.testing.assert_allclose(np.asarray(got), expected, atol=atol, rtol=2e-5)


@pytest.mark.parametrize(
    ("placement", "activation", "pool"),
    [("sum", "gelu", POOLS[0]), ("pre", "quick_gelu", POOLS[1]), ("sum", "gelu", POOLS[2]), ("pre", "gelu", POOLS[3])],
    ids=lambda each: getattr(each, "by", each),
)
def test_text_follows_the_equations(placement, activation, pool, tokens):
    """Packed, padded, with types; each document as if it were alone."""
    fields = {**BERT, "placement": placement, "activation": activation, "embed_norm": placement == "sum"}
    model = build(**fields, pool=pool)
    reference = Reference(model)
    segments = np.array([[1, 1, 1, 2, 2, 0, 0], [0, 1, 1, 1, 1, 1, 1]], np.int32)
    types = np.array([[0, 1, 1, 1, 0, 0, 1], [0, 0, 0, 0, 1, 1, 1]], np.int32)
    made = run(model, tokens, segment_ids=segments, token_types=types, num_segments=2)
    for row, segment in ((0, 1), (0, 2), (1, 1)):
        at = segments[row] == segment
        expected = reference.tokens(tokens[row, at], types[row, at])
        close(made.tokens[row, at], expected)
        vector = reference.pooled(expected)
        close(made.pooled[row, segment - 1], vector)
        if pool.num_classes:
            close(made.logits[row, segment - 1], reference.linear(vector, "head"), 5e-5)
    assert not np.asarray(made.tokens)[segments == 0].any()


@pytest.mark.parametrize("pool", [POOLS[1], POOLS[3]], ids=lambda pool: pool.by)
def test_images_follow_the_equations(pool, images):
    model = build(**VIT, pool=pool)
    reference = Reference(model)
    made = run(model, images)
    for row, image in enumerate(images):
        expected = reference.tokens(image.astype(np.float64))
        close(made.tokens[row], expected)
        close(made.pooled[row], reference.pooled(expected))
        if pool.num_classes:
            close(made.logits[row], reference.linear(reference.pooled(expected), "head"), 5e-5)


@pytest.mark.usefixtures("accelerator")
def test_the_form_for_accelerators_follows_the_equations(tokens):
    model, ids = build(**{**BERT, **ONE}, pool=POOLS[3]), np.array([[1] * 7, [1] * 4 + [0] * 3])
    function = compiled(lambda model: model(tokens, segment_ids=ids))
    made, reference = function(model), Reference(model)
    close(made.pooled[1], reference.pooled(reference.tokens(tokens[1, :4])))
    assert "stablehlo.optimization_barrier" not in function.lower(model).as_text()


def test_without_a_vector_every_token_has_logits(tokens):
    model = build(**BERT, pool=Pool(num_classes=3))
    made, reference = run(model, tokens), Reference(model)
    assert made.pooled is None
    close(made.logits[1], [reference.linear(x, "head") for x in reference.tokens(tokens[1])], 5e-5)


@pytest.fixture(scope="module")
def sentences():
    return build(**BERT, pool=Pool(by="mean", normalise=True))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_packed_documents_are_as_if_alone(sentences, lengths, padding, seed):
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, 17, length) for length in lengths]
    seq = 4 * 4 + 3
    fill = seq - sum(lengths) - padding
    row = np.concatenate([np.zeros(padding), *documents, np.zeros(fill)]).astype("int32")
    ids = np.repeat([0, *range(1, len(lengths) + 1), 0], [padding, *lengths, fill]).astype("int32")
    made = run(sentences, row[None], segment_ids=ids[None], num_segments=4)
    for number, document in enumerate(documents):
        alone = np.zeros((1, 4), "int32")
        alone[0, : len(document)] = document
        expected = run(sentences, alone, segment_ids=(np.arange(4) < len(document)).astype("int32")[None])
        close(np.asarray(made.tokens)[0, ids == number + 1], np.asarray(expected.tokens)[0, : len(document)])
        close(np.asarray(made.pooled)[0, number], np.asarray(expected.pooled)[0])


def test_scanned_unrolled_kept_and_recomputed_are_the_same(tokens):
    """The same elements are dropped too."""
    model = build(**BERT, pool=Pool(by="cls"), dropout=0.3, scan="off", remat="none")

    def loss(model, key):
        made = model(tokens, rngs=nnx.Rngs(dropout=key))
        return (made.pooled**2).sum() + made.tokens[0, 1, 2]

    both = compiled(jax.value_and_grad(loss))
    value, grad = both(model, jax.random.key(3))
    assert value != both(model, jax.random.key(4))[0]
    other, found = both(like(model, scan="on", remat="block"), jax.random.key(3))
    np.testing.assert_allclose(other, value, rtol=1e-5)
    for path, leaf in tree.flatten(grad).items():
        close(tree.flatten(found)[path], leaf, 1e-5 * max(1, float(np.abs(leaf).max())))
    text = str(jax.make_jaxpr(lambda model: model(tokens).tokens)(like(model, scan="on")))
    assert "scan[" in text
    assert "scan[" not in str(jax.make_jaxpr(lambda model: model(tokens).tokens)(model))


def test_padding_reaches_nobody_and_no_gradient(tokens):
    """Not even an id that is none, whose vector is NaN."""
    model = build(**BERT, pool=Pool(by="map", num_classes=3))
    ids = np.array([[1, 1, 1, 1, 0, 0, 0], [0] * 7], np.int32)
    damaged = np.where(ids == 0, 99, tokens)

    def loss(model, tokens):
        made = model(tokens, segment_ids=ids)
        return (made.logits[0] ** 2).sum() + (made.tokens**2).sum(), made.logits

    both = compiled(jax.value_and_grad(loss, has_aux=True))
    (value, _), grad = both(model, tokens)
    (other, logits), found = both(model, damaged)
    assert value == other
    assert np.isfinite(logits).all()  # of a row that is all padding, too
    for path, leaf in tree.flatten(grad).items():
        assert np.isfinite(leaf).all(), path
        np.testing.assert_array_equal(tree.flatten(found)[path], leaf, err_msg=path)
    assert np.isnan(run(model, damaged).tokens[0]).all()


def first_two(made):
    """The loss if the first picture is of class 0 and the second of class 1."""
    return -jax.nn.log_softmax(made.logits)[jnp.arange(2), jnp.arange(2)].mean()


@pytest.mark.parametrize("pool", [Pool(by="cls", num_classes=3), Pool(by="map", num_classes=3)], ids=lambda p: p.by)
def test_every_parameter_of_a_classifier_learns(pool, images):
    model = fresh(EncoderConfig(**{**VIT, **ONE}, pool=pool))
    found = tree.flatten(compiled(jax.grad(lambda model: first_two(model(images))))(model))
    size = {path: float(np.abs(leaf).max()) for path, leaf in found.items()}
    # A bias of all keys adds the same to all scores of a query, which the softmax does not see.
    without = {path for path in size if path.endswith("attn/k/bias")}
    assert len(without) == 1 + (pool.by == "map")
    for path, largest in size.items():
        beside = size[path.replace("k/bias", "v/bias")]
        assert largest < 1e-6 * beside if path in without else largest > 1e-7, path


def test_trains(images):
    """A few steps down the gradient tell two pictures apart."""
    model = fresh(EncoderConfig(**{**VIT, **ONE}, pool=Pool(by="cls", num_classes=2)))

    def step(model, _):
        value, grad = jax.value_and_grad(lambda model: first_two(model(images)))(model)
        return jax.tree.map(lambda w, g: w - 0.3 * g, model, grad), value

    losses = compiled(lambda model: jax.lax.scan(step, model, length=60))(model)[1]
    assert losses[-1] < losses[0] / 10


def test_start():
    config = EncoderConfig(input=Image(), num_layers=8, embed_dim=192, num_heads=3, pool=Pool(by="cls", num_classes=9))
    found = tree.flatten(fresh(config))
    assert found["layers/attn/q/kernel"].std() == pytest.approx(0.02, rel=0.05)
    assert found["layers/mlp/down/kernel"].std() == pytest.approx(0.02 / 4, rel=0.05)
    assert not any(leaf.any() for path, leaf in found.items() if path.endswith("bias"))
    assert len({leaf.tobytes() for path, leaf in found.items() if path.endswith("kernel")}) == 8


@pytest.mark.parametrize(
    "fields",
    [
        {**BERT, "pool": POOLS[1]},
        {**VIT, "pool": POOLS[3], "qkv_bias": False},
        {**VIT, "input": Image(height=4, width=4, patch=2, patch_bias=False), "pool": Pool(num_classes=2)},
        {**SIZES, "input": Text(), "pool": POOLS[2]},
    ],
)
def test_every_parameter_has_axes(fields):
    config = EncoderConfig(**fields)
    leaves = tree.flatten(nnx.eval_shape(lambda: config.build(rngs=nnx.Rngs(0))))
    axes = config.logical_axes()
    assert axes.keys() == leaves.keys()
    assert all(len(axes[path]) == leaf.ndim for path, leaf in leaves.items())


def test_two_towers(images, tokens):
    image = EncoderConfig(**{**VIT, **ONE}, pool=Pool(by="map"))
    text = EncoderConfig(**ONE, input=TEXT, pool=Pool(by="last", dense="linear"))
    config = TowersConfig(image=image, text=text)
    model = fresh(config)
    assert tree.flatten(model).keys() == config.logical_axes().keys()
    made, logits = compiled(lambda m: ((m.image(images), m.text(tokens)), m(images, tokens)))(model)
    seen, read = (np.asarray(each.pooled, np.float64) for each in made)
    seen, read = (each / np.linalg.norm(each, axis=-1, keepdims=True) for each in (seen, read))
    close(logits, 10 * seen @ read.T - 10)
    assert isinstance(model.text, Encoder)


def test_dtypes(tokens, images):
    policy = "params=f32,compute=bf16,output=f32"
    fields = {**BERT, **ONE, "pool": POOLS[1]}
    made, exact = run(build(policy, **fields), tokens), run(build(**fields), tokens)
    assert {leaf.dtype for leaf in jax.tree.leaves(made)} == {jnp.dtype("float32")}
    assert 0 < np.abs(made.tokens - exact.tokens).max() < 0.2
    model = build("params=bf16,compute=bf16,output=bf16", **{**VIT, **ONE}, pool=POOLS[3])
    made = jax.eval_shape(lambda: model(jnp.asarray(images)))
    assert {leaf.dtype for leaf in jax.tree.leaves(made)} == {jnp.dtype("bfloat16")}


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
def test_patches_are_the_pixels(rows, columns, patch, channels, batch):
    images = np.random.default_rng(0).normal(size=(batch, rows * patch, columns * patch, channels))
    made = patch_rows(images, patch)
    assert made.shape == (batch, rows * columns, channels * patch * patch)
    for number in range(rows * columns):
        at = slice(number // columns * patch, (number // columns + 1) * patch)
        across = slice(number % columns * patch, (number % columns + 1) * patch)
        expected = np.moveaxis(images[:, at, across], -1, 1).reshape(batch, -1)
        np.testing.assert_array_equal(made[:, number], expected)


@pytest.mark.parametrize(
    ("name", "inputs", "others", "messages"),
    [
        ("text", np.zeros((1, 10), int), {}, ["tokens: expected at most max_len = 9 a row, got 10"]),
        ("text", np.zeros(3, int), {}, ["tokens: expected [batch, seq]"]),
        ("text", np.zeros((1, 3)), {"segment_ids": np.zeros((1, 4), int)}, ["an integer dtype", "segment_ids: exp"]),
        ("text", np.zeros((1, 3), int), {"num_segments": 2}, ["num_segments: expected 1 or more, and segment_ids"]),
        ("plain", np.zeros((1, 3), int), {"token_types": np.zeros((1, 3), int)}, ["token_types: expected none"]),
        ("image", np.zeros((1, 3, 4, 6), int), {}, ["images: expected [batch, 4, 6, 3], got [1, 3, 4, 6]", "floating"]),
        ("image", np.zeros((1, 4, 6, 3)), {"positions": np.zeros((1, 7), int)}, ["positions: expected none beside"]),
    ],
)
def test_wrong_inputs(name, inputs, others, messages):
    fields = {"text": BERT, "plain": {**SIZES, "input": Text()}, "image": VIT}[name]
    model = nnx.eval_shape(lambda: EncoderConfig(**fields).build(rngs=nnx.Rngs(0)))
    with pytest.raises(UserError) as caught:
        model(inputs, **others)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(messages)
    assert all(message in line for message, line in zip(messages, lines, strict=True))
