"""Write packages/models/tests/golden/families.npz: what transformers makes of tiny models of every family.

    python tools/golden/models_families.py   # with numpy, torch and transformers installed

For each case: config.json as transformers writes it, the tensors of its checkpoint by name and shape, and logits of two
rows at eight positions, in float32. The values of the tensors follow from their names, see `families.values` beside the
tests, so that no weights are kept. Written with transformers 5.24.0, torch 2.13.0.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parents[2] / "packages/models/tests"
sys.path.insert(0, str(TESTS))

from families import POSITIONS, Case, tokens, values  # noqa: E402  # pyright: ignore[reportMissingImports]

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_key_value_heads": 4,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.75,
}
FULL = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
NEAR = {"rope_type": "default", "rope_theta": 1e4}
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 61,
}

# Name -> model_type and what differs from the sizes above.
CASES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}),
    "llama-3.1": (
        "llama",
        {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}, "max_position_embeddings": 16},
    ),
    "mistral": ("mistral", {"sliding_window": 7, "head_dim": 10}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "qwen2_moe": (
        "qwen2_moe",
        {**EXPERTS, "shared_expert_intermediate_size": 20, "decoder_sparse_step": 2},
    ),
    "qwen3": ("qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "head_dim": 12, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3_next": (
        "qwen3_next",
        {
            **EXPERTS,
            "head_dim": 16,
            "shared_expert_intermediate_size": 20,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "gemma": ("gemma", {"head_dim": 12}),
    "gemma2": ("gemma2", {"head_dim": 12, "sliding_window": 6, "query_pre_attn_scalar": 20}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 12,
            "sliding_window": 6,
            "num_hidden_layers": 8,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {"full_attention": FULL, "sliding_attention": NEAR},
        },
    ),
    "gemma4-e2b": (
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 3],
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma4-31b": (
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 6,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma4-26b-a4b": (
        "gemma4_text",
        {
            **GEMMA4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 12,
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **LATENT,
            "q_lora_rank": 12,
            "n_shared_experts": 1,
            "rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 12,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "rope_parameters": {**YARN, "rope_theta": 1.5e5, "truncate": False},
        },
    ),
    "olmo": ("olmo", {"clip_qkv": 0.8}),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 6,
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 1.0}),
    "phi": ("phi", {"qk_layernorm": True, "partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {"sliding_window": 9, "original_max_position_embeddings": 16, "rope_parameters": LONG}),
    "smollm3": ("smollm3", {}),
    "gpt2": ("gpt2", {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 61}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 2.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.3,
        },
    ),
    "cohere2": ("cohere2", {"sliding_window": 6, "logit_scale": 0.7}),
    "llama4": (
        "llama4_text",
        {
            "intermediate_size_mlp": 44,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
            "head_dim": 8,
            "floor_scale": 4,
            "attn_scale": 0.3,
        },
    ),
}


def make(name: str) -> tuple[Case, np.ndarray]:
    """Build a tiny model of transformers, give it the values that follow from the names, and run it."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    from safetensors.numpy import load_file, save_file  # pyright: ignore[reportMissingImports]

    kind, changes = CASES[name]
    sizes = {} if kind == "gpt2" else SIZES
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **TOKENS, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        shapes = {}
        for each, array in load_file(file).items():
            flat = array.ndim == 1 or not np.ptp(array)
            shapes[each] = (list(array.shape), float(array.flat[0]) if flat and not np.ptp(array) else None)
        table = json.loads((Path(folder) / "config.json").read_text())
        case = Case(name, table, shapes)
        save_file({each: values(each, *rest) for each, rest in shapes.items()}, file, {"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.as_tensor(tokens(case.vocab_size))).logits.numpy()
    return case, logits[:, POSITIONS]


def main() -> None:
    """Write all cases."""
    made = [make(name) for name in CASES]
    cases = json.dumps({case.name: [case.table, case.shapes] for case, _ in made}).encode()
    out = TESTS / "golden/families.npz"
    out.parent.mkdir(exist_ok=True)
    arrays = {"cases": np.frombuffer(cases, np.uint8), **{case.name: logits for case, logits in made}}
    np.savez_compressed(out, **arrays)  # pyright: ignore[reportArgumentType]
    print(out, out.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
