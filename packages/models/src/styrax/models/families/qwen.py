"""Qwen 2 and 3, dense, with experts, and Qwen3-Next with its recurrent layers."""

from __future__ import annotations

from typing import Any

from styrax.models.arch import Arch, Attn, Delta
from styrax.models.config import DecoderConfig
from styrax.models.families.common import Family, Table, act, base, cycle, layer_types, layers, mlp, written
from styrax.models.families.llama import norm
from styrax.models.hf.names import MTPNames, Names
from styrax.models.hf.rope import both_spellings, read_rope
from styrax.models.moe_config import MoE, Routing, Shared


def _arch(table: Table, attn: dict[str, Any], **fields: Any) -> Arch:
    """Make the blocks, with a window in the later layers if the config asks for one."""
    window = table.get("sliding_window", 4096) if table.get("use_sliding_window") else None
    first = table.get("max_window_layers", 28)
    names = layers(table, lambda layer: "sliding_attention" if window and layer >= first else "full_attention")
    local = Attn(**attn, window=window) if "local" in names else None
    return Arch(attn=Attn(**attn), local=local, layers=names, mlp=mlp(table), **fields)  # pyright: ignore


def _sparse(table: Table) -> tuple[bool, ...]:
    step, dense = table.get("decoder_sparse_step", 1), table.get("mlp_only_layers") or ()
    return cycle([layer not in dense and (layer + 1) % step == 0 for layer in range(table["num_hidden_layers"])])


def _moe(table: Table, *, experts: int, chosen: int, renormalise: bool, shared: bool) -> MoE:
    width = table.get("shared_expert_intermediate_size", 512)
    return MoE(
        num_experts=table.get("num_experts") or table.get("num_local_experts", experts),
        experts_per_token=table.get("num_experts_per_tok", chosen),
        expert_dim=table["moe_intermediate_size"],
        routing=Routing(renormalise=table.get("norm_topk_prob", renormalise)),
        shared=Shared(dim=width, gated=True) if shared else None,
    )


def _qwen2(table: Table) -> DecoderConfig:
    return DecoderConfig(**base(table), arch=_arch(table, {"qkv_bias": True}, norm=norm(table)))


def _qwen2_moe(table: Table) -> DecoderConfig:
    moe = _moe(table, experts=60, chosen=4, renormalise=False, shared=True)
    attn = {"qkv_bias": table.get("qkv_bias", True)}
    return DecoderConfig(**base(table), arch=_arch(table, attn, norm=norm(table), moe=moe, sparse=_sparse(table)))


def _qwen3_attn(table: Table) -> dict[str, Any]:
    bias = table.get("attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias, "qk_norm": "head"}


def _qwen3(table: Table) -> DecoderConfig:
    fields = base(table)
    fields["head_dim"] = table.get("head_dim") or 128
    return DecoderConfig(**fields, arch=_arch(table, _qwen3_attn(table), norm=norm(table)))


def _qwen3_moe(table: Table) -> DecoderConfig:
    moe = _moe(table, experts=128, chosen=8, renormalise=False, shared=False)
    attn = _qwen3_attn(table)
    if table.get("use_sliding_window"):
        attn["window"] = table.get("sliding_window", 4096)
    arch = Arch(norm=norm(table), attn=Attn(**attn), mlp=mlp(table), moe=moe, sparse=_sparse(table))
    return DecoderConfig(**base(table), arch=arch)


def _qwen3_next(table: Table) -> DecoderConfig:
    delta = Delta(
        num_k_heads=table.get("linear_num_key_heads", 16),
        num_v_heads=table.get("linear_num_value_heads", 32),
        k_dim=table.get("linear_key_head_dim", 128),
        v_dim=table.get("linear_value_head_dim", 128),
        conv=table.get("linear_conv_kernel_dim", 4),
    )
    every = table.get("full_attention_interval", 4)
    arch = Arch(
        norm=norm(table, offset=True, late_cast=True),
        attn=Attn(**_qwen3_attn(table), gated=True),
        delta=delta,
        layers=layers(table, lambda layer: "linear_attention" if (layer + 1) % every else "full_attention"),  # pyright: ignore
        mlp=mlp(table),
        moe=_moe(table, experts=512, chosen=10, renormalise=True, shared=True)
        if table.get("num_experts", table.get("num_local_experts", 512))
        else None,
        sparse=_sparse(table),
    )
    fields = base(table)
    fields["head_dim"] = table.get("head_dim") or 256
    return DecoderConfig(**{**fields, "rope": read_rope(table, 10_000.0, fraction=0.25)}, arch=arch)


def _write(config: DecoderConfig) -> dict[str, Any]:
    arch = config.arch
    window = arch.local.window if arch.local else arch.attn.window
    extra: dict[str, Any] = {"use_sliding_window": window is not None, "sliding_window": window}
    extra |= {"hidden_act": act(config), "rms_norm_eps": arch.norm.eps, "attention_bias": arch.attn.qkv_bias}
    extra["max_window_layers"] = next(
        (n for n, kind in enumerate(config.kinds) if kind.mixer == "local"), config.num_layers
    )
    return {**written(config), **extra, "layer_types": layer_types(config), **_write_moe(config)}


def _write_moe(config: DecoderConfig) -> dict[str, Any]:
    moe = config.arch.moe
    if moe is None:
        return {}
    extra = {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.expert_dim,
        "norm_topk_prob": moe.routing.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, kind in enumerate(config.kinds) if not kind.sparse],
    }
    return extra | ({"shared_expert_intermediate_size": moe.shared.dim} if moe.shared else {})


def _write_qwen2_moe(config: DecoderConfig) -> dict[str, Any]:
    return {**_write(config), "qkv_bias": config.arch.attn.qkv_bias}


def _write_qwen3_moe(config: DecoderConfig) -> dict[str, Any]:
    return {name: value for name, value in _write(config).items() if name != "layer_types"}


def _write_next(config: DecoderConfig) -> dict[str, Any]:
    delta = config.arch.delta
    assert delta is not None
    extra = {
        "linear_num_key_heads": delta.num_k_heads,
        "linear_num_value_heads": delta.num_v_heads,
        "linear_key_head_dim": delta.k_dim,
        "linear_value_head_dim": delta.v_dim,
        "linear_conv_kernel_dim": delta.conv,
        "partial_rotary_factor": config.rope.fraction,
    }
    return {**_write(config), **both_spellings(config.rope), **extra}


#: One module. The layers that vLLM lets it have would share all but the block.
_MTP = MTPNames(
    module="mtp.",
    block="layers.0.",
    token_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    proj="fc",
    norm="norm",
    mixer="attn",
    most=1,
)
QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _qwen2, _write, Names())
QWEN2_MOE = Family("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2_moe, _write_qwen2_moe, Names())
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _qwen3, _write, Names())
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe, _write_qwen3_moe, Names())
QWEN3_NEXT = Family("qwen3_next", "Qwen3NextForCausalLM", _qwen3_next, _write_next, Names(mtp=_MTP))
