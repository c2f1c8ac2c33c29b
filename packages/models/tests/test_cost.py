"""Arithmetic and memory against the products that JAX traces, and against transformers' own numbers."""

import math

import jax
import jax.numpy as jnp
import pytest
from families import cases
from flax import nnx

from styrax.core import Policy, tree
from styrax.models import registry
from styrax.models.cost import abstract, cost_of

CASES = cases()
F32 = Policy()


def products(jaxpr):
    """Count two operations for each pair of numbers that any product of matrices multiplies."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left.shape[axis] for axis in contracted)
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                total += products(inner) if hasattr(inner, "eqns") else 0
    return total


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi", "gemma3", "gemma4-e2b", "gemma4-31b", "olmo3", "cohere2"])
def test_forward_flops_of_one_token(name):
    """With one token there is one pair, and so every product is counted whole."""
    config = registry.read_table({**CASES[name][0].table})
    model = abstract(config, vocab_size=61, policy=F32)
    jaxpr = jax.make_jaxpr(lambda model: model(jnp.zeros((1, 1), int)))(model)
    assert cost_of(config, vocab_size=61).forward_flops(1) == products(jaxpr.jaxpr)


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_cache(name):
    case, _ = CASES[name]
    config = registry.read_table(case.table)
    cost = cost_of(config, vocab_size=61, policy=Policy("bf16", "bf16", "f32"))
    tied = "lm_head.weight" in case.shapes and config.tied
    assert cost.parameters == sum(math.prod(shape) for shape, _ in case.shapes.values()) - tied * 61 * 32
    model = abstract(config, vocab_size=61, policy=Policy("bf16", "bf16", "f32"))
    assert cost.bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in tree.flatten(model).values())
    for length in (2, 7, 100):  # shorter and longer than windows and chunks
        cache = nnx.eval_shape(lambda length=length: model.init_cache(3, length))
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.parts))
        assert cost.cache_bytes(3, length) == held


GEMMA4 = {"model_type": "gemma4_text", "vocab_size": 262_144}
FULL, NEAR = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("table", "billions", "active"),
    [
        # 2.3 "effective", beside the embeddings of the layers.
        (
            {
                "num_hidden_layers": 35,
                "hidden_size": 1536,
                "num_attention_heads": 8,
                "num_key_value_heads": 1,
                "intermediate_size": 6144,
                "num_kv_shared_layers": 20,
                "use_double_wide_mlp": True,
                "layer_types": [*[NEAR] * 4, FULL] * 7,
            },
            4.6,
            2.3,
        ),
        (
            {
                "num_hidden_layers": 60,
                "hidden_size": 5376,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "num_global_key_value_heads": 4,
                "intermediate_size": 21504,
                "attention_k_eq_v": True,
                "hidden_size_per_layer_input": 0,
            },
            30.7,
            30.7,
        ),
        (
            {
                "num_hidden_layers": 30,
                "hidden_size": 2816,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "num_global_key_value_heads": 2,
                "intermediate_size": 2112,
                "attention_k_eq_v": True,
                "hidden_size_per_layer_input": 0,
                "enable_moe_block": True,
                "num_experts": 128,
                "top_k_experts": 8,
                "moe_intermediate_size": 704,
            },
            25.2,
            3.8,
        ),
    ],
    ids=["E2B", "31B", "26B-A4B"],
)
def test_sizes_of_gemma4_are_those_of_its_model_cards(table, billions, active):
    cost = cost_of(registry.read_table({**GEMMA4, **table}), vocab_size=262_144)
    assert cost.parameters / 1e9 == pytest.approx(billions, abs=0.05)
    assert cost.active / 1e9 == pytest.approx(active, abs=0.05)


def test_windows_and_experts_make_it_cheaper():
    config = registry.read_table(CASES["mixtral"][0].table)
    dense = {**CASES["mixtral"][0].table, "num_experts_per_tok": 4}
    assert cost_of(config, vocab_size=61).active < cost_of(registry.read_table(dense), vocab_size=61).active
    table = CASES["mistral"][0].table
    near, far = (cost_of(registry.read_table({**table, "sliding_window": w}), vocab_size=61) for w in (7, None))
    assert near.forward_flops(7) == far.forward_flops(7)
    pairs = sum(min(t + 1, 7) for t in range(50)) / 50
    assert near.forward_flops(50) == 2 * near.active + 4 * 4 * 10 * 4 * pairs
    assert near.train_flops(50) == 3 * near.forward_flops(50)
