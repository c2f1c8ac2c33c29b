"""Phi 1.5 and 2, with parallel blocks, and Phi 3 and 4, with fused projections."""

from __future__ import annotations

from typing import Any

from styrax.models.arch import Arch, Attn, Head, Norm
from styrax.models.config import DecoderConfig
from styrax.models.families.common import Family, Table, act, base, mlp, written
from styrax.models.families.llama import norm
from styrax.models.hf.names import Names
from styrax.models.hf.rope import read_rope

_PHI = Names(
    final_norm="final_layernorm",
    projections={"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "dense"},
    qk_norms={"q_norm": "q_layernorm", "k_norm": "k_layernorm"},
    mlp_parts={"up": "fc1", "down": "fc2"},
)


def _phi(table: Table) -> DecoderConfig:
    arch = Arch(
        norm=Norm(kind="layer", eps=table.get("layer_norm_eps", 1e-5), bias=True, late_cast=True),
        parallel=True,
        attn=Attn(qkv_bias=True, out_bias=True, qk_norm="head" if table.get("qk_layernorm") else "none"),
        mlp=mlp(table, default="gelu_new", gated=False, bias=True),
        head=Head(bias=True),
    )
    fields = {**base(table), "rope": read_rope(table, 10_000.0, fraction=0.5)}
    return DecoderConfig(**fields, arch=arch)


def _phi3(table: Table) -> DecoderConfig:
    arch = Arch(norm=norm(table, 1e-5), attn=Attn(window=table.get("sliding_window")), mlp=mlp(table))
    return DecoderConfig(**base(table), arch=arch)


def _write(config: DecoderConfig) -> dict[str, Any]:
    name = {"gelu_pytorch_tanh": "gelu_new"}.get(act(config), act(config))
    extra = {"hidden_act": name, "layer_norm_eps": config.arch.norm.eps}
    extra |= {"partial_rotary_factor": config.rope.fraction, "qk_layernorm": config.arch.attn.qk_norm == "head"}
    return {**written(config), **extra}


def _write3(config: DecoderConfig) -> dict[str, Any]:
    extra = {"hidden_act": act(config), "rms_norm_eps": config.arch.norm.eps, "sliding_window": config.arch.attn.window}
    if config.rope.original_max_len is not None:
        extra["original_max_position_embeddings"] = config.rope.original_max_len
    return {**written(config), **extra}


PHI = Family("phi", "PhiForCausalLM", _phi, _write, _PHI)
PHI3 = Family("phi3", "Phi3ForCausalLM", _phi3, _write3, Names(qkv="qkv_proj", gate_up="gate_up_proj"))
