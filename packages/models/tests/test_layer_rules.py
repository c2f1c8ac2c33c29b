"""What layers split by hand: over the axes that the rules in force name, with the numbers of one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from styrax.core import DEFAULT_RULES, UserError, tree, use_rules
from styrax.core.mesh import MeshConfig, shardings, spec
from styrax.models import Arch, DecoderConfig, MoE, Runtime
from styrax.models.attention import splash
from styrax.models.layers.mask import document_mask
from styrax.models.layers.meshes import mesh_of
from styrax.models.pipeline import Schedule

ROWS, SEQ, VOCAB = 8, 16, 23
WHOLE = {**DEFAULT_RULES, "vocab": (), "kv_heads": ()}
DROPLESS = Arch(moe=MoE(num_experts=8, experts_per_token=2, expert_dim=8))
# As many places as choices: nothing is dropped, on however many devices.
CAPACITY = Arch(moe=MoE(num_experts=8, experts_per_token=2, expert_dim=8, dispatch="capacity", capacity_factor=8.0))


def batch():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, (ROWS, SEQ + 1))
    segments = np.ones((ROWS, SEQ), np.int32)
    segments[1, 4:] = 2
    for row in range(2, ROWS):
        segments[row, SEQ - row // 2 :] = 0
    return tuple(map(jnp.asarray, (ids[:, :-1], ids[:, 1:], (segments != 0).astype(np.float32), segments)))


def program(model):
    """A function of parameters and a batch, whose result is the loss, its terms, and the gradients."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def objective(params, ids, targets, mask, segments):
        terms = nnx.merge(graph, params, rest).losses(ids, targets, mask, segment_ids=segments)
        total = sum(term.coef * term.total / jnp.maximum(term.weight, 1) for term in terms.values())
        return total, {name: (term.total, term.weight) for name, term in terms.items()}

    return jax.jit(jax.value_and_grad(objective, has_aux=True)), params


def placed(model, mesh, rules):
    params = nnx.split(model, nnx.Param, ...)[1]
    where = shardings(params, model.config.logical_axes(), rules, mesh)
    rows = jax.sharding.NamedSharding(mesh, spec(("batch", "seq"), rules, mesh))
    return jax.device_put(params, where), *(jax.device_put(each, rows) for each in batch())


def same(got, expected):
    left, right = tree.flatten(got), tree.flatten(expected)
    assert left.keys() == right.keys()
    for path, leaf in right.items():
        bound = 1e-5 * max(float(jnp.abs(leaf).max()), 1e-2)
        np.testing.assert_allclose(left[path], leaf, rtol=1e-5, atol=bound, err_msg=path)


def along(mesh, axes):
    """Groups of places on the mesh that differ along some axes only."""
    names = list(mesh.shape)
    places = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    last = [names.index(axis) for axis in axes]
    kept = [number for number in range(len(names)) if number not in last]
    ways = int(np.prod([mesh.shape[axis] for axis in axes]))
    return {frozenset(group) for group in places.transpose(*kept, *last).reshape(-1, ways).tolist()}


def exchanged(text, mesh):
    """Groups of devices that exchange all with all by hand, of a lowered program."""
    found = re.findall(r'"stablehlo.all_to_all"\(.*?replica_groups = dense<(.*?)> : tensor', text)
    groups = {frozenset(group) for each in found for group in _lists(each)}
    # So jax 0.12 writes them.
    named = re.findall(r'"stablehlo.all_to_all"\(.*?replica_groups = #stablehlo.replica_group_mesh_axes<(.*?)\]', text)
    return groups.union(*(along(mesh, re.findall(r'name = "(.*?)"', each)) for each in named))


def rings(text, mesh):
    """The largest groups of devices that send to one another in one exchange by hand, of a lowered program."""
    del mesh
    found = set()
    for each in re.findall(r'"stablehlo.collective_permute"\(.*?source_target_pairs = dense<(.*?)> : tensor', text):
        groups: list[set[int]] = []
        for pair in map(set, _lists(each)):
            touched = [group for group in groups if group & pair]
            groups = [group for group in groups if group not in touched] + [pair.union(*touched)]
        found |= set(map(frozenset, groups))
    return {group for group in found if not any(group < other for other in found)}


def _lists(text):
    return [[int(number) for number in part.split(",")] for part in re.findall(r"\[([\d, ]+)\]", text)]


CASES = {
    "experts over fsdp": ({"fsdp": 4, "data": 2}, {"expert": ("fsdp",)}, exchanged, ["fsdp"], DROPLESS),
    "experts over two axes": (
        {"fsdp": 2, "data": 2, "expert": 2},
        {"expert": ("expert", "fsdp"), "embed": ()},
        exchanged,
        ["expert", "fsdp"],
        CAPACITY,
    ),
    "experts where the batch is not split": (
        {"data": 2, "expert": 4},
        {"batch": ("data",), "embed": ()},
        exchanged,
        ["expert"],
        DROPLESS,
    ),
    "experts where the sequence is split": (
        {"data": 4, "tensor": 2},
        {"expert": ("tensor",), "seq": ("tensor",), "heads": (), "mlp": ()},
        exchanged,
        ["tensor"],
        CAPACITY,
    ),
    "sequence over tensor": ({"data": 2, "tensor": 4}, {"seq": ("tensor",)}, rings, ["tensor"], Arch()),
    "sequence over two axes": (
        {"context": 2, "data": 2, "tensor": 2},
        {"seq": ("context", "tensor"), "mlp": ()},
        rings,
        ["context", "tensor"],
        Arch(),
    ),
    "stages over fsdp": ({"data": 4, "fsdp": 2}, {"layers": ("fsdp",)}, rings, ["fsdp"], Arch()),
    "stages over two axes": (
        {"stage": 2, "data": 2, "fsdp": 2},
        {"layers": ("stage", "fsdp"), "embed": ()},
        rings,
        ["stage", "fsdp"],
        Arch(),
    ),
    "all at once": (
        {"tensor": 2, "data": 2, "fsdp": 2},
        {"layers": ("data",), "batch": ("fsdp",), "expert": ("fsdp",), "seq": ("tensor",), "mlp": ()},
        lambda *lowered: exchanged(*lowered) | rings(*lowered),
        [["fsdp"], ["data"], ["tensor"]],
        DROPLESS,
    ),
    "batch over data only": ({"data": 2, "fsdp": 4}, {"batch": ("data",)}, None, (), DROPLESS),
}


#: On a CPU, exchanges of loops that do not depend on each other may wait for each other for ever (seen with jax 0.12).
NOT_RUN = {"all at once"}
QUICK = {"all at once", "experts over fsdp"}


def model_of(build, case, **runtime):
    stages, arch = "stages" in case or "all" in case, CASES[case][4]
    return build(
        num_layers=4 if "stages" in case else 2 if stages else 1,
        arch=arch,
        runtime=Runtime(**runtime),
        scan="on" if stages else "auto",
    )


def hold(build, case, **runtime):
    axes, changes, groups, over, _ = CASES[case]
    model, rules = model_of(build, case, **runtime), {**WHOLE, **changes}
    run, params = program(model)
    expected = None if case in NOT_RUN else run(params, *batch())
    mesh = MeshConfig(axes=axes).build()
    arrays = placed(model, mesh, rules)
    with jax.set_mesh(mesh):
        with use_rules(rules):
            if case not in NOT_RUN:
                same(run(*arrays), expected)
            text = run.lower(*arrays).as_text()
        usual = run.lower(*arrays).as_text()
    if groups is None:  # nothing is exchanged by hand, and nobody splits tokens over more than the batch's axes
        assert not exchanged(text, mesh) and not rings(text, mesh)
        assert '{"fsdp"' not in _manual(text) and '"fsdp"' in _manual(usual)
    else:
        wanted = [along(mesh, each) for each in (over if isinstance(over[0], list) else [over])]
        assert groups(text, mesh) == set().union(*wanted)
        assert (
            groups(usual, mesh) != groups(text, mesh) or "not split" in case
        )  # there, by hand tokens are split all the same


def _manual(text):
    return " ".join(re.findall(r"in_shardings=.*", text))


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_rules_decide_and_nothing_else_changes(build, case):
    """The loss, its terms, every gradient; and who exchanges with whom, which other rules change."""
    hold(build, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "runtime"),
    [
        ("stages over fsdp", {"schedule": "1f1b"}),
        ("stages over two axes", {"schedule": "1f1b"}),
        ("stages over fsdp", {"repeats": 2, "microbatches": 2}),
    ],
    ids=["1f1b", "1f1b over two", "interleaved"],
)
def test_every_schedule_takes_the_axes(build, case, runtime):
    hold(build, case, **runtime)


def test_rules_may_say_that_nothing_is_split_by_hand(build):
    """Axes with the usual names are left to the compiler; no ring, no stages."""
    model = build(num_layers=2, scan="on")
    mesh = MeshConfig(axes={"stage": 2, "context": 2, "data": 2}).build()
    run, params = program(model)
    with jax.set_mesh(mesh):
        usual = run.lower(params, *batch()).as_text()
        with use_rules({**WHOLE, "layers": (), "seq": (), "batch": ("data",)}):
            text = run.lower(params, *batch()).as_text()
    assert rings(usual, mesh) and not rings(text, mesh)


def test_a_pipeline_is_told_by_the_rules():
    config = DecoderConfig(num_layers=4, embed_dim=8, num_heads=2)
    mesh = MeshConfig(axes={"fsdp": 4, "stage": 2}).abstract(8)
    assert config.pipeline(rows=16, mesh=mesh) == Schedule(2, 2, 1)
    with use_rules({**DEFAULT_RULES, "layers": ("fsdp",)}):
        assert config.pipeline(rows=16, mesh=mesh) == Schedule(4, 2, 1)
    with use_rules({**DEFAULT_RULES, "layers": ()}):
        assert config.pipeline(rows=16, mesh=mesh) is None


def test_a_kernel_is_split_as_the_rules_say():
    """Over the heads' axes, and over those of the batch as far as they divide it."""
    mesh, arrays = MeshConfig(axes={"data": 2, "fsdp": 4}).build(), [jnp.ones((2, 128, 4, 8))]
    arrays += [jnp.ones((2, 4, 128, 8))] * 2

    def specs(rules):
        def attend(*arrays):
            return splash.attend(*arrays, document_mask(128), scale=1.0, softcap=None, sinks=None, interpret=True)

        with jax.set_mesh(mesh), use_rules(rules):
            jaxpr = jax.make_jaxpr(attend)(*arrays)
        (split,) = [each for each in jaxpr.eqns if each.primitive.name == "shard_map"]
        return tuple(split.params["out_specs"][0])

    assert specs({**DEFAULT_RULES, "heads": ("fsdp",), "batch": ("data",)}) == ("data", "fsdp")
    assert specs({**DEFAULT_RULES, "heads": (), "batch": ("data",)})[:1] == ("data",)
    assert "fsdp" not in str(specs({**DEFAULT_RULES, "heads": (), "batch": ("data",)}))


def test_partial_rules_are_an_error_where_one_is_asked_for(build):
    """And no other rule is taken in its place; without a mesh nobody asks."""
    model, ids = build(num_layers=1), batch()[0]
    with use_rules({"batch": ("data",)}):
        model(ids)
        with jax.set_mesh(MeshConfig(axes={"data": 8}).build()):
            assert mesh_of(ids).axes("batch", 8) == ("data",)
            with pytest.raises(UserError, match=r"^no rule for logical axis 'seq'; the rules are for batch$"):
                mesh_of(ids).named("batch", "seq")
            with pytest.raises(UserError, match="no rule for logical axis"):
                model(ids)
