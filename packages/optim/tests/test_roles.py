import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from styrax.optim import AdamW, Parameters, describe, roles


def test_roles_of_a_model(model):
    assert roles(model()) == {
        "embed/embedding": "embed",
        "head/bias": "vector",
        "head/kernel": "head",
        "layers/attn/q/bias": "vector",
        "layers/attn/q/kernel": "matrix",
        "layers/attn/sinks": "vector",
        "layers/gain": "scalar",
        "layers/mlp/up/kernel": "matrix",
        "layers/norm/scale": "vector",
        "norm/scale": "vector",
        "temperature": "scalar",
    }


def test_decay_by_convention(model):
    decayed = {row.path for row in AdamW().describe(model()) if row.decay}
    assert decayed == {"head/kernel", "layers/attn/q/kernel", "layers/mlp/up/kernel"}
    everything = AdamW(parameters=Parameters(decay_roles=("matrix", "head", "embed"))).describe(model())
    assert {row.path for row in everything if row.decay} == decayed | {"embed/embedding"}


@pytest.mark.parametrize(
    ("path", "shape", "role"),
    [
        ("layers/0/mlp/kernel", (4, 4), "matrix"),
        ("layers/0/norm/scale", (4,), "vector"),
        ("layers/0/gain", (), "scalar"),
        ("model/layers/mlp/kernel", (2, 4, 4), "matrix"),
        ("layers/experts/up/kernel", (2, 3, 4, 4), "matrix"),
        ("layers/q_bias", (2, 4, 4), "vector"),
        ("layers/ln_1/weight", (2, 4), "vector"),
        ("layers/q_norm/scale", (2, 4, 8), "vector"),
        ("wte/embedding", (9, 4), "embed"),
        ("pos_embed", (9, 4), "embed"),
        ("tok/embedding", (9, 4), "embed"),
        ("lm_head/kernel", (4, 9), "head"),
        ("unembed/kernel", (4, 9), "head"),
        ("conv/kernel", (3, 3, 4, 8), "matrix"),
        ("head", (4, 9), "head"),
    ],
)
def test_names_in_use(path, shape, role):
    tree = np.zeros(shape)
    for key in reversed(path.split("/")):
        tree = {key: tree}
    assert roles(tree) == {path: role}


def test_rules_come_first_and_beat_shape(model):
    found = roles(model(), {"**/sinks": "matrix", "head/**": "matrix"})
    assert found["layers/attn/sinks"] == "matrix"
    assert found["head/bias"] == "matrix"


def test_every_mistake_is_listed(model):
    with pytest.raises(ValueError, match="parameter roles") as error:
        roles(model(), {"layers/mpl/up/kernel": "matrix", "head/**": "hed", "head/bias": "vector"})
    text = str(error.value)
    assert "rule 'layers/mpl/up/kernel' fits no parameter (did you mean 'layers/mlp/up/kernel'?)" in text
    assert "rule 'head/**' gives 'hed', which is no role (did you mean 'head'?)" in text
    assert "rule 'head/bias' decides nothing" in text


def test_shadowed_rule(model):
    with pytest.raises(ValueError, match=r"'head/bias' decides nothing: .*'head/\*\*'"):
        roles(model(), {"head/**": "head", "head/bias": "vector"})


def test_strict_without_defaults(model):
    with pytest.raises(ValueError, match="no rule fits 'norm/scale'") as error:
        roles(model(), {"layers/**": "matrix", "embed/**": "embed"}, defaults={})
    assert str(error.value).count("no rule fits") == 4


def test_other_names_for_stacks():
    tree = {"blocks": {"scale_up": np.zeros((3, 4)), "kernel": np.zeros((3, 4, 4))}}
    assert roles(tree, stacked=("blocks",)) == {"blocks/kernel": "matrix", "blocks/scale_up": "vector"}
    assert roles(tree)["blocks/scale_up"] == "matrix"


names = st.sampled_from(["layers", "embed", "head", "norm", "kernel", "bias", "0", "weird name", "a/b", "w"])


@given(st.dictionaries(st.lists(names, min_size=1, max_size=4).map(tuple), st.integers(0, 4), max_size=6))
def test_total_and_consistent(leaves):
    """Any tree has a role for each leaf; no array of fewer than two own axes is ever decayed."""
    tree = [{"/".join(keys): np.zeros((1,) * ndim)} for keys, ndim in leaves.items()]
    rows = describe(tree)
    assert len(rows) == len(leaves)
    for row in rows:
        if row.decay:
            assert len(row.shape) >= 2
            assert row.role in ("matrix", "head")


def test_abstract_and_nnx_trees(model):
    abstract = jax.eval_shape(lambda: model())
    assert roles(abstract) == roles(model())
    nnx = pytest.importorskip("flax.nnx")
    linear = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    assert roles(nnx.state(linear, nnx.Param)) == {"bias": "vector", "kernel": "matrix"}


def test_table(model):
    table = describe(model(), lr_multipliers={"embed": 3.0})
    text = str(table)
    assert ["embed/embedding", "(7,", "4)", "embed", "3", "0", "112"] in [line.split() for line in text.splitlines()]
    assert text.endswith("11 arrays, 170 parameters, 108 with weight decay, 680 bytes")
    assert str(describe({})).endswith("0 arrays, 0 parameters, 0 with weight decay, 0 bytes")
