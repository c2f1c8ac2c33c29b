"""OLMo 1, 2 and 3, and OLMoE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from styrax.models.arch import Arch, Attn, Norm
from styrax.models.config import DecoderConfig
from styrax.models.families.common import Family, Table, act, base, layer_types, layers, mlp, written
from styrax.models.families.llama import norm
from styrax.models.hf.names import POST, Names
from styrax.models.hf.rope import read_rope, write_rope
from styrax.models.moe_config import MoE, Routing
from styrax.models.rope_config import Rope


def _attn(table: Table, **fields: Any) -> Attn:
    bias = table.get("attention_bias", False)
    return Attn(qkv_bias=bias, out_bias=bias, **fields)


def _olmo(table: Table) -> DecoderConfig:
    plain = Norm(kind="layer", eps=1e-5, scale=False, late_cast=True)
    return DecoderConfig(
        **base(table), arch=Arch(norm=plain, attn=_attn(table, clip=table.get("clip_qkv")), mlp=mlp(table))
    )


def _olmo2(table: Table, **fields: Any) -> DecoderConfig:
    layer, theta = fields.pop("layer", None), fields.pop("theta", 10_000.0)
    attn = _attn(table, qk_norm="flat")
    arch = Arch(norm=norm(table, 1e-5, late_cast=True), placement="post", attn=attn, mlp=mlp(table), **fields)
    return DecoderConfig(**base(table, layer=layer, theta=theta), arch=arch)


def _olmo3(table: Table) -> DecoderConfig:
    names = layers(table, lambda layer: "sliding_attention" if (layer + 1) % 4 else "full_attention")
    theta = table.get("rope_theta") or 500_000.0
    rope = Rope(theta=theta)
    if (table.get("rope_parameters") or {}).get("sliding_attention"):
        rope = read_rope(table, theta, "sliding_attention")
    local = _attn(table, qk_norm="flat", window=table.get("sliding_window", 4096), rope=rope)
    fields: dict[str, Any] = {"layers": names, "local": local if "local" in names else None}
    return _olmo2(table, layer="full_attention", theta=500_000.0, **fields)


def _olmoe(table: Table) -> DecoderConfig:
    moe = MoE(
        num_experts=table.get("num_experts", 64),
        experts_per_token=table.get("num_experts_per_tok", 8),
        expert_dim=table["intermediate_size"],
        routing=Routing(renormalise=table.get("norm_topk_prob", False)),
    )
    attn = _attn(table, qk_norm="flat", clip=table.get("clip_qkv"))
    return DecoderConfig(**base(table), arch=Arch(norm=norm(table, 1e-5), attn=attn, mlp=mlp(table), moe=moe))


def _write(config: DecoderConfig) -> dict[str, Any]:
    attn = config.arch.attn
    extra = {"attention_bias": attn.qkv_bias, "clip_qkv": attn.clip}
    return {**written(config), **extra, "hidden_act": act(config), "rms_norm_eps": config.arch.norm.eps}


def _write3(config: DecoderConfig) -> dict[str, Any]:
    local = config.arch.local or replace(config.arch.attn, rope=None)
    table = {**_write(config), "sliding_window": local.window, "layer_types": layer_types(config)}
    near = config.rope_of(local)
    table["rope_parameters"] = {"full_attention": write_rope(config.rope), "sliding_attention": write_rope(near)}
    return table


def _write_moe(config: DecoderConfig) -> dict[str, Any]:
    moe = config.arch.moe
    assert moe is not None
    extra = {"num_experts": moe.num_experts, "num_experts_per_tok": moe.experts_per_token}
    return {**_write(config), **extra, "norm_topk_prob": moe.routing.renormalise}


OLMO = Family("olmo", "OlmoForCausalLM", _olmo, _write, Names())
OLMO2 = Family("olmo2", "Olmo2ForCausalLM", _olmo2, _write, Names(norms=POST))
OLMO3 = Family("olmo3", "Olmo3ForCausalLM", _olmo3, _write3, Names(norms=POST))
OLMOE = Family("olmoe", "OlmoeForCausalLM", _olmoe, _write_moe, Names())
