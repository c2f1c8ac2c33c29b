"""Go on where torch stopped: against torch itself, and against a loop in numpy that is torch's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from styrax.core import UserError
from styrax.optim import adamw, groups, guard, state_shardings
from styrax.optim.precision import precision
from styrax.optim.torch_state import Place, from_torch_adamw

HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1}
SHAPES = {"wte.weight": (5, 3), "h.0.fc.weight": (4, 3), "h.1.fc.weight": (4, 3), "ln.weight": (3,), "odd": (2, 3, 4)}
KEY_MAP = {
    "wte.weight": "embed/embedding",
    "h.0.fc.weight": ("layers/fc/kernel", True, 0),
    "h.1.fc.weight": Place("layers/fc/kernel", True, 1),
    "ln.weight": ("norm/scale", None),
    "odd": ("odd/kernel", (2, 0, 1)),
}


def ours(theirs):
    """The same numbers in our tree."""
    return {
        "embed": {"embedding": theirs["wte.weight"]},
        "layers": {"fc": {"kernel": np.stack([theirs["h.0.fc.weight"].T, theirs["h.1.fc.weight"].T])}},
        "norm": {"scale": theirs["ln.weight"]},
        "odd": {"kernel": theirs["odd"].transpose(2, 0, 1)},
    }


def numbers(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


class Twin:
    """`torch.optim.AdamW`, one parameter after another, in float64."""

    def __init__(self, weights):
        self.weights = {name: w.astype(np.float64) for name, w in weights.items()}
        self.state = {n: {"exp_avg": 0 * w, "exp_avg_sq": 0 * w, "step": 0} for n, w in self.weights.items()}

    def step(self, grads):
        (b1, b2), lr = HYPER["betas"], HYPER["lr"]
        for name, w in self.weights.items():
            s, g = self.state[name], grads[name].astype(np.float64)
            s["step"] += 1
            w = w * (1 - lr * HYPER["weight_decay"])
            s["exp_avg"] = s["exp_avg"] + (g - s["exp_avg"]) * (1 - b1)
            s["exp_avg_sq"] = b2 * s["exp_avg_sq"] + (1 - b2) * g * g
            root = np.sqrt(s["exp_avg_sq"]) / np.sqrt(1 - b2 ** s["step"]) + HYPER["eps"]
            self.weights[name] = w - lr / (1 - b1 ** s["step"]) * s["exp_avg"] / root

    def numpy(self):
        return {name: w.astype(np.float32) for name, w in self.weights.items()}

    def state_dict(self):
        state = {i: {k: np.asarray(v, np.float32) for k, v in s.items()} for i, s in enumerate(self.state.values())}
        return {"state": state, "param_groups": [{**HYPER, "params": list(range(len(state)))}]}


class Torch:
    """The real one."""

    def __init__(self, weights):
        self.torch = pytest.importorskip("torch")
        self.parameters = {n: self.torch.nn.Parameter(self.torch.tensor(w)) for n, w in weights.items()}
        self.optimizer = self.torch.optim.AdamW(self.parameters.values(), **HYPER)

    def step(self, grads):
        for name, parameter in self.parameters.items():
            parameter.grad = self.torch.tensor(grads[name])
        self.optimizer.step()

    def numpy(self):
        return {name: p.detach().numpy().copy() for name, p in self.parameters.items()}

    def state_dict(self):
        return self.optimizer.state_dict()


def transformation(**more):
    return adamw(HYPER["lr"], b1=0.9, b2=0.95, eps=HYPER["eps"], weight_decay=HYPER["weight_decay"], **more)


WRAPPED = {
    "alone": transformation,
    "guard": lambda: guard(transformation(), clip_norm=None),
    "groups": lambda: guard(
        groups({"a": transformation(), "b": transformation()}, {"odd/**": "b", "**": "a"}), clip_norm=None
    ),
}


@pytest.mark.parametrize("source", [Twin, Torch])
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_the_next_updates_are_those_of_torch(source, wrapped):
    theirs = source(numbers(0))
    for seed in range(1, 6):
        theirs.step(numbers(seed))
    weights = jax.tree.map(jnp.asarray, ours(theirs.numpy()))
    tx = WRAPPED[wrapped]()
    state = from_torch_adamw(theirs.state_dict(), KEY_MAP, tx.init(weights), names=list(SHAPES))
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(weights))
    update = jax.jit(tx.update)
    for seed in range(6, 9):
        before = ours(theirs.numpy())
        theirs.step(numbers(seed))
        expected = ours(theirs.numpy())
        updates, state = update(jax.tree.map(jnp.asarray, ours(numbers(seed))), state, weights)
        jax.tree.map(
            lambda u, a, b: np.testing.assert_allclose(u, a - b, rtol=1e-4, atol=1e-6), updates, expected, before
        )
        weights = optax.apply_updates(weights, updates)
        jax.tree.map(lambda w, e: np.testing.assert_allclose(w, e, rtol=1e-5, atol=1e-6), weights, expected)


def imported():
    theirs = Twin(numbers(0))
    theirs.step(numbers(1))
    return theirs.state_dict(), ours(numbers(0))


def test_names_in_the_state_dict_and_any_tree():
    state_dict, weights = imported()
    state_dict["param_groups"] = [
        {**HYPER, "params": [3, 4], "param_names": ["ln.weight", "odd"]},
        {**HYPER, "params": [0, 1, 2], "param_names": ["wte.weight", "h.0.fc.weight", "h.1.fc.weight"]},
    ]
    weights = jax.tree.map(jnp.asarray, weights)
    plain = from_torch_adamw(state_dict, KEY_MAP, adamw(1e-3).init(weights))
    assert int(plain.count) == 1
    np.testing.assert_array_equal(plain.mu["norm"]["scale"], state_dict["state"][3]["exp_avg"])
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.State(jax.tree.map(nnx.Param, weights))
    state = from_torch_adamw(state_dict, KEY_MAP, adamw(1e-3).init(model))
    assert jax.tree.structure(state) == jax.tree.structure(adamw(1e-3).init(model))
    np.testing.assert_array_equal(jax.tree.leaves(state.nu)[0], plain.nu["embed"]["embedding"])


def test_arrays_go_straight_to_their_shards():
    state_dict, weights = imported()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    specs = jax.tree.map(lambda w: PartitionSpec("data") if w.shape[0] == 2 else PartitionSpec(), weights)
    abstract = jax.tree.map(
        lambda w, s: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16, sharding=NamedSharding(mesh, s)), weights, specs
    )
    tx = guard(precision(adamw(1e-3), "split"))
    where = state_shardings(tx, abstract)
    empty = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(tx.init, abstract), where
    )
    state = from_torch_adamw(state_dict, KEY_MAP, empty, names=list(SHAPES))
    kernel = state.inner.inner.mu["layers"]["fc"]["kernel"]
    assert kernel.sharding == where.inner.inner.mu["layers"]["fc"]["kernel"] and kernel.dtype == jnp.float32
    assert isinstance(state.inner.rest["norm"]["scale"], jax.ShapeDtypeStruct)


def test_all_mistakes_at_once():
    state_dict, weights = imported()
    state = adamw(1e-3).init({**jax.tree.map(jnp.asarray, weights), "head": {"kernel": jnp.zeros((3, 5))}})
    key_map = {
        "wte.weight": ("embed/embeddings", None),
        "h.0.fc.weight": ("layers/fc/kernel", False, 0),
        "ln.bias": "norm/scale",
        "odd": ("odd/kernel", lambda x: x.reshape(7)),
        "h.2.fc.weight": ("layers/fc/kernel", True, 0),
        "h.1.fc.weight": ["norm/scale"],
    }
    state_dict["param_groups"][0]["amsgrad"] = True
    with pytest.raises(UserError) as caught:
        from_torch_adamw(state_dict, key_map, state, names=list(SHAPES))
    for part in (
        "group 0 has amsgrad=True",
        "'embed/embeddings': adamw has no state for it (for 'wte.weight') (did you mean 'embed/embedding'?)",
        "'layers/fc/kernel': 'h.0.fc.weight' and 'h.2.fc.weight' cannot both go there",
        "'layers/fc/kernel': nothing for 1 of its 2 copies",
        "'layers/fc/kernel': exp_avg of 'h.0.fc.weight' has shape (4, 3), expected (3, 4); transpose it?",
        "'norm/scale': torch has no state for 'ln.bias'",
        "'odd/kernel': cannot change exp_avg of 'odd', (2, 3, 4): cannot reshape",
        "'head/kernel': missing, key_map has no name for it",
        "'ln.weight' of torch is not in key_map",
        "'h.1.fc.weight': expected a path, (path, change) or (path, change, index), got ['norm/scale']",
    ):
        assert part in str(caught.value)


def test_unequal_steps_name_both():
    state_dict, weights = imported()
    state_dict["state"][4]["step"] = 7
    weights = jax.tree.map(jnp.asarray, weights)
    with pytest.raises(UserError, match=r"'wte.weight' has step 1 and 'odd' has step 7; put such"):
        from_torch_adamw(state_dict, KEY_MAP, adamw(1e-3).init(weights), names=list(SHAPES))
    apart = groups({"a": adamw(1e-3), "b": adamw(1e-3)}, {"odd/**": "b", "**": "a"})
    state = from_torch_adamw(state_dict, KEY_MAP, apart.init(weights), names=list(SHAPES))
    assert (int(state.inner["a"].count), int(state.inner["b"].count)) == (1, 7)


def test_what_is_no_state():
    state_dict, weights = imported()
    state = adamw(1e-3).init(jax.tree.map(jnp.asarray, weights))
    with pytest.raises(UserError, match=r"3 names, but the state_dict has 5 parameters"):
        from_torch_adamw(state_dict, KEY_MAP, state, names=list(SHAPES)[:3])
    with pytest.raises(UserError, match=r"has no names; give `names`"):
        from_torch_adamw(state_dict, KEY_MAP, state)
    with pytest.raises(UserError, match=r"no 'state' and no 'param_groups' in the state_dict, which has 'fc'"):
        from_torch_adamw({"fc": 1}, KEY_MAP, state)
    with pytest.raises(UserError, match="no AdamWState in EmptyState"):
        from_torch_adamw(state_dict, KEY_MAP, optax.EmptyState(), names=list(SHAPES))
    dropped = {**KEY_MAP, "odd": None}
    with pytest.raises(UserError, match=r"^from_torch_adamw:\n  'odd/kernel': missing, key_map has no name for it$"):
        from_torch_adamw(state_dict, dropped, state, names=list(SHAPES))
