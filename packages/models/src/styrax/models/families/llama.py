"""Llama 2, 3, 3.1 to 3.3, and what is built alike."""

from __future__ import annotations

from typing import Any

from styrax.models.arch import Arch, Attn, Norm
from styrax.models.config import DecoderConfig
from styrax.models.families.common import Family, Table, act, base, mlp, written
from styrax.models.hf.names import Names


def norm(table: Table, eps: float = 1e-6, **fields: Any) -> Norm:
    """Read an RMSNorm that casts before it multiplies.

    Args:
        table: All of config.json.
        eps: Where it is not said.
        fields: Of `Norm`.
    """
    return Norm(eps=table.get("rms_norm_eps", eps), **fields)


def _read(table: Table) -> DecoderConfig:
    bias = table.get("attention_bias", False)
    attn = Attn(qkv_bias=bias, out_bias=bias)
    return DecoderConfig(
        **base(table), arch=Arch(norm=norm(table), attn=attn, mlp=mlp(table, bias=table.get("mlp_bias", False)))
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    arch = config.arch
    extra = {"attention_bias": arch.attn.qkv_bias, "mlp_bias": arch.mlp.bias}
    return {**written(config), **extra, "hidden_act": act(config), "rms_norm_eps": arch.norm.eps}


LLAMA = Family("llama", "LlamaForCausalLM", _read, _write, Names())
