"""The text part of Llama 4: chunks, layers without positions, experts that read scaled inputs."""

from __future__ import annotations

from typing import Any

from styrax.models.arch import Arch, Attn, Tuning
from styrax.models.config import DecoderConfig
from styrax.models.families.common import Family, Table, act, base, cycle, mlp, written
from styrax.models.families.llama import norm
from styrax.models.hf.names import Names
from styrax.models.moe_config import MoE, Routing, Shared
from styrax.models.rope_config import Rope

_NAMES = Names(mlp="feed_forward", moe="feed_forward", router="router", fused_experts="halves", interleaved=True)


def _read(table: Table) -> DecoderConfig:
    count, every = table["num_hidden_layers"], table.get("no_rope_layer_interval", 4)
    turned = table.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(count)]
    step = table.get("interleave_moe_layer_step", 1)
    sparse = table.get("moe_layers")
    sparse = list(range(step - 1, count, step)) if sparse is None else sparse
    bias = table.get("attention_bias", False)
    tuned = table.get("attn_temperature_tuning", True)
    names = cycle(["local" if each else "attn" for each in turned])
    moe = MoE(
        num_experts=table.get("num_local_experts", 16),
        experts_per_token=table.get("num_experts_per_tok", 1),
        expert_dim=table["intermediate_size"],
        routing=Routing(score="sigmoid", renormalise=False),
        input_scaled=True,
        shared=Shared(dim=table["intermediate_size"]),
    )
    local = Attn(
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="l2" if table.get("use_qk_norm", True) else "none",
        chunk=table.get("attention_chunk_size", 8192),
    )
    attn = Attn(
        qkv_bias=bias,
        out_bias=bias,
        rope=Rope(kind="none"),
        tuning=Tuning(scale=table.get("attn_scale", 0.1), floor=table.get("floor_scale", 8192)) if tuned else None,
    )
    arch = Arch(
        norm=norm(table, 1e-5),
        attn=attn,
        local=local if "local" in names else None,
        layers=names,
        mlp=mlp(table),
        moe=moe if sparse else None,
        sparse=cycle([layer in sparse for layer in range(count)]),
    )
    fields = base(table, theta=500_000.0)
    return DecoderConfig(**{**fields, "mlp_dim": table.get("intermediate_size_mlp", 16384)}, arch=arch)


def _write(config: DecoderConfig) -> dict[str, Any]:
    arch, moe, local = config.arch, config.arch.moe, config.arch.local
    tuning = arch.attn.tuning or Tuning()
    chunk = local.chunk if local else None
    chunked = [kind.mixer == "local" for kind in config.kinds]
    return {
        **written(config),
        "hidden_act": act(config),
        "rms_norm_eps": arch.norm.eps,
        "intermediate_size": moe.expert_dim if moe else config.mlp_width,
        "intermediate_size_mlp": config.mlp_width,
        "attention_bias": arch.attn.qkv_bias,
        "attention_chunk_size": chunk,
        "use_qk_norm": local is not None and local.qk_norm == "l2",
        "no_rope_layers": [int(each) for each in chunked],
        "layer_types": ["chunked_attention" if each and chunk else "full_attention" for each in chunked],
        "attn_temperature_tuning": arch.attn.tuning is not None,
        "attn_scale": tuning.scale,
        "floor_scale": int(tuning.floor),
        "moe_layers": [layer for layer, kind in enumerate(config.kinds) if kind.sparse],
        "num_local_experts": moe.num_experts if moe else 1,
        "num_experts_per_tok": moe.experts_per_token if moe else 1,
    }


LLAMA4 = Family("llama4_text", "Llama4ForCausalLM", _read, _write, _NAMES)
