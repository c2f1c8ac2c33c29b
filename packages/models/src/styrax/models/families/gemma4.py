"""The text part of Gemma 4: wide heads in layers without a window, shared keys, and an embedding for each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from styrax.core import UserError
from styrax.models.arch import Arch, Attn, Head, Norm, PerLayer, Sharing
from styrax.models.config import DecoderConfig, Scales
from styrax.models.families.common import Family, Table, act, base, layer_types, layers, mlp, written
from styrax.models.hf.names import BESIDE, BOTH, Names
from styrax.models.hf.rope import read_rope, write_rope
from styrax.models.moe_config import MoE, Routing

_FULL, _NEAR = "full_attention", "sliding_attention"
_ROPE = {
    _NEAR: {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def _read(table: Table) -> DecoderConfig:
    if table.get("use_bidirectional_attention") == "all":
        raise UserError('use_bidirectional_attention "all" in config.json: a decoder here sees the past only')
    count = table["num_hidden_layers"]
    # The last layer sees everything, whatever the list says.
    said = table.get("layer_types") or [_NEAR if (layer + 1) % 6 else _FULL for layer in range(count)]
    table = {"rope_parameters": _ROPE, **table, "layer_types": [*said[:-1], _FULL]}
    table = table if table.get("rope_parameters") else {**table, "rope_parameters": _ROPE}
    names = layers(table, lambda _: _FULL)
    bias, eps = table.get("attention_bias", False), table.get("rms_norm_eps", 1e-6)
    common: dict[str, Any] = {"qkv_bias": bias, "out_bias": bias, "qk_norm": "head", "v_norm": True}
    near = Attn(**common, window=table.get("sliding_window", 512), rope=read_rope(table, 10_000.0, _NEAR))
    sharing, width = table.get("num_kv_shared_layers"), table.get("hidden_size_per_layer_input", 256)
    mult = 2 if table.get("use_double_wide_mlp") else 1
    arch = Arch(
        norm=Norm(eps=eps, late_cast=True),
        placement="both",
        attn=Attn(**common, **_full(table, said), tied_values=table.get("attention_k_eq_v", False)),
        local=near if "local" in names else None,
        layers=names,  # pyright: ignore[reportArgumentType]
        mlp=mlp(table, "hidden_activation", "gelu_pytorch_tanh"),
        moe=_moe(table, eps) if table.get("enable_moe_block") else None,
        head=Head(softcap=table.get("final_logit_softcapping")),
        sharing=Sharing(layers=sharing, mlp_mult=mult) if sharing else None,
        per_layer=_per_layer(table, width) if width else None,
    )
    scales = Scales(embed_scale=table["hidden_size"] ** 0.5, attn_scale=1.0, block_scale=True)
    sizes = {**base(table, tied=True, layer=_FULL), "head_dim": table.get("head_dim") or 256}
    return DecoderConfig(**sizes, scales=scales, arch=arch)


def _full(table: Table, types: list[str]) -> dict[str, Any]:
    """Read the heads of layers without a window, in either of two spellings."""
    given, usual = table.get("per_layer_config"), table.get("num_key_value_heads")
    if not isinstance(given, Mapping):
        heads = table.get("num_global_key_value_heads") if table.get("attention_k_eq_v") else None
        return {"head_dim": table.get("global_head_dim", 512), "num_kv_heads": None if heads == usual else heads}
    fields = [dict(given.get(str(layer)) or {}) for layer in range(len(types))]
    full = fields[-1]
    # Only these two, in these layers, and the same in all of them.
    wrong = [
        layer
        for layer, (kind, found) in enumerate(zip([*types[:-1], _FULL], fields, strict=True))
        if found != (full if kind == _FULL else {}) or found.keys() - {"head_dim", "num_key_value_heads"}
    ]
    if wrong:
        raise UserError(
            "per_layer_config in config.json: expected head_dim and num_key_value_heads, the same in all layers of "
            f"{_FULL} and in no others; got other values in layers {', '.join(map(str, wrong))}"
        )
    heads = full.get("num_key_value_heads")
    return {"head_dim": full.get("head_dim"), "num_kv_heads": None if heads == usual else heads}


def _per_layer(table: Table, width: int) -> PerLayer:
    rows = table.get("vocab_size_per_layer_input", 262_144)
    return PerLayer(dim=width, vocab_size=None if rows == table.get("vocab_size") else rows)


def _moe(table: Table, eps: float) -> MoE:
    return MoE(
        num_experts=table["num_experts"],
        experts_per_token=table["top_k_experts"],
        expert_dim=table["moe_intermediate_size"],
        routing=Routing(norm_eps=eps, expert_scale=True),
        activation=mlp(table, "hidden_activation", "gelu_pytorch_tanh").activation,
        beside_mlp=True,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    arch = config.arch
    moe, sharing, per_layer = arch.moe, arch.sharing, arch.per_layer
    local = arch.local or Attn(window=512, rope=read_rope({"rope_parameters": _ROPE}, 10_000.0, _NEAR))
    width, heads, types = config.head_width_of(arch.attn), config.kv_heads_of(arch.attn), layer_types(config)
    own = {"head_dim": width, **({"num_key_value_heads": heads} if heads != config.kv_heads else {})}
    ropes = {_FULL: write_rope(config.rope), _NEAR: write_rope(config.rope_of(local))}
    return {
        **{name: value for name, value in written(config).items() if not name.startswith(("rope_", "partial_"))},
        "rope_parameters": ropes,
        "hidden_activation": act(config),
        "rms_norm_eps": arch.norm.eps,
        "attention_bias": arch.attn.qkv_bias,
        "attention_k_eq_v": arch.attn.tied_values,
        "global_head_dim": width,
        "num_global_key_value_heads": heads if heads != config.kv_heads else None,
        "per_layer_config": {str(layer): own for layer, kind in enumerate(types) if kind == _FULL},
        "sliding_window": local.window,
        "layer_types": types,
        "final_logit_softcapping": arch.head.softcap,
        "num_kv_shared_layers": sharing.layers if sharing else 0,
        "use_double_wide_mlp": sharing is not None and sharing.mlp_mult == 2,
        "hidden_size_per_layer_input": per_layer.dim if per_layer else 0,
        "vocab_size_per_layer_input": per_layer.vocab_size if per_layer else None,
        "enable_moe_block": moe is not None,
        "num_experts": moe.num_experts if moe else None,
        "top_k_experts": moe.experts_per_token if moe else None,
        "moe_intermediate_size": moe.expert_dim if moe else None,
    }


class _Gemma4(Family):
    def to_hf(self, config: DecoderConfig, *, vocab_size: int) -> dict[str, Any]:
        table = super().to_hf(config, vocab_size=vocab_size)
        own = table["vocab_size_per_layer_input"]
        return {**table, "vocab_size_per_layer_input": vocab_size if own is None else own}


_NAMES = Names(norms={**BOTH, **BESIDE}, moe="", router="router.proj", fused_experts="rows")
GEMMA4 = _Gemma4("gemma4_text", "Gemma4ForCausalLM", _read, _write, _NAMES)
