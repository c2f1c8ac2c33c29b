"""GPT-2: learned positions, fused projections, kernels kept as [in, out]."""

from __future__ import annotations

from typing import Any

import numpy as np

from styrax.core import UserError
from styrax.models.arch import Arch, Attn, Norm
from styrax.models.config import DecoderConfig, Scales
from styrax.models.families.common import Family, Table, act, mlp, need
from styrax.models.hf.rules import Rule, same
from styrax.models.rope_config import Rope

_PREFIX = "transformer."


def _read(table: Table) -> DecoderConfig:
    need(table, "n_layer", "n_embd", "n_head", "vocab_size")
    if table.get("scale_attn_by_inverse_layer_idx"):
        raise UserError(
            "scale_attn_by_inverse_layer_idx in config.json: expected false, other scales per layer are not known"
        )
    said = table.get("tie_word_embeddings")
    arch = Arch(
        norm=Norm(kind="layer", eps=table.get("layer_norm_epsilon", 1e-5), bias=True, late_cast=True),
        attn=Attn(qkv_bias=True, out_bias=True),
        mlp=mlp(table, "activation_function", "gelu_new", gated=False, bias=True),
        learned_positions=True,
    )
    return DecoderConfig(
        num_layers=table["n_layer"],
        embed_dim=table["n_embd"],
        num_heads=table["n_head"],
        mlp_dim=table.get("n_inner") or 4 * table["n_embd"],
        tied=True if said is None else said,
        rope=Rope(kind="none"),
        max_len=table.get("n_positions", 1024),
        scales=Scales(attn_scale=None if table.get("scale_attn_weights", True) else 1.0),
        arch=arch,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        "n_layer": config.num_layers,
        "n_embd": config.embed_dim,
        "n_head": config.num_heads,
        "n_inner": config.mlp_width,
        "n_positions": config.max_len,
        "n_ctx": config.max_len,
        "activation_function": {"gelu_pytorch_tanh": "gelu_new"}.get(act(config), act(config)),
        "layer_norm_epsilon": config.arch.norm.eps,
        "scale_attn_weights": config.scales.attn_scale is None,
        "tie_word_embeddings": config.tied,
    }


def _rules(config: DecoderConfig) -> tuple[Rule, ...]:
    thirds = tuple(np.split(np.arange(3 * config.embed_dim), 3))
    rules = [same(f"{_PREFIX}wte.weight", "embed/embedding"), same(f"{_PREFIX}wpe.weight", "positions/embedding")]
    for layer in range(config.num_layers):
        block = [
            *_pair("ln_1", "attn_norm", "scale"),
            Rule("attn.c_attn.weight", tuple(f"attn/{each}/kernel" for each in "qkv"), thirds, axis=-1),
            Rule("attn.c_attn.bias", tuple(f"attn/{each}/bias" for each in "qkv"), thirds),
            *_pair("attn.c_proj", "attn/o", "kernel"),
            *_pair("ln_2", "mlp_norm", "scale"),
            *_pair("mlp.c_fc", "mlp/up", "kernel"),
            *_pair("mlp.c_proj", "mlp/down", "kernel"),
        ]
        rules += [rule.within(f"{_PREFIX}h.{layer}.", f"layers/{layer}/") for rule in block]
    rules += _pair(f"{_PREFIX}ln_f", "final_norm", "scale")
    return tuple(rules if config.tied else [*rules, Rule("lm_head.weight", ("head/kernel",), turn=True)])


def _pair(theirs: str, ours: str, weight: str) -> list[Rule]:
    return [same(f"{theirs}.weight", f"{ours}/{weight}"), same(f"{theirs}.bias", f"{ours}/bias")]


GPT2 = Family("gpt2", "GPT2LMHeadModel", _read, _write, _rules)
