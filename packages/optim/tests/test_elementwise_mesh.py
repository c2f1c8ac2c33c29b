"""Elementwise optimizers on eight devices with explicit axes, where the sharding of a state is a part of its type."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from styrax.core.tree import flatten
from styrax.optim import guard, state_shardings
from styrax.optim.adafactor import adafactor
from styrax.optim.adam_mini import adam_mini
from styrax.optim.averaging import averaged
from styrax.optim.cautious import cautious
from styrax.optim.adamw import adamw
from styrax.optim.eight_bit import eight_bit_adamw
from styrax.optim.mars import mars
from styrax.optim.prodigy import prodigy
from styrax.optim.schedule_free import schedule_free
from styrax.optim.specs import ParamSpec, specs

shapes = {"layers": {"up": {"kernel": (2, 16, 8)}, "q": {"kernel": (2, 16, 4, 8)}, "norm": {"scale": (2, 16)}},
          "embed": {"embedding": (8, 16)}, "head": {"kernel": (16, 24)}}
places = {"layers": {"up": {"kernel": P(None, "a", "b")}, "q": {"kernel": P(None, "a", "b", None)},
                     "norm": {"scale": P(None, None)}},
          "embed": {"embedding": P("b", "a")}, "head": {"kernel": P("b", "a")}}
rng = np.random.default_rng(0)
host = jax.tree.map(lambda s: rng.normal(size=s).astype("float32"), shapes, is_leaf=lambda s: type(s) is tuple)
grads = jax.tree.map(lambda w: rng.normal(size=(3, *w.shape)).astype("float32"), host)
found = specs(host, axes={"layers/q/kernel": "sioo"}, heads={"layers/q/kernel": 4, "head/kernel": 3})
cases = {
    "schedule_free": schedule_free(1e-2), "prodigy": prodigy(d0=1e-2), "mars": mars(1e-2, specs=found),
    "adafactor": adafactor(1e-2, specs=found, b1=0.9, min_size=2), "adam_mini": adam_mini(1e-2, specs=found),
    "eight_bit": eight_bit_adamw(1e-2, specs=found, block=5, min_size=300),
    "averaged": averaged(cautious(adamw(1e-2, weight_decay=0.0), weight_decay=0.1), decay=0.9),
}

def run(tx, params, state, grads):
    def step(carry, g):
        params, state = carry
        updates, state = tx.update(g, state, params)
        return (optax.apply_updates(params, updates), state), None
    return jax.jit(lambda carry, g: jax.lax.scan(step, carry, g)[0])((params, state), grads)

mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
for name, tx in cases.items():
    tx = guard(tx)
    expected, _ = run(tx, host, tx.init(host), grads)
    with jax.set_mesh(mesh):
        where = jax.tree.map(lambda s: NamedSharding(mesh, s), places)
        params = jax.tree.map(jax.device_put, host, where)
        laid = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, P(None, *s))), grads, places)
        state = jax.jit(tx.init, out_shardings=state_shardings(tx, params))(params)
        got, _ = run(tx, params, state, laid)
        jax.eval_shape(lambda p: run(tx, p, tx.init(p), laid), params)  # a scan whose state comes from init itself
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6, err_msg=name), got, expected)
    for (path, x), s in zip(flatten(got).items(), jax.tree.leaves(where)):
        assert x.sharding.is_equivalent_to(s, x.ndim), (name, path, x.sharding)
print("as expected on", jax.device_count(), "devices")
"""


@pytest.mark.slow
def test_explicit_axes_on_eight_devices():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "as expected on 8 devices\n"
