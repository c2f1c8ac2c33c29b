"""GPT-OSS: sinks, alternating windows, and experts with biases and a clamped activation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from styrax.models.arch import Arch, Attn
from styrax.models.config import DecoderConfig
from styrax.models.families.common import Family, Table, act, base, layer_types, layers, mlp, written
from styrax.models.families.llama import norm
from styrax.models.hf.names import Names
from styrax.models.moe_config import Clamped, MoE, Routing

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read(table: Table) -> DecoderConfig:
    if not table.get("rope_parameters") and not table.get("rope_scaling"):
        table = {**table, "rope_scaling": _ROPE}
    bias = table.get("attention_bias", True)
    attn = Attn(qkv_bias=bias, out_bias=bias, sinks=True)
    names = layers(table, lambda layer: "full_attention" if layer % 2 else "sliding_attention")
    moe = MoE(
        num_experts=table.get("num_local_experts", 128),
        experts_per_token=table.get("num_experts_per_tok", 4),
        expert_dim=table["intermediate_size"],
        routing=Routing(bias=True),
        clamped=Clamped(limit=table.get("swiglu_limit", 7.0), slope=table.get("swiglu_alpha", 1.702)),
        expert_bias=True,
    )
    local = replace(attn, window=table.get("sliding_window", 128)) if "local" in names else None
    cast_last = norm(table, 1e-5, late_cast=True)
    arch = Arch(norm=cast_last, attn=attn, local=local, layers=names, mlp=mlp(table), moe=moe)  # pyright: ignore
    fields = base(table, theta=150_000.0)
    return DecoderConfig(**{**fields, "head_dim": table.get("head_dim") or 64}, arch=arch)


def _write(config: DecoderConfig) -> dict[str, Any]:
    arch, moe = config.arch, config.arch.moe
    assert moe is not None
    clamped = moe.clamped or Clamped()
    return {
        **written(config),
        "hidden_act": act(config),
        "rms_norm_eps": arch.norm.eps,
        "attention_bias": arch.attn.qkv_bias,
        "sliding_window": arch.local.window if arch.local else None,
        "layer_types": layer_types(config),
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "swiglu_limit": clamped.limit,
        "swiglu_alpha": clamped.slope,
    }


GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", _read, _write, Names(router="router", fused_experts="neighbours"))
