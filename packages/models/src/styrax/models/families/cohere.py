"""Cohere 2 (Command R7B, Command A): parallel blocks, rotary positions on the layers with a window only."""

from __future__ import annotations

from typing import Any

from styrax.models.arch import Arch, Attn, Norm
from styrax.models.config import DecoderConfig, Scales
from styrax.models.families.common import Family, Table, act, base, layer_types, layers, mlp, written
from styrax.models.hf.names import Names
from styrax.models.rope_config import Rope


def _read(table: Table) -> DecoderConfig:
    every = table.get("sliding_window_pattern", 4)
    names = layers(table, lambda layer: "sliding_attention" if (layer + 1) % every else "full_attention")
    bias = table.get("attention_bias", False)
    local = Attn(qkv_bias=bias, out_bias=bias, window=table.get("sliding_window", 4096))
    arch = Arch(
        norm=Norm(kind="layer", eps=table.get("layer_norm_eps", 1e-5), late_cast=True),
        parallel=True,
        attn=Attn(qkv_bias=bias, out_bias=bias, rope=Rope(kind="none")),
        local=local if "local" in names else None,
        layers=names,  # pyright: ignore[reportArgumentType]
        mlp=mlp(table),
    )
    return DecoderConfig(
        **base(table, tied=True), scales=Scales(logit_mult=table.get("logit_scale", 0.0625)), arch=arch
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    arch = config.arch
    return {
        **written(config),
        "hidden_act": act(config),
        "layer_norm_eps": arch.norm.eps,
        "attention_bias": arch.attn.qkv_bias,
        "sliding_window": arch.local.window if arch.local else None,
        "layer_types": layer_types(config),
        "logit_scale": config.scales.logit_mult,
    }


COHERE2 = Family("cohere2", "Cohere2ForCausalLM", _read, _write, Names(interleaved=True))
