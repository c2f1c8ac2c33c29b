"""Mistral and Mixtral: Llama with a window, and with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from styrax.models.arch import Arch, Attn
from styrax.models.config import DecoderConfig
from styrax.models.families.common import Family, Table, act, base, mlp, need, written
from styrax.models.families.llama import norm
from styrax.models.hf.names import Names
from styrax.models.moe_config import MoE

_MIXTRAL = Names(moe="block_sparse_moe", expert={"gate": "w1", "up": "w3", "down": "w2"})


def _mistral(table: Table, theta: float = 10_000.0, eps: float = 1e-6) -> DecoderConfig:
    fields = base(table, theta=theta)
    fields["num_kv_heads"] = table.get("num_key_value_heads", 8)
    attn = Attn(window=table.get("sliding_window", 4096 if table["model_type"] == "mistral" else None))
    return DecoderConfig(**fields, arch=Arch(norm=norm(table, eps), attn=attn, mlp=mlp(table)))


def _mixtral(table: Table) -> DecoderConfig:
    need(table, "intermediate_size")
    config = _mistral(table, 1e6, 1e-5)
    moe = MoE(
        num_experts=table.get("num_local_experts", 8),
        experts_per_token=table.get("num_experts_per_tok", 2),
        expert_dim=table["intermediate_size"],
        activation=config.arch.mlp.activation,
    )
    return replace(config, arch=replace(config.arch, moe=moe))


def _write(config: DecoderConfig) -> dict[str, Any]:
    extra: dict[str, Any] = {"sliding_window": config.arch.attn.window, "rms_norm_eps": config.arch.norm.eps}
    if moe := config.arch.moe:
        extra |= {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.experts_per_token}
    return {**written(config), **extra, "hidden_act": act(config)}


MISTRAL = Family("mistral", "MistralForCausalLM", _mistral, _write, Names())
MIXTRAL = Family("mixtral", "MixtralForCausalLM", _mixtral, _write, _MIXTRAL)
