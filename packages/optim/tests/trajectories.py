"""Runs that several tests compare."""

from pathlib import Path

import jax
import optax

GOLDEN = Path(__file__).parent / "golden"


def run(tx, params, grads):
    """Give the parameters after each step and the last state, compiled as one scan."""

    def step(carry, g):
        params, state = carry
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), (params, state)

    _, rows = jax.jit(lambda p, g: jax.lax.scan(step, (p, tx.init(p)), g))(params, grads)
    return rows
