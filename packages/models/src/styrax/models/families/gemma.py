"""Gemma 1, 2 and the text part of 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from styrax.core import UserError
from styrax.models.arch import Arch, Attn, Head, Norm
from styrax.models.config import DecoderConfig, Scales
from styrax.models.families.common import Family, Table, act, base, layer_types, layers, mlp, written
from styrax.models.hf.names import BOTH, Names
from styrax.models.hf.rope import read_rope, write_rope
from styrax.models.rope_config import Rope


def _common(table: Table, attn: dict[str, Any], *, act_key: str, **fields: Any) -> DecoderConfig:
    if table.get("use_bidirectional_attention"):
        raise UserError("use_bidirectional_attention in config.json: a decoder here sees the past only")
    bias = table.get("attention_bias", False)
    attn = {**attn, "qkv_bias": bias, "out_bias": bias}
    window = table.get("sliding_window", 4096)
    local_rope = fields.pop("local_rope", None)
    names = fields.get("layers", ("attn",))
    arch = Arch(
        norm=Norm(eps=table.get("rms_norm_eps", 1e-6), offset=True, late_cast=True),
        attn=Attn(**attn),
        local=Attn(**attn, window=window, rope=local_rope) if "local" in names else None,
        mlp=mlp(table, act_key, "gelu_pytorch_tanh"),
        **fields,
    )
    scalar = (
        table.get("query_pre_attn_scalar", 256)
        if "query_pre_attn_scalar" in table or arch.placement == "both"
        else None
    )
    scales = Scales(embed_scale=table["hidden_size"] ** 0.5, attn_scale=None if scalar is None else scalar**-0.5)
    sizes = base(table, tied=True, layer="full_attention", theta=1e6 if table["model_type"] == "gemma3_text" else 1e4)
    sizes["head_dim"] = table.get("head_dim") or 256
    return DecoderConfig(**sizes, scales=scales, arch=arch)


def _gemma(table: Table) -> DecoderConfig:
    # Configs of the first release say "gelu" and mean the tanh form.
    said = table.get("hidden_activation") or table.get("hidden_act")
    table = {**table, "hidden_act": "gelu_pytorch_tanh" if said in (None, "gelu") else said}
    return _common(table, {}, act_key="hidden_act")


def _gemma2(table: Table) -> DecoderConfig:
    return _common(
        table,
        {"softcap": table.get("attn_logit_softcapping", 50.0)},
        act_key="hidden_activation",
        placement="both",
        head=Head(softcap=table.get("final_logit_softcapping", 30.0)),
        layers=layers(table, lambda layer: "full_attention" if layer % 2 else "sliding_attention"),
    )


def _gemma3(table: Table) -> DecoderConfig:
    every = table.get("sliding_window_pattern", 6)
    names = layers(table, lambda layer: "sliding_attention" if (layer + 1) % every else "full_attention")
    local = Rope(theta=table.get("rope_local_base_freq", 10_000.0))
    if (table.get("rope_parameters") or {}).get("sliding_attention"):
        local = read_rope(table, 10_000.0, "sliding_attention")
    return _common(
        table,
        {"qk_norm": "head"},
        act_key="hidden_activation",
        placement="both",
        head=Head(softcap=table.get("final_logit_softcapping")),
        layers=names,
        local_rope=local,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    arch = config.arch
    extra = {"rms_norm_eps": arch.norm.eps, "attention_bias": arch.attn.qkv_bias, "hidden_act": act(config)}
    return {**written(config), **extra}


def _write2(config: DecoderConfig) -> dict[str, Any]:
    arch, scale = config.arch, config.scales.attn_scale or config.head_width**-0.5
    table = _write(config)
    table["hidden_activation"] = table.pop("hidden_act")
    return {
        **table,
        "query_pre_attn_scalar": round(scale**-2),
        "sliding_window": arch.local.window if arch.local else None,
        "layer_types": layer_types(config),
        "final_logit_softcapping": arch.head.softcap,
        "attn_logit_softcapping": arch.attn.softcap,
    }


def _write3(config: DecoderConfig) -> dict[str, Any]:
    table = _write2(config)
    local = config.arch.local or replace(config.arch.attn, rope=Rope())
    near = config.rope_of(local)
    table["rope_parameters"] = {"full_attention": write_rope(config.rope), "sliding_attention": write_rope(near)}
    return {**table, "rope_local_base_freq": near.theta}


_NAMES = Names(norms=BOTH)
GEMMA = Family("gemma", "GemmaForCausalLM", _gemma, _write, Names())
GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", _gemma2, _write2, _NAMES)
GEMMA3 = Family("gemma3_text", "Gemma3ForCausalLM", _gemma3, _write3, _NAMES)
