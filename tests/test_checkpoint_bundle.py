"""A run of flax, optax and a pipeline goes on from one call of `resume`, bit for bit, in a fresh process."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from styrax.checkpoint import CheckpointConfig
from styrax.data import ArrayData, ByteTokenizer, LMData, Loader, write_store

kind, folder, first, last, seed = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(300, 16, rngs=rngs)
        self.inner = nnx.List([nnx.Linear(16, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)])
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, tokens):
        x = self.inner[1](jnp.tanh(self.inner[0](self.embed(tokens))))
        return self.embed.attend(self.dropout(x))  # the same weights twice


def pipeline():
    if kind == "grain":
        import grain.python as grain

        data = grain.MapDataset.range(500).seed(3).shuffle().repeat()
        data = data.map(lambda n: np.random.default_rng(n).integers(0, 300, 12)).to_iter_dataset().batch(4)
        return iter(data), lambda batch: batch
    from pathlib import Path

    path = Path(folder).parent / f"store-{first}"
    texts = {str(n): " ".join(str(n * k) for k in range(99)) for n in range(40)}
    store = write_store(path, texts, ByteTokenizer())
    return Loader(LMData(store, seed=3, seq_len=12, batch_size=4)), lambda batch: batch["tokens"]


model = Model(nnx.Rngs(params=seed, dropout=seed + 1))
schedule = optax.warmup_cosine_decay_schedule(0, 0.02, 3, 20)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
key = jax.random.key(seed)
data, tokens_of = pipeline()


@nnx.jit
def step(model, optimizer, tokens, key):
    def loss(model):
        noisy = jnp.where(jax.random.bernoulli(key, 0.1, tokens.shape), 0, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(model(noisy)[:, :-1], tokens[:, 1:]).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


losses = []
with CheckpointConfig(keep_last=2).build(folder) as store:
    found = store.resume(model=model, optimizer=optimizer, data=data, rng=key)
    done = 0
    if found is not None:
        key, done = found["rng"], found["run"]["done"]
        assert found.step == done and found.metrics["loss"] == found["run"]["loss"]
    assert done == first
    for done in range(first + 1, last + 1):
        key, now = jax.random.split(key)
        loss = step(model, optimizer, jnp.asarray(tokens_of(next(data))), now)
        losses.append(float(loss).hex())
        if done % 3 == 0:
            run = {"done": done, "loss": float(loss)}
            items = {"model": model, "optimizer": optimizer, "data": data, "rng": key, "run": run}
            store.save(done, items, metrics={"loss": loss})
print(json.dumps(losses))
"""


def run(script, *arguments):
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(
        command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grain", "styrax"])
def test_a_bundle(kind, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = run(script, kind, tmp_path / "a" / "run", 0, 9, 0)
    first = run(script, kind, tmp_path / "b" / "run", 0, 6, 0)
    # Another seed, to see that nothing of the new process is left.
    second = run(script, kind, tmp_path / "b" / "run", 6, 9, 5)
    assert first == whole[:6]
    assert second == whole[6:]
    assert len(set(whole)) == 9
