"""Where the tensors of a Hugging Face decoder go, from its config and a few words that families spell differently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from styrax.models.arch import Attn, Delta, Latent
from styrax.models.hf.rules import Rule, halves, heads_of, linear, same, split

if TYPE_CHECKING:
    from styrax.models.config import DecoderConfig
    from styrax.models.layout import Kind

PRE = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
POST = {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
BOTH = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
#: Of experts beside an MLP.
BESIDE = {
    "moe_norm": "pre_feedforward_layernorm_2",
    "moe_post_norm": "post_feedforward_layernorm_2",
    "dense_post_norm": "post_feedforward_layernorm_1",
}


@dataclass(frozen=True, kw_only=True)
class MTPNames:
    """The words of a family for modules that predict tokens beyond the next one (multi-token prediction).

    Attributes:
        module: Before the tensors of a module; `{layer}` in it goes on counting where the model's layers end.
        block: Before those of its block, within the module.
        token_norm: The norm of the embedding; `hidden_norm`, `proj` and `norm` alike.
        mixer: Of the block, in our words; the block has experts if the model has any.
        most: Modules that there may be; none means any number.
        embed: A copy of the model's embedding, within the module; empty if there is none. `head` alike.
        count: What config.json calls the number of modules.
    """

    module: str
    block: str
    token_norm: str
    hidden_norm: str
    proj: str
    norm: str
    mixer: str
    most: int | None = None
    embed: str = ""
    head: str = ""
    count: str = "num_nextn_predict_layers"


@dataclass(frozen=True, kw_only=True)
class Names:
    """The words of a family.

    Attributes:
        prefix: Before all tensors but the head's.
        layers: The list of layers.
        embed: The token embedding; `positions`, `final_norm` and `head` alike.
        norms: Norm of ours -> theirs.
        attn: The attention.
        projections: Projection of ours -> theirs, within the attention.
        qk_norms: Norm of queries and keys of ours -> theirs.
        mlp: The MLP of a dense layer.
        mlp_parts: Product of ours -> theirs, within the MLP and the shared expert.
        moe: The MLP of a sparse layer; empty if its tensors stand in the layer itself.
        router: Its router.
        expert: Product of ours -> theirs, within one expert.
        shared: Its shared expert; the gate of that one has `_gate` after it.
        qkv: Queries, keys and values are one tensor of this name; empty if they are not.
        gate_up: Gate and up are one tensor of this name; empty if they are not.
        interleaved: Neighbours are rotated, not halves of a head.
        fused_experts: All experts are one tensor, in which the columns of gate and up are "halves" or "neighbours",
            or their "rows" are, halves too; empty if each expert has its own.
        mtp: Of multi-token prediction; none if the family's files have no place for it.
    """

    prefix: str = "model."
    layers: str = "layers"
    embed: str = "embed_tokens"
    positions: str = ""
    final_norm: str = "norm"
    head: str = "lm_head"
    norms: Mapping[str, str] = field(default_factory=lambda: PRE)
    attn: str = "self_attn"
    projections: Mapping[str, str] = field(
        default_factory=lambda: {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
    )
    qk_norms: Mapping[str, str] = field(default_factory=lambda: {"q_norm": "q_norm", "k_norm": "k_norm"})
    mlp: str = "mlp"
    mlp_parts: Mapping[str, str] = field(
        default_factory=lambda: {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    )
    moe: str = "mlp"
    router: str = "gate"
    expert: Mapping[str, str] = field(
        default_factory=lambda: {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    )
    shared: str = "shared_expert"
    qkv: str = ""
    gate_up: str = ""
    interleaved: bool = False
    fused_experts: str = ""
    mtp: MTPNames | None = None


def decoder_rules(config: DecoderConfig, names: Names) -> tuple[Rule, ...]:
    """List the rules for a whole model, with paths as if every layer were apart: `layers/{number}/...`.

    So are the modules that predict further tokens: `mtp/{number}/...`.

    Args:
        config: Of the model.
        names: Of the family.
    """
    rules = [same(f"{names.prefix}{names.embed}.weight", "embed/embedding")]
    if config.arch.learned_positions:
        rules.append(same(f"{names.prefix}{names.positions}.weight", "positions/embedding"))
    if config.arch.per_layer is not None:
        rules.append(same(f"{names.prefix}{names.embed}_per_layer.weight", "per_layer/embed/embedding"))
        rules += linear(f"{names.prefix}per_layer_model_projection", "per_layer/proj")
        rules += _norm(config, f"{names.prefix}per_layer_projection_norm", "per_layer/norm")
    for layer, kind in enumerate(config.kinds):
        theirs = f"{names.prefix}{names.layers}.{layer}."
        rules += [rule.within(theirs, f"layers/{layer}/") for rule in _block(config, names, kind)]
    rules += _norm(config, f"{names.prefix}{names.final_norm}", "final_norm")
    if not config.tied:
        rules += linear(names.head, "head")
    if config.arch.head.bias:
        rules.append(same(f"{names.head}.bias", "head_bias"))
    if names.mtp is not None:
        rules += _mtp(config, names, names.mtp)
    return tuple(rules)


def mtp_copies(config: DecoderConfig, names: Names) -> tuple[Rule, ...]:
    """List the tensors in which each module of multi-token prediction repeats the model's embedding and head.

    Args:
        config: Of the model.
        names: Of the family.
    """
    if names.mtp is None:
        return ()
    embed, head = same(".weight", "embed/embedding"), Rule(".weight", ("head/kernel",), turn=True)
    shared = ((names.mtp.embed, embed), (names.mtp.head, embed if config.tied else head))
    modules = [names.mtp.module.format(layer=config.num_layers + number) for number in range(config.arch.head.mtp)]
    return tuple(rule.within(module + theirs, "") for module in modules for theirs, rule in shared if theirs)


def _mtp(config: DecoderConfig, names: Names, words: MTPNames) -> list[Rule]:
    parts = [*linear(words.proj, "proj")]
    for theirs, ours in ((words.token_norm, "token_norm"), (words.hidden_norm, "hidden_norm"), (words.norm, "norm")):
        parts += _norm(config, theirs, ours)
    parts += [rule.within(words.block, "block/") for rule in _block(config, names, config.kinds[-1])]
    return [
        rule.within(words.module.format(layer=config.num_layers + number), f"mtp/{number}/")
        for number in range(config.arch.head.mtp)
        for rule in parts
    ]


def _norm(config: DecoderConfig, theirs: str, ours: str) -> list[Rule]:
    norm = config.arch.norm
    parts = (("weight", "scale", norm.scale), ("bias", "bias", norm.bias))
    return [same(f"{theirs}.{their}", f"{ours}/{our}") for their, our, there in parts if there]


def _block(config: DecoderConfig, names: Names, kind: Kind) -> list[Rule]:
    arch = config.arch
    kept = [
        ("attn_norm", arch.placement != "post"),
        ("mlp_norm", arch.placement != "post" and not arch.parallel),
        ("attn_post_norm", arch.placement != "pre"),
        ("mlp_post_norm", arch.placement != "pre"),
    ]
    rules = [rule for ours, there in kept if there for rule in _norm(config, names.norms[ours], ours)]
    part = getattr(arch, kind.mixer)
    if isinstance(part, Delta):
        rules += [rule.within("linear_attn.", "delta/") for rule in _delta(part)]
    elif isinstance(part, Latent):
        rules += [rule.within(f"{names.attn}.", "attn/") for rule in _latent(config, names, part)]
    else:
        rules += [rule.within(f"{names.attn}.", "attn/") for rule in _attn(config, names, part, kind)]
    if arch.per_layer is not None:
        rules += linear("per_layer_input_gate", "per_layer/gate") + linear("per_layer_projection", "per_layer/proj")
        rules += _norm(config, "post_per_layer_input_norm", "per_layer/norm")
    if config.scales.block_scale:
        rules.append(same("layer_scalar", "scale"))
    if kind.sparse and arch.moe is not None:
        prefix = f"{names.moe}." if names.moe else ""
        rules += [rule.within(prefix, "moe/") for rule in _moe(config, names)]
        if not arch.moe.beside_mlp:
            return rules
        own = [("moe_norm", arch.placement != "post")]
        own += [(name, arch.placement != "pre") for name in ("moe_post_norm", "dense_post_norm")]
        rules += [rule for ours, there in own if there for rule in _norm(config, names.norms[ours], ours)]
    prefix = f"{names.mlp}." if names.mlp else ""
    return rules + [rule.within(prefix, "mlp/") for rule in _mlp(config, names, kind)]


def _attn(config: DecoderConfig, names: Names, part: Attn, kind: Kind) -> list[Rule]:
    heads, kv_heads, width = config.num_heads, config.kv_heads_of(part), config.head_width_of(part)
    named, bias, own = names.projections, part.qkv_bias, kind.role != "shared"
    rules = []
    if names.qkv:
        index = heads_of(1, (heads * width, kv_heads * width, kv_heads * width))
        rules += split(names.qkv, ["q", "k", "v"], index, bias=bias)
    else:
        turned = config.rope_of(part).rotated(width) if names.interleaved else 0
        order = {name: halves(np.arange(n * width), width, turned) for name, n in (("q", heads), ("k", kv_heads))}
        if part.gated:
            rules += split(named["q"], ["q", "gate"], heads_of(heads, (width, width)), bias=bias)
        else:
            rules += split(named["q"], ["q"], [order["q"] if turned else None], bias=bias)
        if own:
            rules += split(named["k"], ["k"], [order["k"] if turned else None], bias=bias)
            rules += [] if part.tied_values else linear(named["v"], "v", bias=bias)
    rules += linear(named["o"], "o", bias=part.out_bias)
    if part.qk_norm in ("head", "flat"):
        norms = {ours: theirs for ours, theirs in names.qk_norms.items() if own or ours != "k_norm"}
        rules += [rule for ours, theirs in norms.items() for rule in _norm(config, theirs, ours)]
    return rules + ([same("sinks", "sinks")] if part.sinks else [])


def _latent(config: DecoderConfig, names: Names, part: Latent) -> list[Rule]:
    heads, width = config.num_heads, part.nope_dim + part.rope_dim
    rows = np.arange(heads * width)
    order = halves(rows, width, part.rope_dim) if names.interleaved else None
    if part.q_rank is None:
        rules = split("q_proj", ["q"], [order])
    else:
        rules = linear("q_a_proj", "q_a", bias=part.bias)
        rules += [same("q_a_layernorm.weight", "q_norm/scale"), *split("q_b_proj", ["q_b"], [order])]
    down = heads_of(1, (part.kv_rank, part.rope_dim))
    if names.interleaved:
        down[1] = halves(down[1], part.rope_dim)
    rules += split("kv_a_proj_with_mqa", ["kv_a", "k_rope"], down, bias=part.bias)
    rules += [same("kv_a_layernorm.weight", "kv_norm/scale")]
    rules += split("kv_b_proj", ["k_b", "v_b"], heads_of(heads, (part.nope_dim, part.v_dim)))
    return rules + linear("o_proj", "o", bias=part.bias)


def _delta(part: Delta) -> list[Rule]:
    repeats = part.num_v_heads // part.num_k_heads
    wide = (part.k_dim, part.k_dim, repeats * part.v_dim, repeats * part.v_dim)
    return [
        *split("in_proj_qkvz", ["q", "k", "v", "z"], heads_of(part.num_k_heads, wide)),
        *split("in_proj_ba", ["b", "a"], heads_of(part.num_k_heads, (repeats, repeats))),
        Rule("conv1d.weight", ("conv",), squeeze=1, turn=True),
        same("A_log", "log_decay"),
        same("dt_bias", "decay_bias"),
        same("norm.weight", "norm_scale"),
        *linear("out_proj", "o"),
    ]


def _mlp(config: DecoderConfig, names: Names, kind: Kind) -> list[Rule]:
    mlp, named, width = config.arch.mlp, names.mlp_parts, config.mlp_width_of(kind)
    if names.gate_up:
        rules = split(names.gate_up, ["gate", "up"], heads_of(1, (width, width)), bias=mlp.bias)
    else:
        rules = linear(named["gate"], "gate", bias=mlp.bias) if mlp.gated else []
        rules += linear(named["up"], "up", bias=mlp.bias)
    return rules + linear(named["down"], "down", bias=mlp.bias)


def _moe(config: DecoderConfig, names: Names) -> list[Rule]:
    moe = config.arch.moe
    assert moe is not None
    rules = linear(names.router, "router", bias=moe.routing.bias)
    if moe.routing.norm_eps is not None:
        rules.append(same("router.scale", "router/scale"))
    if moe.routing.expert_scale:
        rules.append(same("router.per_expert_scale", "router/expert_scale"))
    if moe.routing.correction:
        rules.append(same(f"{names.router}.e_score_correction_bias", "router/correction"))
    if names.fused_experts:
        rules += _fused_experts(moe.expert_dim, names.fused_experts, bias=moe.expert_bias)
    else:
        count = moe.num_experts
        rules += [
            Rule(f"experts.{{e}}.{theirs}.weight", (f"experts/{ours}/kernel",), turn=True, experts=count)
            for ours, theirs in names.expert.items()
        ]
    if moe.shared is not None:
        named = names.mlp_parts
        rules += [rule for ours in named for rule in linear(f"{names.shared}.{named[ours]}", f"shared/{ours}")]
        rules += linear(f"{names.shared}_gate", "shared_gate") if moe.shared.gated else []
    return rules


def _fused_experts(width: int, how: str, *, bias: bool) -> list[Rule]:
    columns, turn = np.arange(2 * width), how == "rows"
    gate, up = (columns[::2], columns[1::2]) if how == "neighbours" else np.split(columns, 2)
    both, axis = tuple(f"experts/{name}/kernel" for name in ("gate", "up")), -2 if turn else -1
    rules = [Rule("experts.gate_up_proj", both, (gate, up), axis=axis, turn=turn)]
    rules += [Rule("experts.down_proj", ("experts/down/kernel",), turn=turn)]
    if bias:
        biases = tuple(path.replace("kernel", "bias") for path in both)
        rules.append(Rule("experts.gate_up_proj_bias", biases, (gate, up), axis=-1))
        rules.append(same("experts.down_proj_bias", "experts/down/bias"))
    return rules
