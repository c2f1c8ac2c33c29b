"""DeepSeek V2 and V3 (and Kimi K2, which is built like V3): latent attention and many experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from styrax.core import UserError
from styrax.models.arch import Arch, Latent
from styrax.models.config import DecoderConfig
from styrax.models.families.common import Family, Table, act, base, cycle, mlp, need, written
from styrax.models.families.llama import norm
from styrax.models.hf.names import MTPNames, Names
from styrax.models.moe_config import Groups, MoE, Routing, Shared


def _config(table: Table, routing: Routing, *, dense: int, experts: int, chosen: int, shared: int) -> DecoderConfig:
    need(table, "moe_intermediate_size")
    latent = Latent(
        kv_rank=table.get("kv_lora_rank", 512),
        q_rank=table.get("q_lora_rank", 1536),
        nope_dim=table.get("qk_nope_head_dim", 128),
        rope_dim=table.get("qk_rope_head_dim", 64),
        v_dim=table.get("v_head_dim", 128),
        bias=table.get("attention_bias", False),
    )
    count = table.get("n_shared_experts", shared)
    moe = MoE(
        num_experts=table.get("n_routed_experts", experts),
        experts_per_token=table.get("num_experts_per_tok") or chosen,
        expert_dim=table["moe_intermediate_size"],
        routing=routing,
        shared=Shared(dim=table["moe_intermediate_size"] * count) if count else None,
    )
    first = table.get("first_k_dense_replace", dense)
    arch = Arch(
        norm=norm(table),
        latent=latent,
        layers=("latent",),
        mlp=mlp(table),
        moe=moe,
        sparse=cycle([layer >= first for layer in range(table["num_hidden_layers"])]),
    )
    return DecoderConfig(**{**base(table), "head_dim": latent.rope_dim}, arch=arch)


def _v2(table: Table) -> DecoderConfig:
    method = table.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UserError(f"topk_method in config.json: expected greedy or group_limited_greedy, got {method!r}")
    limited = method == "group_limited_greedy"
    groups = Groups(num=table["n_group"], kept=table["topk_group"], score="max") if limited else None
    routing = Routing(renormalise=False, scale=table.get("routed_scaling_factor", 1.0), groups=groups)
    return _config(table, routing, dense=0, experts=64, chosen=6, shared=2)


def _v3(table: Table) -> DecoderConfig:
    number, kept = table.get("n_group", 8), table.get("topk_group", 4)
    routing = Routing(
        score="sigmoid",
        renormalise=table.get("norm_topk_prob", True),
        scale=table.get("routed_scaling_factor", 2.5),
        correction=True,
        groups=Groups(num=number, kept=kept, score="top2") if number > 1 else None,
    )
    return _config(table, routing, dense=3, experts=256, chosen=8, shared=1)


def _write(config: DecoderConfig) -> dict[str, Any]:
    latent, moe = config.arch.latent, config.arch.moe
    assert latent is not None
    assert moe is not None
    groups = moe.routing.groups
    return {
        **written(config),
        "num_key_value_heads": config.num_heads,
        "hidden_act": act(config),
        "rms_norm_eps": config.arch.norm.eps,
        "attention_bias": latent.bias,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.v_dim,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.expert_dim,
        "n_shared_experts": moe.shared.dim // moe.expert_dim if moe.shared else 0,
        "routed_scaling_factor": moe.routing.scale,
        "norm_topk_prob": moe.routing.renormalise,
        "n_group": groups.num if groups else 1,
        "topk_group": groups.kept if groups else 1,
        "first_k_dense_replace": next((n for n, kind in enumerate(config.kinds) if kind.sparse), config.num_layers),
    }


def _write2(config: DecoderConfig) -> dict[str, Any]:
    grouped = config.arch.moe is not None and config.arch.moe.routing.groups is not None
    return {**_write(config), "topk_method": "group_limited_greedy" if grouped else "greedy"}


_NAMES = Names(interleaved=True, shared="shared_experts")
#: Source: https://github.com/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md ("Multi-Token Prediction (MTP) Modules").
_MTP = MTPNames(
    module="model.layers.{layer}.",
    block="",
    token_norm="enorm",
    hidden_norm="hnorm",
    proj="eh_proj",
    norm="shared_head.norm",
    mixer="latent",
    embed="embed_tokens",
    head="shared_head.head",
)
DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", _v2, _write2, _NAMES)
DEEPSEEK_V3 = Family("deepseek_v3", "DeepseekV3ForCausalLM", _v3, _write, replace(_NAMES, mtp=_MTP))
