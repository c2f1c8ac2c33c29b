"""Multipliers against the tables of the papers, written out by hand."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from styrax.core import UserError
from styrax.core import config as configuration
from styrax.optim import adamw, specs
from styrax.optim.specs import ParamSpec
from styrax.optim.transfer import CompleteP, Forward, Multipliers, MuP, UMuP

SHAPES = {
    "embed": {"embedding": (100, 512)},
    "layers": {"up": {"kernel": (8, 512, 2048), "bias": (8, 2048)}, "norm": {"scale": (8, 512)}},
    "mixer": {"kernel": (512, 512)},
    "final_norm": {"scale": (512,)},
    "head": {"kernel": (512, 100)},
}


def abstract():
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def table(transfer):
    return {path: tuple(each) for path, each in transfer.by_path(abstract(), specs(abstract())).items()}


def same(got, expected):
    assert got.keys() == expected.keys()
    for path, numbers in expected.items():
        assert got[path] == pytest.approx(numbers), path


def test_mup():
    """A width four times the base: the learning rate of matrices is a quarter, their deviation a half."""
    plain, matrix = (1, 1, 1, 1), (1 / 4, 1, 1, 1 / 2)
    assert table(MuP(width=512, base_width=128)) == {
        "embed/embedding": plain,
        "final_norm/scale": plain,
        "head/kernel": plain,
        "layers/norm/scale": plain,
        "layers/up/bias": plain,
        "layers/up/kernel": matrix,
        "mixer/kernel": matrix,
    }
    forward = MuP(width=512, base_width=128, alpha_out=3.0, alpha_in=5.0).forward(head_dim=64)
    assert forward == Forward(residual=1.0, logits=3 / 4, attention=1 / 64, embedding=5.0)


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_completep(alpha):
    """Four times the width and four times the depth, m = l = 4."""
    transfer = CompleteP(width=512, base_width=128, depth=8, base_depth=2, alpha=alpha)
    depth, inside = {1.0: (1, 1 / 16), 0.5: (1 / 2, 1 / 8)}[alpha]
    assert table(transfer) == {
        "embed/embedding": (1, 1, 1 / 4, 1),
        "final_norm/scale": (1, 1, 1 / 4, 1),
        "head/kernel": (1, 1, 1 / 4, 1),
        "layers/norm/scale": (depth, 1, inside, 1),
        "layers/up/bias": (depth, 1, inside, 1),
        "layers/up/kernel": (depth / 4, 4, inside, 1 / 2),
        "mixer/kernel": (1 / 4, 4, 1 / 4, 1 / 2),
    }
    assert transfer.forward(64) == Forward({1.0: 1 / 4, 0.5: 1 / 2}[alpha], 1 / 4, 1 / 64, 1.0)


def test_umup():
    """Depth 4, so a half in blocks; fan-in 512; the embedding has the width as its fan-in."""
    root = 512**-0.5
    scaled = {
        "embed/embedding": (root, 1 / root, 1, 1),
        "final_norm/scale": (1, 1, 1, 1),
        "head/kernel": (1, 1, 1, 1),
        "layers/norm/scale": (1 / 2, 2, 1, 1),
        "layers/up/bias": (1 / 2, 2, 1, 1),
        "layers/up/kernel": (root / 2, 2 / root, 1, 1),
        "mixer/kernel": (root, 1 / root, 1, 1),
    }
    same(table(UMuP(width=512, depth=4)), scaled)
    plain = table(UMuP(width=512, depth=4, weights="plain"))
    moved = {"layers/up/kernel": (root**2 / 2, 2 / root**2, 1, root), "mixer/kernel": (root**2, 1 / root**2, 1, root)}
    same(plain, scaled | moved)
    assert UMuP(width=512, depth=4).forward(64) == Forward(1 / 2, 1 / 512, 1 / 64, 1.0)


def test_the_base_is_left_as_it_is():
    params, found = abstract(), specs(abstract())
    for transfer in (MuP(width=64, base_width=64), CompleteP(width=64, base_width=64, depth=3, base_depth=3)):
        assert set(transfer.by_path(params, found).values()) == {Multipliers()}
        assert transfer.forward(32)[:2] == (1.0, 1.0)


def test_blocks_may_have_another_name():
    params = {"tower": {"0": {"kernel": np.ones((4, 4))}}, "layersize": {"kernel": np.ones((4, 4))}}
    transfer = CompleteP(width=4, base_width=4, depth=9, base_depth=1, alpha=0.5)
    rates = {path: each.lr for path, each in transfer.by_path(params, specs(params), blocks=["tower"]).items()}
    assert rates == {"layersize/kernel": 1, "tower/0/kernel": pytest.approx(1 / 3)}
    assert {each.lr for each in transfer.by_path(params, specs(params)).values()} == {1.0}


def test_the_decay_that_a_step_applies():
    """With no gradient a step shrinks a weight by learning rate * k * decay * d: CompleteP and u-muP keep it."""
    params = jax.tree.map(lambda x: jnp.ones((1, *x.shape[1:2])) if x.ndim else x, {"up": {"kernel": jnp.ones((4, 4))}})
    found = {"up/kernel": ParamSpec("matrix", "io")}
    kept = {}
    for name, transfer in {
        "mup": MuP(width=8, base_width=2),
        "completep": CompleteP(width=8, base_width=2, depth=6, base_depth=2),
        "umup": UMuP(width=4, depth=2),
    }.items():
        by_path = transfer.by_path(params, found)
        tx = adamw(
            0.1,
            weight_decay={path: 0.5 * each.decay for path, each in by_path.items()},
            lr_multipliers={path: each.lr for path, each in by_path.items()},
            eps={path: 1e-8 * each.eps for path, each in by_path.items()},
        )
        updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
        kept[name] = float(updates["up"]["kernel"][0, 0])
    assert kept == pytest.approx({"mup": -0.1 * 0.5 / 4, "completep": -0.1 * 0.5, "umup": -0.1 * 0.5})


def test_unit_and_plain_weights_train_alike():
    """What the layers scale by may stand in the weights: the same outputs, step for step."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 32)).astype("float32"), rng.normal(size=(16, 32)).astype("float32")
    start = {"up": {"kernel": jnp.asarray(rng.normal(size=(32, 32)), jnp.float32)}}
    outputs = {}
    for kind in ("unit", "plain"):
        by_path = UMuP(width=32, depth=1, weights=kind).by_path(start, specs(start))["up/kernel"]
        params = jax.tree.map(lambda w, init=by_path.init: init * w, start)
        factor = 32**-0.5 if kind == "unit" else 1.0

        def out(params, factor=factor):
            return factor * (x @ params["up"]["kernel"])

        tx = adamw(0.1, eps=1e-12, lr_multipliers=by_path.lr, weight_decay=0.3 * by_path.decay)
        state = tx.init(params)
        for _ in range(5):
            grads = jax.grad(lambda p, out=out: jnp.mean((out(p) - y) ** 2))(params)
            updates, state = tx.update(grads, state, params)
            params = jax.tree.map(jnp.add, params, updates)
        outputs[kind] = out(params)
    assert np.abs(outputs["unit"] - x @ start["up"]["kernel"] * 32**-0.5).max() > 0.1
    np.testing.assert_allclose(outputs["unit"], outputs["plain"], rtol=1e-4, atol=1e-5)


def test_errors_name_every_path():
    params = {"a": {"kernel": np.ones((2, 2))}, "b": {"kernel": np.ones((2, 2, 2))}}
    with pytest.raises(UserError, match=r"nothing for:\n  'a/kernel' .did you mean 'aa/kernel'.*\n  'b/kernel'"):
        MuP(width=2, base_width=2).by_path(params, {"aa/kernel": ParamSpec("matrix", "io")})
    with pytest.raises(UserError, match=r"u-muP must know which axes.*\n  'b/kernel'"):
        UMuP(width=2, depth=2).by_path(params, specs(params))
    with pytest.raises(ValueError) as caught:
        CompleteP(width=0, base_width=2.5, depth=1, base_depth=1)  # pyright: ignore[reportArgumentType]
    assert str(caught.value).splitlines() == [
        "width: expected integer >= 1, got 0",
        "base_width: expected integer >= 1, got 2.5",
    ]
    with pytest.raises(ValueError, match=r"alpha: expected a number from 0.5 to 1, got 0.3"):
        CompleteP(width=1, base_width=1, depth=1, base_depth=1, alpha=0.3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    transfer: MuP | CompleteP | UMuP | None = None


def test_reads_from_a_table():
    built = configuration.build(Recipe, {"transfer": {"kind": "umup", "width": 64, "depth": 2}})
    assert built == Recipe(transfer=UMuP(width=64, depth=2))
    for kind in (MuP, CompleteP, UMuP):
        assert all(f"{name}: " in kind.__doc__ for name in kind.__dataclass_fields__)


def test_import_costs_no_jax():
    code = "import sys, styrax.optim.transfer; sys.exit(bool({'jax', 'optax', 'numpy'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], check=True)
