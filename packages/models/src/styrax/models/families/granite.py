"""Granite: Llama with constant factors."""

from __future__ import annotations

from typing import Any

from styrax.models.arch import Arch, Attn
from styrax.models.config import DecoderConfig, Scales
from styrax.models.families.common import Family, Table, act, base, mlp, written
from styrax.models.families.llama import norm
from styrax.models.hf.names import Names


def _read(table: Table) -> DecoderConfig:
    bias = table.get("attention_bias", False)
    scales = Scales(
        embed_scale=table.get("embedding_multiplier", 1.0),
        attn_scale=table.get("attention_multiplier", 1.0),
        residual_mult=table.get("residual_multiplier", 1.0),
        logit_mult=1 / table.get("logits_scaling", 1.0),
    )
    attn = Attn(qkv_bias=bias, out_bias=bias)
    arch = Arch(norm=norm(table), attn=attn, mlp=mlp(table, bias=table.get("mlp_bias", False)))
    return DecoderConfig(**base(table), scales=scales, arch=arch)


def _write(config: DecoderConfig) -> dict[str, Any]:
    arch, scales = config.arch, config.scales
    return {
        **written(config),
        "hidden_act": act(config),
        "rms_norm_eps": arch.norm.eps,
        "attention_bias": arch.attn.qkv_bias,
        "mlp_bias": arch.mlp.bias,
        "embedding_multiplier": scales.embed_scale,
        "attention_multiplier": scales.attn_scale or config.head_width**-0.5,
        "residual_multiplier": scales.residual_mult,
        "logits_scaling": 1 / scales.logit_mult,
    }


GRANITE = Family("granite", "GraniteForCausalLM", _read, _write, Names())
