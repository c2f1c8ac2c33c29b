"""SmolLM3: Llama whose every fourth layer has no rotary positions."""

from __future__ import annotations

from typing import Any

from styrax.models.arch import Arch, Attn
from styrax.models.config import DecoderConfig
from styrax.models.families.common import Family, Table, act, base, cycle, layer_types, mlp, written
from styrax.models.families.llama import norm
from styrax.models.hf.names import Names
from styrax.models.rope_config import Rope


def _read(table: Table) -> DecoderConfig:
    every, count = table.get("no_rope_layer_interval", 4), table["num_hidden_layers"]
    turned = table.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(count)]
    bias = table.get("attention_bias", False)
    window = table.get("sliding_window") if table.get("use_sliding_window") else None
    names = cycle(["attn" if each else "local" for each in turned])
    local = Attn(qkv_bias=bias, out_bias=bias, window=window, rope=Rope(kind="none"))
    arch = Arch(
        norm=norm(table),
        attn=Attn(qkv_bias=bias, out_bias=bias),
        local=local if "local" in names else None,
        layers=names,
        mlp=mlp(table, bias=table.get("mlp_bias", False)),
    )
    fields = base(table, theta=2e6, tied=True)
    return DecoderConfig(**{**fields, "num_kv_heads": table.get("num_key_value_heads", 4)}, arch=arch)


def _write(config: DecoderConfig) -> dict[str, Any]:
    arch = config.arch
    window = arch.local.window if arch.local else None
    types = layer_types(config) if window else ["full_attention"] * config.num_layers
    return {
        **written(config),
        "hidden_act": act(config),
        "rms_norm_eps": arch.norm.eps,
        "attention_bias": arch.attn.qkv_bias,
        "mlp_bias": arch.mlp.bias,
        "no_rope_layers": [int(kind.mixer == "attn") for kind in config.kinds],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": types,
    }


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", _read, _write, Names())
