"""The whole forward pass against others: the equations in float64, and Hugging Face transformers."""

import jax.numpy as jnp
import numpy as np
import pytest

from styrax.core import tree
from styrax.models.config import Scales
from styrax.models.rope_config import Rope


def forward(weights, config, tokens, positions, segment_ids):
    """Follow the equations, token by token and head by head."""
    w = {path: np.asarray(value, np.float64) for path, value in weights.items()}
    width, heads, scales = config.head_width, config.num_heads, config.scales
    attn_scale = 1 / np.sqrt(width) if scales.attn_scale is None else scales.attn_scale

    def norm(x, scale):
        return x / np.sqrt((x**2).mean() + config.arch.norm.eps) * scale

    def turn(vector, position):
        angles = position * config.rope.theta ** (-2 * np.arange(width // 2) / width)
        pairs = (vector[: width // 2] + 1j * vector[width // 2 :]) * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag])

    def attention(xs, layer, row):
        names = {"q": heads, "k": config.kv_heads, "v": config.kv_heads}
        made = {n: [(x @ w[f"layers/attn/{n}/kernel"][layer]).reshape(h, width) for x in xs] for n, h in names.items()}
        outs = []
        for t in range(len(xs)):
            parts = []
            for h in range(heads):
                group = h // (heads // config.kv_heads)
                query = turn(made["q"][t][h], positions[row, t])
                seen = [s for s in range(t + 1) if segment_ids[row, s] == segment_ids[row, t]]
                keys = [turn(made["k"][s][group], positions[row, s]) for s in seen]
                scores = np.exp([attn_scale * (key @ query) for key in keys])
                parts.append(scores @ [made["v"][s][group] for s in seen] / scores.sum())
            outs.append(np.concatenate(parts) @ w["layers/attn/o/kernel"][layer])
        return outs

    def mlp(x, layer):
        gate, up = x @ w["layers/mlp/gate/kernel"][layer], x @ w["layers/mlp/up/kernel"][layer]
        return (gate / (1 + np.exp(-gate)) * up) @ w["layers/mlp/down/kernel"][layer]

    logits = []
    for row in range(len(tokens)):
        xs = [scales.embed_scale * w["embed/embedding"][token] for token in tokens[row]]
        for layer in range(config.num_layers):
            normed = [norm(x, w["layers/attn_norm/scale"][layer]) for x in xs]
            mult = scales.residual_mult
            xs = [x + mult * out for x, out in zip(xs, attention(normed, layer, row), strict=True)]
            xs = [x + mult * mlp(norm(x, w["layers/mlp_norm/scale"][layer]), layer) for x in xs]
        head = w["head/kernel"] if "head/kernel" in w else w["embed/embedding"].T
        logits.append([scales.logit_mult * (norm(x, w["final_norm/scale"]) @ head) for x in xs])
    return np.array(logits)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": False, "head_dim": 10, "num_kv_heads": 1, "rope": Rope(theta=300.0)},
        {"scales": Scales(embed_scale=3.0, attn_scale=0.7, residual_mult=0.4, logit_mult=1.7)},
    ],
)
def test_forward_against_float64(build, tokens, packed, changes):
    model = build(**changes)
    got = model(tokens, **packed)
    expected = forward(tree.flatten(model), model.config, tokens, packed["positions"], packed["segment_ids"])
    assert np.abs(expected).max() > 1
    real = packed["segment_ids"] != 0
    np.testing.assert_allclose(np.asarray(got)[real], expected[real], atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("tied", "kv_heads"), [(True, 2), (False, 4)])
def test_forward_against_hugging_face_llama(build, tied, kv_heads):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = build(tied=tied, num_kv_heads=kv_heads, head_dim=8, rope=Rope(theta=500.0))
    config = model.config
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(
            vocab_size=model.vocab_size,
            hidden_size=config.embed_dim,
            intermediate_size=config.mlp_width,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_width,
            rms_norm_eps=config.arch.norm.eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            rope_theta=config.rope.theta,
            tie_word_embeddings=tied,
            initializer_range=0.2,
            max_position_embeddings=64,
        ),
        attn_implementation="eager",
        dtype=torch.float32,
    ).eval()
    with torch.no_grad():  # the norms start at 1, where a missing one would not show
        for name, parameter in theirs.named_parameters():
            if "norm" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    model = tree.unflatten(model, renamed(state, config.num_layers, tied))
    tokens = np.random.default_rng(3).integers(0, model.vocab_size, (2, 40))
    with torch.no_grad():
        expected = theirs(torch.as_tensor(tokens)).logits.numpy()
    assert np.abs(expected).max() > 1
    got = model(jnp.asarray(tokens))
    np.testing.assert_allclose(got, expected, atol=5e-5 * np.abs(expected).max())


def renamed(state, num_layers, tied):
    """Map transformers' names to ours: torch keeps `(out, in)`, and layers apart."""
    names = {
        "attn_norm/scale": "input_layernorm",
        "attn/q/kernel": "self_attn.q_proj",
        "attn/k/kernel": "self_attn.k_proj",
        "attn/v/kernel": "self_attn.v_proj",
        "attn/o/kernel": "self_attn.o_proj",
        "mlp_norm/scale": "post_attention_layernorm",
        "mlp/gate/kernel": "mlp.gate_proj",
        "mlp/up/kernel": "mlp.up_proj",
        "mlp/down/kernel": "mlp.down_proj",
    }
    ours = {
        "embed/embedding": state["model.embed_tokens.weight"],
        "final_norm/scale": state["model.norm.weight"],
    }
    if not tied:
        ours["head/kernel"] = state["lm_head.weight"].T
    for path, name in names.items():
        each = [state[f"model.layers.{layer}.{name}.weight"] for layer in range(num_layers)]
        ours[f"layers/{path}"] = np.stack([weight.T for weight in each])
    return {path: jnp.asarray(array) for path, array in ours.items()}
