"""Small stand-ins: a model with dropout and statistics, data that can be resumed, a checkpointer in memory."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from styrax.train import Term, fit


class Toy(nnx.Module):
    """Two linear maps with dropout between, and a running mean as a non-parameter variable."""

    def __init__(self, rngs: nnx.Rngs, width: int = 8):
        self.inner = nnx.Linear(4, width, rngs=rngs)
        self.outer = nnx.Linear(width, 3, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros((4,)))

    def __call__(self, x, *, rngs=None):
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean(axis=0)
        h = jnp.tanh(self.inner(x))
        if rngs is not None:
            h = jnp.where(jax.random.bernoulli(rngs.dropout(), 0.8, h.shape), h / 0.8, 0.0)
        return self.outer(h)


def toy_loss(model, batch, rngs):
    """Masked squared error, an auxiliary loss with its own weight, and a metric."""
    y = model(batch["x"], rngs=rngs)
    error = jnp.sum((y - batch["y"]) ** 2, axis=-1)
    return {
        "fit": Term(jnp.sum(error * batch["mask"]), jnp.sum(batch["mask"])),
        "size": Term(jnp.sum(y**2), jnp.asarray(y.shape[0], jnp.float32), 0.1),
        "peak": Term(jnp.sum(jnp.abs(y)), jnp.asarray(y.size, jnp.float32), 0.0),
    }


def toy_batch(step: int, rows: int = 12) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    x = rng.normal(size=(rows, 4)).astype(np.float32)
    mask = (rng.random(rows) < 0.6).astype(np.float32)
    mask[0] = 1
    return {"x": x, "y": np.sin(x[:, :3]), "mask": mask}


class ToyData:
    """Batches that depend on the step alone."""

    def __init__(self, length: int | None = None):
        self.step, self.length = 0, length

    def __iter__(self):
        return self

    def __next__(self):
        if self.length is not None and self.step >= self.length:
            raise StopIteration
        self.step += 1
        return toy_batch(self.step - 1)

    def get_state(self):
        return {"step": self.step}

    def set_state(self, state):
        self.step = state["step"]


class MemoryCheckpointer:
    """Keeps deep copies; ``order`` records what the loop did when."""

    def __init__(self):
        self.saved, self.order = {}, []

    def save(self, step, items):
        self.order.append(("save", step))
        self.saved[step] = copy.deepcopy(
            jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, dict(items))
        )

    def restore(self, step, like):
        return {
            k: jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, self.saved[step][k])
            for k in like
        }

    def steps(self):
        return sorted(self.saved)

    def latest(self):
        return max(self.saved, default=None)

    def wait(self):
        pass

    def close(self):
        pass


class MemoryTracker:
    def __init__(self, order=None):
        self.lines, self.order = {}, order if order is not None else []

    def log(self, step, metrics):
        assert step not in self.lines
        self.lines[step] = dict(metrics)

    def flush(self):
        self.order.append(("flush", max(self.lines, default=0)))

    def truncate(self, step):
        self.lines = {k: v for k, v in self.lines.items() if k <= step}

    def close(self):
        pass


TX = optax.adam(0.01)


def train(steps, **options):
    options.setdefault("data", ToyData())
    return fit(lambda rngs: Toy(rngs), TX, options.pop("data"), toy_loss, steps=steps, seed=3, **options)


def equal(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def numbers(state):
    return state.params, state.opt_state, state.variables, state.step
