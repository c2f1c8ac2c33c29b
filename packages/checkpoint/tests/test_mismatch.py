"""A restore that does not fit is one error with every difference; a save that cannot be is one, too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig, CheckpointError
from styrax.core import UserError


@pytest.fixture
def store(tmp_path):
    with CheckpointConfig(pack_below=100).build(tmp_path) as store:
        store.save(
            7,
            {
                "params": {
                    "embed": np.zeros((8, 4), np.float32),
                    "layers": [{"q": np.zeros((4, 4), np.float32), "k": np.zeros(3, np.int32)}],
                    "key": jax.random.key(0),
                },
                "opt_state": {"count": 3, "mu": np.zeros(2)},
                "run": {"step": 7},
            },
        )
        yield store


def message(store, like):
    with pytest.raises(CheckpointError) as caught:
        store.restore(7, like)
    assert isinstance(caught.value, UserError) and caught.value.exit_code == 1
    return str(caught.value)


def test_lists_every_difference(store):
    like = {
        "params": {
            "embed": jax.ShapeDtypeStruct((8, 5), jnp.bfloat16),
            "layers": [{"qq": jax.ShapeDtypeStruct((4, 4), jnp.float32), "k": np.zeros(3, np.int64)}],
            "key": jax.random.key(0, impl="rbg"),
        },
        "opt_state": {"count": np.zeros(()), "mu": 1.0},
        "optstate": None,
        "run": {"step": jax.ShapeDtypeStruct((), jnp.int32)},
    }
    text = message(store, like)
    for line in (
        "params/embed: shape [8, 4] in the checkpoint, [8, 5] asked for",
        "params/embed: dtype float32 in the checkpoint, bfloat16 asked for",
        "params/layers/0/qq: missing from the checkpoint (did you mean 'layers/0/q'?)",
        "params/layers/0/q: in the checkpoint, not asked for",
        "params/layers/0/k: dtype int32 in the checkpoint, int64 asked for",
        "params/key: dtype key<fry> in the checkpoint, key<rbg> asked for",
        "opt_state/count: a Python int in the checkpoint, float64[] asked for",
        "opt_state/mu: float64[2] in the checkpoint, a Python float asked for",
        "item 'optstate': not in the checkpoint (did you mean 'opt_state'?)",
        "item 'run': is plain JSON in the checkpoint; ask for it with None",
    ):
        assert f"\n  {line}\n" in text
    assert "step 7" in text and "10 difference(s)" in text


@pytest.mark.parametrize("wrong", [np.zeros(2, np.uint32), jax.ShapeDtypeStruct((2,), jnp.uint32)])
def test_a_key_is_not_its_data(store, wrong):
    assert "params/key: dtype key<fry> in the checkpoint, uint32 asked for" in message(
        store, {"params": {"key": wrong}}
    )


def test_a_sharding_that_does_not_divide(store):
    mesh = jax.sharding.AbstractMesh((3,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    like = {"params": {"embed": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)}}
    assert "params/embed: shape [8, 4] cannot be laid out as asked" in message(store, like)


def test_nothing_is_cast_by_jax(store):
    store.save(8, {"item": {"wide": np.arange(200.0), "small": np.arange(3)}})
    like = {"wide": jax.ShapeDtypeStruct((200,), np.float64), "small": jax.ShapeDtypeStruct((3,), np.int64)}
    with pytest.raises(CheckpointError) as caught:
        store.restore(8, {"item": like})
    assert "item/wide: jax would cast float64: set jax_enable_x64, or ask for a numpy array" in str(caught.value)
    assert "item/small: jax would cast int64" in str(caught.value)


def test_an_empty_tree_is_not_a_full_one(store):
    assert "opt_state/mu: in the checkpoint, not asked for" in message(store, {"opt_state": ()})
    assert "ask for it with None" in message(store, {"run": ()})


def test_missing_step_names_those_that_are_there(store):
    store.wait()
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 8 in .*: there are 7"):
        store.restore(8, {"run": None})


def test_what_cannot_be_saved_is_listed(store):
    deleted = jnp.zeros(2)
    deleted.delete()
    bad = {
        "object": object(),
        "abstract": jax.ShapeDtypeStruct((2,), jnp.float32),
        "deleted": deleted,
        "text": np.array(["a"]),
        "objects": np.array([object()]),
        "foreign": np.zeros(2, ">f4"),
        "record": np.zeros(2, [("a", "f4")]),
        "set": bytearray(b"x"),
        "good": np.zeros(2),
    }
    with pytest.raises(CheckpointError) as caught:
        store.save(8, {"params": bad, "more": {"x": {1, 2}}, "keys": {frozenset(): np.zeros(1)}})
    text = str(caught.value)
    for path in ("object", "abstract", "deleted", "text", "objects", "foreign", "record", "set"):
        assert f"\n  params/{path}: " in text
    assert "params/good" not in text
    assert "\n  more/x: is set" in text
    assert "\n  keys: the dictionary key frozenset()" in text
    with pytest.raises(CheckpointError, match="is being traced"):
        jax.jit(lambda x: store.save(9, {"a": {"x": x}}))(jnp.zeros(2))
    with pytest.raises(CheckpointError, match=r"item '\.\./up'.*\n.*item ''"):
        store.save(9, {"../up": {}, "": {}})
    for step in (-1, 1.0, True, "3", None):
        with pytest.raises(CheckpointError, match="step: expected an integer, 0 or more"):
            store.save(step, {})
    store.save(8, {"params": {"good": np.zeros(2)}})
    store.wait()
    assert store.steps() == [7, 8]
