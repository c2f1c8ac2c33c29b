import subprocess
import sys

import pytest
from flax import nnx
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from styrax.core import UsageError, registry, tree
from styrax.core import config as configuration
from styrax.models import Arch, Attn, DecoderConfig, Delta, Head, MoE, PerLayer, Sharing, layout
from styrax.models.config import Scales
from styrax.models.rope_config import Rope


def test_import_costs_no_jax():
    code = (
        "import sys, styrax.models, styrax.models.config, styrax.models.sharding; "
        "styrax.models.DecoderConfig(); assert 'DecoderConfig' in dir(styrax.models); "
        "sys.exit(bool({'jax', 'flax', 'numpy'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_is_an_entry_point():
    assert registry.resolve("styrax.models", "decoder") is DecoderConfig


@pytest.mark.parametrize("kind", [DecoderConfig, Scales])
def test_every_field_is_described(kind):
    assert all(f"{name}: " in kind.__doc__ for name in kind.__dataclass_fields__)
    assert len(kind.__dataclass_fields__.keys() - {"kind"}) <= 15


@pytest.mark.parametrize(
    ("embed", "mlp"), [(16, 64), (64, 192), (128, 320), (384, 1024), (576, 1536), (768, 2048), (4096, 10944)]
)
def test_default_mlp_width(embed, mlp):
    assert DecoderConfig(embed_dim=embed, num_heads=2).mlp_width == mlp


def test_defaults_follow_other_fields():
    config = DecoderConfig(embed_dim=48, num_heads=4)
    assert (config.kv_heads, config.head_width) == (4, 12)
    config = DecoderConfig(embed_dim=48, num_heads=4, num_kv_heads=1, head_dim=16, mlp_dim=7)
    assert (config.kv_heads, config.head_width, config.mlp_width) == (1, 16, 7)


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"num_heads": 6, "num_kv_heads": 4}, ["num_kv_heads: expected a divisor of num_heads = 6, got 4"]),
        ({"embed_dim": 50, "num_heads": 4}, ["embed_dim: expected a multiple of num_heads = 4 when"]),
        ({"embed_dim": 20, "num_heads": 4}, ["embed_dim / num_heads: expected an even number"]),
        ({"head_dim": 7}, ["head_dim: expected an even number (rotary positions), got 7"]),
        ({"dropout": 1.0}, ["dropout: expected 0 <= dropout < 1, got 1.0"]),
        ({"num_layers": 0, "max_len": -1, "dropout": 2.0}, ["num_layers: exp", "dropout: ", "max_len: exp"]),
        ({"dropout": float("nan"), "embed_dim": "x", "scan": "yes"}, ["embed_dim: exp", "dropout: exp", "scan: exp"]),
        ({"num_heads": 6, "num_kv_heads": 4, "head_dim": 7}, ["num_kv_heads: ", "head_dim: "]),
    ],
)
def test_all_problems_are_listed(fields, messages):
    with pytest.raises(ValueError) as caught:
        DecoderConfig(**fields)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(messages)
    assert all(line.startswith(message) for line, message in zip(lines, messages, strict=True))


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ({"sharing": Sharing(layers=4)}, "arch.sharing.layers: expected less than num_layers = 4, got 4"),
        (
            {"sharing": Sharing(layers=3), "layers": ("attn", "local"), "local": Attn(window=8)},
            "arch.sharing.layers: of the 1 layers before those that share, none is of the kind local",
        ),
        (
            {"sharing": Sharing(layers=1), "layers": ("attn", "delta"), "delta": Delta()},
            "arch.sharing: layers of delta have no keys and values of another layer to use; expected attn and local",
        ),
    ],
)
def test_layers_that_share_need_one_that_lends(arch, message):
    with pytest.raises(ValueError) as caught:
        DecoderConfig(num_layers=4, arch=Arch(**arch))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parallel": True, "moe": MoE(beside_mlp=True)}, "moe.beside_mlp: expected false for parallel blocks, got"),
        ({"per_layer": PerLayer(), "head": Head(mtp=1)}, "head.mtp: expected 0 with per_layer, which has nothing for"),
    ],
)
def test_parts_of_a_block_that_exclude_one_another(fields, message):
    with pytest.raises(ValueError, match=message):
        Arch(**fields)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["attn", "local"]), min_size=2, max_size=14), st.integers(1, 12))
def test_each_layer_that_shares_has_one_source_before_it(mixers, sharing):
    own = len(mixers) - sharing
    assume(own > 0 and set(mixers[own:]) <= set(mixers[:own]))
    kinds = [layout.Kind(mixer, False, role) for mixer, role in zip(mixers, layout.roles(tuple(mixers), sharing))]
    assert [kind.role == "shared" for kind in kinds] == [layer >= own for layer in range(len(mixers))]
    for mixer in set(mixers[own:]):
        (source,) = (layer for layer, kind in enumerate(kinds) if kind == (mixer, False, "source"))
        assert source == max(layer for layer in range(own) if mixers[layer] == mixer)
    stacks, segments = layout.plan(tuple(kinds))
    assert sorted(layer for stack in stacks for layer in stack.layers) == list(range(len(mixers)))
    # A loop lends only once it is over, so no source may be in one loop with layers that use its keys.
    for segment in segments:
        assert len({stacks[number].kind.role == "shared" for number in segment.stacks}) == 1
        assert segment.repeats == 1 or not any(stacks[number].kind.role == "source" for number in segment.stacks)


def test_reads_from_a_table():
    table = {"kind": "decoder", "remat": "none", "num_kv_heads": 2, "head_dim": "none", "rope": {"theta": 1e6}}
    built = configuration.build(DecoderConfig, table)
    assert built == DecoderConfig(remat="none", num_kv_heads=2, rope=Rope(theta=1e6))
    scaled = configuration.build(DecoderConfig, {"scales": {"logit_mult": 0.5, "attn_scale": "none"}})
    assert scaled == DecoderConfig(scales=Scales(logit_mult=0.5))
    with pytest.raises(UsageError, match=r"model.scales.embed_scale: expected number > 0.0, got 0"):
        configuration.build(DecoderConfig, {"scales": {"embed_scale": 0}}, "model")
    with pytest.raises(UsageError, match=r"model.num_layerz: unknown key \(did you mean 'num_layers'\?\)"):
        configuration.build(DecoderConfig, {"num_layerz": 2}, "model")


def test_vocab_size_is_checked():
    with pytest.raises(ValueError, match="vocab_size: expected 1 or more, got 0"):
        DecoderConfig().build(vocab_size=0, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_has_axes(tied):
    config = DecoderConfig(num_layers=2, embed_dim=16, num_heads=2, tied=tied)
    model = nnx.eval_shape(lambda: config.build(vocab_size=8, rngs=nnx.Rngs(0)))
    axes = tree.label(nnx.split(model)[1], config.logical_axes())  # raises if a path or a rule is left over
    leaves = tree.flatten(nnx.split(model)[1])
    assert axes.keys() == leaves.keys()
    assert all(len(axes[path]) == leaf.ndim for path, leaf in leaves.items())
    assert ("head/kernel" in leaves) is not tied


def test_nothing_calls_what_costs_milliseconds_a_step():
    """`nnx.jit` walks the whole module in Python at every call."""
    from pathlib import Path

    import styrax.models

    files = list(Path(next(iter(styrax.models.__path__))).rglob("*.py"))
    assert len(files) > 40
    assert not [path for path in files if "nnx.jit" in path.read_text(encoding="utf-8")]
