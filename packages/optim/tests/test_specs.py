"""Axes by rule and by shape, and matrices out of any of them and back."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.core import UserError
from styrax.optim import ParamSpec, specs
from styrax.optim.specs import need_axes


def test_what_the_shape_tells(model):
    found = specs(model(), axes={"layers/attn/q/kernel": "sioo"}, heads={"layers/attn/q/kernel": 2})
    assert {path: (spec.role, spec.axes) for path, spec in found.items()} == {
        "embed/embedding": ("embed", "io"),
        "head/bias": ("vector", "o"),
        "head/kernel": ("head", "io"),
        "layers/attn/q/bias": ("vector", "soo"),
        "layers/attn/q/kernel": ("matrix", "sioo"),
        "layers/attn/sinks": ("vector", "so"),
        "layers/gain": ("scalar", "s"),
        "layers/mlp/up/kernel": ("matrix", "sio"),
        "layers/norm/scale": ("vector", "so"),
        "norm/scale": ("vector", "o"),
        "temperature": ("scalar", ""),
    }
    assert found["layers/attn/q/kernel"].heads == 2


def test_nothing_is_guessed(model):
    found = specs(model())
    assert found["layers/attn/q/kernel"].axes is None
    with pytest.raises(UserError, match=r"muon must know which axes.*\n  'layers/attn/q/kernel'"):
        need_axes(found, [path for path, spec in found.items() if spec.role == "matrix"], "muon")


@settings(max_examples=6)
@given(st.data())
def test_matrices_and_back(data):
    letters = "".join(data.draw(st.permutations("s" * data.draw(st.integers(0, 2)) + "i" * 2 + "o" * 2)))
    shape = tuple(data.draw(st.integers(1, 4)) for _ in letters)
    spec = ParamSpec("matrix", letters)
    divisors = [n for n in range(1, 17) if spec.fan_out(shape) % n == 0]
    spec = ParamSpec("matrix", letters, data.draw(st.sampled_from(divisors)))
    x = jnp.arange(int(np.prod(shape)), dtype=jnp.float32).reshape(shape)
    matrices = spec.to_matrices(x)
    copies = int(np.prod([shape[a] for a in spec.stack_axes]))
    assert matrices.shape == (copies * spec.heads, spec.fan_in(shape), spec.fan_out(shape) // spec.heads)
    np.testing.assert_array_equal(spec.from_matrices(matrices, shape), x)


def test_a_matrix_maps_inputs_to_the_outputs_of_its_head():
    kernel = np.random.default_rng(0).normal(size=(3, 5, 4, 2)).astype(np.float32)  # layers, inputs, heads, width
    matrices = ParamSpec("matrix", "sioo", heads=4).to_matrices(jnp.asarray(kernel))
    x = np.random.default_rng(1).normal(size=5).astype(np.float32)
    for layer in range(3):
        for head in range(4):
            np.testing.assert_allclose(x @ matrices[4 * layer + head], x @ kernel[layer, :, head], rtol=1e-5, atol=1e-6)


def test_mistakes_are_all_named(model):
    with pytest.raises(UserError) as caught:
        specs(
            model(),
            axes={"layers/mlp/up/kernel": "si", "head/kernel": "xo", "nowhere": "io"},
            heads={"embed/embedding": 3, "layers/attn/q/kernel": 2, "norms/scale": 1},
        )
    for part in (
        "axes 'si' of 'layers/mlp/up/kernel': expected 3 letters",
        "axes 'xo' of 'head/kernel': expected 2 letters of s (stacked), i (input), o (output)",
        "axes rule 'nowhere' fits no parameter",
        "heads 3 of 'embed/embedding': expected a divisor",
        "heads 2 of 'layers/attn/q/kernel'",
        "heads rule 'norms/scale' fits no parameter (did you mean 'norm/scale'?)",
    ):
        assert part in str(caught.value)


def test_names_of_axes_in_nnx_metadata():
    nnx = pytest.importorskip("flax.nnx")

    def named(shape, *names):
        return nnx.Param(jnp.ones(shape), out_sharding=names, eager_sharding=False)

    params = nnx.State(
        {
            "layers": {
                "q": {"kernel": named((2, 4, 2, 3), "layers", "embed", "heads", None)},
                "up": {"kernel": named((2, 4, 8), "layers", "embed", "mlp"), "bias": named((2, 8), "layers", "mlp")},
                "down": {"kernel": named((2, 8, 4), "layers", "mlp", "embed")},
                "norm": {"scale": named((2, 4), "layers", "embed")},
            },
            "out": {"kernel": named((3, 3, 4, 5), "y", "x", "embed", "mlp")},
            "plain": {"kernel": nnx.Param(jnp.ones((4, 5)))},
        }
    )
    logical = {"layers": "s", "embed": "i", "mlp": "o", ("layers", "mlp", "embed"): "sio"}
    found = specs(params, logical=logical)
    assert {path: spec.axes for path, spec in found.items()} == {
        "layers/down/kernel": "sio",
        "layers/norm/scale": "so",
        "layers/q/kernel": None,
        "layers/up/bias": "so",
        "layers/up/kernel": "sio",
        "out/kernel": None,
        "plain/kernel": "io",
    }
    ruled = specs(params, logical={**logical, ("layers", "embed", "heads", None): "sioo"}, axes={"out/*": "iiio"})
    assert ruled["layers/q/kernel"].axes == "sioo" and ruled["out/kernel"].axes == "iiio"
    with pytest.raises(UserError, match=r"(?s)logical axes 'embedd': no parameter.*axes 'z' of 'layers/norm/scale'"):
        specs(params, logical={"embedd": "i", ("layers", "embed"): "z"})
    assert specs({"w": jnp.ones((2, 3))})["w"].axes == "io"
