"""Statistics on request: their numbers against numpy, the steps that have them, and that they change nothing."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from train_toys import MemoryCheckpointer, MemoryTracker, ToyData, equal, numbers, train

from styrax.core import UserError, tree
from styrax.train import Hook, Term, Watch, fit
from styrax.train.watch import _patterns

LAYERS, WIDTH, RATE, DECAY = 3, 4, 0.05, 0.3
AXES = {"layers/scale": ("layers", None), "bias": (None,)}


class Layers(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(1.0 + 0.1 * jnp.arange(12.0).reshape(LAYERS, WIDTH))


class Chain(nnx.Module):
    """A number goes through layers that each multiply it, so that the gradient can be written out."""

    def __init__(self):
        self.layers = Layers()
        self.bias = nnx.Param(jnp.full((WIDTH,), 0.5))

    def activations(self, tokens, *, positions=None, segment_ids=None, rngs=None):
        h = jnp.cumprod(jnp.concatenate([tokens[None], jnp.broadcast_to(
            self.layers.scale[:, None], (LAYERS, *tokens.shape))]), axis=0)[1:]  # fmt: skip
        size = jnp.full((LAYERS,), float(tokens.size))
        return {"layers": {
            "rms": jnp.sqrt((h * h).mean((1, 2))), "max": jnp.abs(h).max((1, 2)), "zeros": jnp.zeros(LAYERS),
            "not_finite": jnp.zeros(LAYERS), "numbers": size, "layer": 9 + jnp.arange(LAYERS),
        }}  # fmt: skip


def loss(model, batch, rngs):
    y = batch["tokens"] * jnp.prod(model.layers.scale[...], axis=0) + model.bias[...]
    error = jnp.sum((y - batch["y"]) ** 2, axis=-1) * batch["mask"]
    return {
        "fit": Term(jnp.sum(error), jnp.sum(batch["mask"])),
        "decay": Term(len(y) * jnp.sum(model.layers.scale[...] ** 2), float(len(y)), DECAY),
    }


def batches(rows=8):
    for step in itertools.count():
        rng = np.random.default_rng(step)
        shape = (rows, WIDTH)
        mask = (rng.random(rows) < 0.6) | (np.arange(rows) == 0)
        yield {
            "tokens": rng.normal(size=shape).astype(np.float32), "y": rng.normal(size=shape).astype(np.float32),
            "mask": mask.astype(np.float32),
        }  # fmt: skip


def by_hand(steps):
    """What gradient descent does, in float64: step -> name of a metric -> number."""
    scale, bias, told = 1.0 + 0.1 * np.arange(12.0).reshape(LAYERS, WIDTH), np.full(WIDTH, 0.5), {}
    for step, batch in zip(range(1, steps + 1), batches()):
        x, y, mask = (batch[name].astype(np.float64) for name in ("tokens", "y", "mask"))
        slope = 2 * (x * scale.prod(0) + bias - y) * mask[:, None] / mask.sum()
        others = np.stack([np.delete(scale, layer, 0).prod(0) for layer in range(LAYERS)])
        grad = {"scale": (slope * x).sum(0) * others + 2 * DECAY * scale, "bias": slope.sum(0)}
        told[step] = {}
        for kind, a, b in (
            ("parameter", scale, bias), ("gradient", grad["scale"], grad["bias"]),
            ("update", RATE * grad["scale"], RATE * grad["bias"]),
        ):  # fmt: skip
            told[step] |= {f"norm/{kind}/layers/scale/{i}": np.linalg.norm(a[i]) for i in range(LAYERS)}
            told[step][f"norm/{kind}/bias"] = np.linalg.norm(b)
        for i, h in enumerate(x * np.cumprod(scale, 0)[:, None]):
            told[step][f"activation/rms/layers/{9 + i:02}"] = np.sqrt((h**2).mean())
            told[step][f"activation/max/layers/{9 + i:02}"] = np.abs(h).max()
            told[step][f"activation/not_finite/layers/{9 + i:02}"] = 0.0
        scale, bias = scale - RATE * grad["scale"], bias - RATE * grad["bias"]
    return told


def run(*hooks, steps=5, tx=None, **options):
    tracker = MemoryTracker()
    tx = tx or optax.sgd(RATE)
    result = fit(Chain(), tx, batches(), loss, steps=steps, hooks=hooks, tracker=tracker, logical_axes=AXES, **options)
    return result, tracker.lines


@pytest.mark.parametrize("accumulate", [1, 2])
def test_statistics_are_those_of_the_formulas_and_change_nothing(accumulate):
    options = {"accumulate": accumulate, "log_every": 3}
    plain, without = run(**options)
    result, lines = run(Watch("layers/**", "b*", activations=True, every=2), **options)
    equal(numbers(result.state), numbers(plain.state))
    wanted = by_hand(5)
    assert list(lines) == [2, 3, 4, 5]
    for step, line in lines.items():
        watched = {name: value for name, value in line.items() if "/" in name}
        expected = wanted[step] if step != 3 else {}
        assert watched == {name: pytest.approx(value, rel=1e-4) for name, value in expected.items()}
        if step in without:
            assert {name: value for name, value in line.items() if "/" not in name} == without[step]


def test_only_what_was_named_is_told():
    (result, _), wanted = run(Watch("**/scale", every=5)), by_hand(5)[5]
    assert {name for name in result.metrics if "/" in name} == {
        name for name in wanted if name.startswith("norm/") and "scale" in name
    }
    (result, _) = run(Watch(activations=True, every=5))
    assert {name for name in result.metrics if "/" in name} == {n for n in wanted if n.startswith("activation/")}


def test_a_run_on_a_mesh_tells_the_same():
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    axes = {"layers/scale": ("layers", "embed"), "bias": (None,)}
    hook = Watch("**", activations=True, every=2)

    def meshed(*hooks):
        tracker = MemoryTracker()
        options = {"mesh": mesh, "logical_axes": axes, "hooks": hooks, "tracker": tracker}
        return fit(Chain(), optax.sgd(RATE), batches(), loss, steps=3, **options), tracker.lines

    (result, lines), (plain, _), wanted = meshed(hook), meshed(), by_hand(3)
    equal(numbers(result.state), numbers(plain.state))
    for step in (2, 3):
        told = {name: value for name, value in lines[step].items() if "/" in name}
        assert told == {name: pytest.approx(value, rel=1e-4) for name, value in wanted[step].items()}
    assert not any("/" in name for name in lines[1])


def test_a_resumed_run_tells_the_same_bit_for_bit():
    class Enough(Hook):
        def on_step(self, step, metrics):
            return "enough" if step == 2 else None

    def hook():
        return Watch("**/kernel", every=2)  # of a model with dropout and statistics

    whole, tracker, checkpointer = MemoryTracker(), MemoryTracker(), MemoryCheckpointer()
    straight = train(7, tracker=whole, hooks=[hook()], accumulate=2)
    options = {"tracker": tracker, "checkpointer": checkpointer, "accumulate": 2}
    stopped = train(7, hooks=[Enough(), hook()], **options)
    assert 2 <= stopped.step < 7
    result = train(7, hooks=[hook()], **options)
    equal(numbers(result.state), numbers(straight.state))
    assert tracker.lines == whole.lines
    assert [step for step, line in whole.lines.items() if "norm/gradient/inner/kernel" in line] == [2, 4, 6, 7]


class Never(ToyData):
    def __next__(self):
        raise AssertionError("a batch was asked for")


def test_what_cannot_be_watched_is_refused_before_the_first_step():
    with pytest.raises(UserError) as caught:
        train(3, data=Never(), hooks=[Watch("**/kernl", "innr/**", "outer/bias", activations=True)])
    assert str(caught.value).splitlines() == [
        "watch: '**/kernl' fits no parameter (did you mean '**/kernel'?)",
        "watch: 'innr/**' fits no parameter (did you mean 'inner/**'?)",
        "watch: the parameters are: inner/bias, inner/kernel, outer/bias, outer/kernel",
        "watch: activations: a Toy does not tell its activations: it has no method of that name; leave them out",
    ]
    told = []
    with pytest.raises(UserError, match="activations: the batch has no tokens"):
        fit(
            Chain(), optax.sgd(1.0), ({"y": batch["y"]} for batch in batches()), loss, steps=200,
            hooks=[Watch(activations=True, every=100), type("Told", (Hook,), {"on_step": told.append})()],
        )  # fmt: skip
    assert told == []
    with pytest.raises(UserError, match="accumulate=3 does not divide the batch of 8 rows"):
        run(Watch("bias"), accumulate=3)


def test_why_a_model_cannot_be_watched_here_is_told(monkeypatch):
    def refuse(self, tokens, **given):
        raise UserError("not on a Tuesday")

    monkeypatch.setattr(Chain, "activations", refuse)
    with pytest.raises(UserError, match=r"^watch: activations: not on a Tuesday, or leave the activations out$"):
        run(Watch("bias", activations=True, every=5))


def test_wrong_arguments_are_all_told():
    with pytest.raises(UserError) as caught:
        Watch(every=0)
    assert [line.partition(" ")[0] for line in str(caught.value).splitlines()] == ["Watch:"] * 2
    assert "there is nothing to watch" in str(caught.value)
    with pytest.raises(UserError, match=r"expected text, got \('a',\)"):
        Watch(("a",))  # pyright: ignore[reportArgumentType]


@given(st.lists(st.text("abc", min_size=1, max_size=2), min_size=1, max_size=4))
def test_what_is_proposed_fits(parts):
    path = "/".join(parts)
    assert all(tree.match(pattern, path) for pattern in _patterns([path]))


def test_metrics_of_a_hook_never_replace_those_of_the_step():
    class Wrong(Hook):
        def on_batch(self, step, state, batch):
            return lambda: {"loss": -1.0, "more": jnp.float32(step)}

    _, lines = run(Wrong(), steps=2)
    assert [line["more"] for line in lines.values()] == [1.0, 2.0]
    assert all(line["loss"] > 0 for line in lines.values())
