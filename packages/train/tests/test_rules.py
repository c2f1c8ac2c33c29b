"""The rules that a run is given are in force wherever something of it is traced, and nowhere else."""

import itertools
from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from train_toys import Toy, toy_batch

from styrax.core import DEFAULT_RULES, MeshConfig, UserError, rules_in_force, use_rules
from styrax.train import Term, Watch, fit
from styrax.train.compiled import lower_step
from styrax.train.hooks import Hook
from styrax.train.meshes.placement import placements
from styrax.train.plan import plan_step
from styrax.train.plan.program import compile_program, program_of
from styrax.train.plan.shape import widths_of
from styrax.train.plan.topology import parse
from styrax.train.shardings import batch_sharding, batch_shards, lay_out

AXES = {"inner/kernel": (None, "mlp"), "outer/kernel": ("mlp", None), "**": (None,)}
MINE = {"batch": ("tensor",), "seq": (), "mlp": ("data",)}
SPEC = {name: (x.shape, x.dtype) for name, x in toy_batch(0, rows=16).items()}
TX = optax.sgd(0.1)


class Asking(Toy):
    """Notes the rules in force when it is traced, by whether it trains."""

    seen: ClassVar[dict[str, set[str]]] = {}

    def __call__(self, x, *, rngs=None):
        self.seen.setdefault("step" if rngs is not None else "evaluation", set()).add(str(dict(rules_in_force())))
        return super().__call__(x, rngs=rngs)


@pytest.fixture
def seen(monkeypatch):
    monkeypatch.setattr(Asking, "seen", {})
    return Asking.seen


def loss(model, batch, rngs):
    return {"loss": Term(jnp.sum((model(batch["x"], rngs=rngs) - batch["y"]) ** 2), 1.0)}


def mesh():
    return MeshConfig(axes={"data": 4, "tensor": 2}).build()


class Listening(Hook):
    def __init__(self):
        self.rules = []

    def on_start(self, step, steps, resumed):
        self.rules.append(dict(rules_in_force()))

    def on_step(self, step, metrics):
        self.rules.append(dict(rules_in_force()))


def run(**given):
    hook, data = Listening(), itertools.repeat(toy_batch(0, rows=16))
    result = fit(
        lambda rngs: Asking(rngs), TX, data, loss, steps=2, mesh=mesh(), logical_axes=AXES,
        held_out=[toy_batch(1, rows=16)], hooks=[hook, Watch("**/kernel", every=1)], **given,
    )  # fmt: skip
    return result, hook


def test_a_run_is_traced_under_its_rules(seen):
    """Steps, what watches them, evaluations and hooks; the arrays lie by them; and then they are over."""
    result, hook = run(rules=MINE)
    assert seen == {"step": {str(MINE)}, "evaluation": {str(MINE)}}
    assert hook.rules == [MINE] * len(hook.rules) and len(hook.rules) > 1
    assert tuple(result.state.params["inner"]["kernel"].sharding.spec) == (None, "data")
    assert rules_in_force() == DEFAULT_RULES


def test_without_rules_those_in_force_count(seen):
    with use_rules(MINE):
        result, _ = run()
        assert rules_in_force() == MINE
    assert seen == {"step": {str(MINE)}, "evaluation": {str(MINE)}}
    assert tuple(result.state.params["inner"]["kernel"].sharding.spec) == (None, "data")
    seen.clear()
    result, _ = run()
    assert seen == {"step": {str(dict(DEFAULT_RULES))}, "evaluation": {str(dict(DEFAULT_RULES))}}
    assert tuple(result.state.params["inner"]["kernel"].sharding.spec) == (None, "tensor")


def test_given_rules_beat_those_in_force(seen):
    with use_rules({**MINE, "mlp": ()}):
        run(rules=MINE)
    assert seen["step"] == {str(MINE)}


def test_rules_end_with_a_run_that_fails():
    def broken(model, batch, rngs):
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        fit(
            nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
            TX,
            itertools.repeat({"x": np.ones((8, 1))}),
            broken,
            steps=1,
            rules=MINE,
        )
    assert rules_in_force() == DEFAULT_RULES


def test_weights_to_begin_with_are_asked_for_by_the_same_rules():
    asked = []

    def initial(mesh, rules):
        asked.append((dict(rules), dict(rules_in_force())))
        return Asking(nnx.Rngs(0))

    run(rules=MINE, initial=initial)
    assert asked == [(MINE, MINE)]


def test_the_state_and_the_batch_lie_by_the_rules_in_force():
    with use_rules(MINE):
        _, state, _ = lay_out(lambda rngs: Toy(rngs), TX, mesh=mesh(), logical_axes=AXES)
        assert tuple(batch_sharding(mesh()).spec) == ("tensor", None)
        assert batch_shards(mesh()) == 2
        assert batch_shards(mesh(), DEFAULT_RULES) == 4
    assert tuple(state.params["outer"]["kernel"].sharding.spec) == ("data", None)
    assert batch_shards(mesh()) == 4


@pytest.mark.parametrize("how", ["given", "in force"])
def test_a_plan_compiles_under_the_rules(seen, how):
    """Whenever that is: the program remembers them."""
    shared = {"mesh": mesh(), "logical_axes": AXES}
    with use_rules(MINE if how == "in force" else DEFAULT_RULES):
        program = program_of(
            lambda rngs: Asking(rngs), TX, SPEC, loss, **shared, **({"rules": MINE} if how == "given" else {})
        )
    seen.clear()
    compile_program(program)
    assert seen == {"step": {str(MINE)}}
    assert dict(program.rules) == MINE and program.shards == 2


def test_the_program_of_a_plan_is_the_one_of_a_run():
    program = program_of(lambda rngs: Toy(rngs), TX, SPEC, loss, mesh=mesh(), logical_axes=AXES, rules=MINE)
    texts = []

    class Reading(Hook):
        def on_batch(self, step, state, batch):
            texts.append(lower_step(program.step, state, batch, mesh()).as_text())

    fit(
        lambda rngs: Toy(rngs), TX, iter([toy_batch(0, rows=16)]), loss, steps=1, mesh=mesh(), logical_axes=AXES,
        rules=MINE, hooks=[Reading()],
    )  # fmt: skip
    with use_rules(program.rules):
        assert texts == [lower_step(program.step, program.state, program.batch, mesh()).as_text()]


def test_a_plan_of_your_own_step_takes_rules(seen):
    plan_step(
        lambda rngs: Asking(rngs), TX, SPEC, loss, mesh=mesh(), topology=parse("cpu:8"), logical_axes=AXES, rules=MINE
    )
    assert str(MINE) in seen["step"]


def test_reasons_are_those_of_the_rules():
    whole = jax.sharding.NamedSharding(mesh(), jax.sharding.PartitionSpec())
    params = {"inner": {"kernel": jax.ShapeDtypeStruct((4, 8), "float32", sharding=whole)}}
    with use_rules({**MINE, "mlp": ("zone",)}):
        (place,) = placements(params, AXES)
    assert place.reason == "the mesh has no axis for mlp (zone)"


WIDE = {"fsdp": 2, "tensor": 4, "expert": 2}


@pytest.mark.parametrize(
    ("changes", "heads", "mlp", "experts"),
    [
        ({}, 4, 4, 2),  # of experts, each device has half, and the tokens of its own rows
        ({"heads": ("fsdp",), "batch": ()}, 2, 4 * 2, 2),  # no rows are split: what tokens are in experts is shared
        ({"seq": ("tensor",)}, 1, 1, 2),  # what splits tokens does not split what is made of each
        ({"expert": ("fsdp", "expert"), "mlp": ()}, 4, 1, 4),
    ],
)
def test_widths_are_divided_by_what_the_rules_name(changes, heads, mlp, experts):
    moe = SimpleNamespace(dispatch="dropless", num_experts=4, experts_per_token=2, expert_dim=32, shared=None)
    moe.beside_mlp = False
    config = SimpleNamespace(
        num_layers=2, embed_dim=16, num_heads=4, kv_heads=4, head_width=4, mlp_width=64, remat="none", tied=False,
        arch=SimpleNamespace(moe=moe),
    )  # fmt: skip
    params = {"layers": {"experts": {"up": jnp.zeros((2, 4, 16, 32))}}}
    with use_rules({**DEFAULT_RULES, **changes}):
        found = widths_of(config, params, 64, WIDE, "tpu")
    assert found == widths_of(config, params, 64, WIDE, "tpu", {**DEFAULT_RULES, **changes})
    assert found.heads == 16 / heads
    assert found.mlp == 2 * 32 / mlp
    assert found.block_numbers == 4 * 16 * 32 / experts / (mlp if changes != {"heads": ("fsdp",), "batch": ()} else 4)


def test_what_is_no_rule_is_refused():
    with pytest.raises(UserError, match="rules\\['batch'\\]: expected a tuple of names of mesh axes"):
        fit(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), TX, iter(()), loss, steps=1, rules={"batch": "data"})  # pyright: ignore
