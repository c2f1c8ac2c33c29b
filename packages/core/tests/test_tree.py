import fnmatch
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from styrax.core import tree

KEYS = st.text("ab/%*é", max_size=3)
TREES = st.recursive(
    st.integers(),
    lambda inner: st.dictionaries(KEYS, inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=8,
)


class State(NamedTuple):
    count: Any
    value: Any


@given(TREES)
def test_flatten_and_unflatten_are_inverse(value):
    flat = tree.flatten(value)
    assert tree.unflatten(value, flat) == value
    assert list(flat.values()) == jax.tree.leaves(value)


@given(TREES)
def test_paths_are_those_of_jax(value):
    paths = [tree.path_str(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(value)[0]]
    assert list(tree.flatten(value)) == paths


def test_containers():
    value = {"opt": [State(count=1, value={"a/b": 2, "50%": 3})], "none": None}
    assert tree.flatten(value) == {"opt/0/count": 1, "opt/0/value/50%25": 3, "opt/0/value/a%2Fb": 2}
    assert tree.flatten(State(1, 2)) == {"count": 1, "value": 2}  # a field `value` of one's own is kept
    assert tree.flatten(5) == {"": 5}
    assert tree.flatten(None) == {}


def test_equal_paths_are_refused():
    class Pair:
        pass

    jax.tree_util.register_pytree_with_keys(
        Pair, lambda p: (((jax.tree_util.DictKey("x"), 1), (jax.tree_util.GetAttrKey("x"), 2)), None), lambda *_: Pair()
    )
    with pytest.raises(ValueError, match="two leaves of the tree have the path 'x'"):
        tree.flatten(Pair())


def test_unflatten_lists_everything_that_does_not_fit():
    with pytest.raises(ValueError) as caught:
        tree.unflatten({"kernel": 0, "bias": 0, "scale": 0}, {"kernell": 1, "bias": 2, "z": 3})
    assert str(caught.value).splitlines() == [
        "the leaves do not fit the tree: 2 missing, 2 too many",
        "  missing: 'kernel' (did you mean 'kernell'?)",
        "  missing: 'scale'",
        "  not in the tree: 'kernell'",
        "  not in the tree: 'z'",
    ]


def test_map_with_path():
    got = tree.map_with_path(lambda path, a, b: (path, a + b), {"x": 1, "y": [2]}, {"x": 10, "y": (20,)})
    assert got == {"x": ("x", 11), "y": [("y/0", 22)]}
    with pytest.raises(ValueError, match=r"tree 2 has other leaves than tree 1:\n  y"):
        tree.map_with_path(lambda path, a, b: a, {"x": 1}, {"x": 1, "y": 2})


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("**", "", True),
        ("**", "a/b/c", True),
        ("a/**", "a", True),
        ("a/**", "ab", False),
        ("**/b", "b", True),
        ("**/b", "a/a/b", True),
        ("a/**/b", "a/b", True),
        ("a/**/b", "a/x/y/b", True),
        ("a/**/b", "a/xb", False),
        ("*/b", "a/b", True),
        ("*/b", "a/a/b", False),
        ("l*r/*", "layer/k", True),
        ("a.c", "abc", False),
        ("a[b]", "a[b]", True),
        ("a?", "ab", False),
        ("a", "a/b", False),
        ("**/layers/*/attn/**", "decoder/layers/3/attn/q/kernel", True),
    ],
)
def test_match(pattern, path, expected):
    assert tree.match(pattern, path) is expected


@given(st.text("ab*", max_size=5), st.text("ab", max_size=5))
def test_match_within_a_segment_is_fnmatch(pattern, path):
    if "**" not in pattern:
        assert tree.match(pattern, path) == fnmatch.fnmatchcase(path, pattern)


@given(
    st.lists(st.sampled_from(["a", "b", "**", "*"]), min_size=1, max_size=5),
    st.lists(st.sampled_from("ab"), max_size=5),
)
def test_match_over_segments_is_its_recursive_definition(pattern, path):
    def matches(pattern: list[str], path: list[str]) -> bool:
        if not pattern:
            return not path
        if pattern[0] == "**":
            return matches(pattern[1:], path) or (bool(path) and matches(pattern, path[1:]))
        return bool(path) and pattern[0] in ("*", path[0]) and matches(pattern[1:], path[1:])

    if path:
        assert tree.match("/".join(pattern), "/".join(path)) == matches(pattern, path)


def test_label():
    params = {"layers": {"kernel": 1, "bias": 2}, "norm": {"scale": 3}}
    rules = {"**/bias": "none", "**/scale": "none", "**": "decay"}
    assert tree.label(params, rules) == {
        "layers/bias": "none",
        "layers/kernel": "decay",
        "norm/scale": "none",
    }
    assert tree.first_match(rules, "x/bias") == "none"
    assert tree.first_match({"a": 1}, "b") is None
    assert tree.first_match({"a": 1}, "b", 7) == 7
    with pytest.raises(ValueError) as caught:
        tree.label(params, {"**/bias": 1, "norm/scales": 2}, what="weight")
    assert str(caught.value).splitlines() == [
        "2 weight(s) fit no rule, 1 rule(s) fit no weight:",
        "  no rule for 'layers/kernel'",
        "  no rule for 'norm/scale'",
        "  rule 'norm/scales' fits nothing (did you mean 'norm/scale'?)",
    ]


def test_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.proj = nnx.Linear(2, 3, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(2, 2, use_bias=False, rngs=rngs) for _ in range(2)])

    model = Model(nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    paths = ["layers/0/kernel", "layers/1/kernel", "proj/bias", "proj/kernel"]
    for form in (model, params, nnx.to_pure_dict(params), nnx.state(model)):
        assert sorted(tree.flatten(form)) == paths
        assert all(isinstance(leaf, jax.Array) for leaf in tree.flatten(form).values())
    keys = [key for key, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    assert [tree.path_str(key) for key in keys] == list(tree.flatten(params))

    doubled = tree.map_with_path(lambda path, leaf: 2 * leaf, params)
    assert jax.tree.structure(doubled) == jax.tree.structure(params)
    np.testing.assert_array_equal(nnx.merge(graphdef, doubled).proj.kernel[...], 2 * model.proj.kernel[...])

    abstract = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), nnx.Param)[1]
    assert {path: leaf.shape for path, leaf in tree.flatten(abstract).items()} == {
        path: leaf.shape for path, leaf in tree.flatten(params).items()
    }
    mixed = tree.map_with_path(lambda path, leaf, like: leaf.astype(like.dtype), nnx.to_pure_dict(params), abstract)
    assert tree.flatten(mixed)["proj/bias"].dtype == jnp.float32
    state = {"mu": params, "count": 0}
    assert sorted(tree.flatten(state)) == ["count", *(f"mu/{path}" for path in paths)]
