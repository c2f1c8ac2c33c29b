"""The name of every axis of every parameter: a table beside the model, not metadata inside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from styrax.models.config import DecoderConfig
    from styrax.models.layout import Kind

LogicalAxes = Mapping[str, tuple[str | None, ...]]

# Path within a block -> axes. A name that a block does not have is left out; see `_block`.
_ATTN: LogicalAxes = {
    "q/kernel": ("embed", "heads"),
    "k/kernel": ("embed", "kv_heads"),
    "v/kernel": ("embed", "kv_heads"),
    "o/kernel": ("heads", "embed"),
    "gate/kernel": ("embed", "heads"),
    "q/bias": ("heads",),
    "k/bias": ("kv_heads",),
    "v/bias": ("kv_heads",),
    "gate/bias": ("heads",),
    "o/bias": (None,),
    "sinks": (None,),
}
_LATENT: LogicalAxes = {
    "q/kernel": ("embed", "heads"),
    "q_a/kernel": ("embed", None),
    "q_b/kernel": (None, "heads"),
    "kv_a/kernel": ("embed", None),
    "k_rope/kernel": ("embed", None),
    "k_b/kernel": (None, "heads"),
    "v_b/kernel": (None, "heads"),
    "o/kernel": ("heads", "embed"),
    "q_a/bias": (None,),
    "kv_a/bias": (None,),
    "k_rope/bias": (None,),
    "o/bias": (None,),
}
_DELTA: LogicalAxes = {
    **{f"{name}/kernel": ("embed", "heads") for name in ("q", "k", "v", "z")},
    "a/kernel": ("embed", None),
    "b/kernel": ("embed", None),
    "conv": (None, "heads"),
    "log_decay": (None,),
    "decay_bias": (None,),
    "norm_scale": (None,),
    "o/kernel": ("heads", "embed"),
}
_PER_LAYER: LogicalAxes = {"gate/kernel": ("embed", "mlp"), "proj/kernel": ("mlp", "embed")}
_MLP: LogicalAxes = {
    "gate/kernel": ("embed", "mlp"),
    "up/kernel": ("embed", "mlp"),
    "down/kernel": ("mlp", "embed"),
    "gate/bias": ("mlp",),
    "up/bias": ("mlp",),
    "down/bias": (None,),
}


def decoder_axes(config: DecoderConfig) -> LogicalAxes:
    """Name the axes of a decoder's parameters.

    Axis `i` of the parameter at a path has the name `axes[i]`; `None` is never split. Rules such as
    `styrax.core.DEFAULT_RULES` say which mesh axes a name is split over.

    Args:
        config: Of the model.

    Returns:
        Path of the parameter -> one name per axis, for exactly the parameters that the model has.

    Example:
        >>> from styrax.models import DecoderConfig
        >>> decoder_axes(DecoderConfig())["layers/attn/q/kernel"]
        ('layers', 'embed', 'heads')
        >>> "head/kernel" in decoder_axes(DecoderConfig()), "head/kernel" in decoder_axes(DecoderConfig(tied=False))
        (False, True)
    """
    arch = config.arch
    axes: dict[str, tuple[str | None, ...]] = {"embed/embedding": ("vocab", "embed")}
    if arch.learned_positions:
        axes["positions/embedding"] = (None, "embed")
    if arch.per_layer is not None:
        axes |= {"per_layer/embed/embedding": ("vocab", "embed"), "per_layer/proj/kernel": ("embed", None)}
        axes |= _norm(config, "per_layer/norm")
    for number, stack in enumerate(config.plan[0]):
        prefix = "layers" if config.uniform else f"layers/{number}"
        axes |= {f"{prefix}/{path}": ("layers", *names) for path, names in _block(config, stack.kind).items()}
    axes |= _norm(config, "final_norm")
    if arch.head.mtp:
        further = {"proj/kernel": (None, "embed"), **_norm(config, "token_norm"), **_norm(config, "hidden_norm")}
        further |= _norm(config, "norm")
        own = config.kinds[-1]._replace(role="own")
        further |= {f"block/{path}": names for path, names in _block(config, own).items()}
        axes |= {f"mtp/{path}": (None, *names) for path, names in further.items()}
    if not config.tied:
        axes["head/kernel"] = ("embed", "vocab")
    if arch.head.bias:
        axes["head_bias"] = ("vocab",)
    return axes


def _block(config: DecoderConfig, kind: Kind) -> LogicalAxes:
    arch = config.arch
    axes = dict(_mixer(config, kind))
    if arch.placement != "post":
        axes |= _norm(config, "attn_norm") | ({} if arch.parallel else _norm(config, "mlp_norm"))
    if arch.placement != "pre":
        axes |= _norm(config, "attn_post_norm") | _norm(config, "mlp_post_norm")
    if arch.per_layer is not None:
        axes |= {f"per_layer/{path}": names for path, names in _PER_LAYER.items()} | _norm(config, "per_layer/norm")
    if config.scales.block_scale:
        axes["scale"] = (None,)
    if kind.sparse and arch.moe is not None:
        axes |= {f"moe/{path}": names for path, names in arch.moe.logical_axes().items()}
        if not arch.moe.beside_mlp:
            return axes
        axes |= _norm(config, "moe_norm") if arch.placement != "post" else {}
        if arch.placement != "pre":
            axes |= _norm(config, "moe_post_norm") | _norm(config, "dense_post_norm")
    kept = {"gate": arch.mlp.gated, "bias": arch.mlp.bias}
    return axes | {f"mlp/{path}": names for path, names in _MLP.items() if _has(path, kept)}


def _mixer(config: DecoderConfig, kind: Kind) -> LogicalAxes:
    name, part = kind.mixer, getattr(config.arch, kind.mixer)
    if name == "delta":
        return {f"delta/{path}": names for path, names in _DELTA.items()}
    if name == "latent":
        kept = {"q": part.q_rank is None, "q_a": part.q_rank is not None, "q_b": part.q_rank is not None}
        axes = {path: names for path, names in _LATENT.items() if _has(path, {**kept, "bias": part.bias})}
        axes |= {"kv_norm/scale": (None,)} | ({} if part.q_rank is None else {"q_norm/scale": (None,)})
        return {f"attn/{path}": names for path, names in axes.items()}
    own = kind.role != "shared"
    kept = {"gate": part.gated, "sinks": part.sinks, "k": own, "v": own and not part.tied_values}
    axes = {path: names for path, names in _ATTN.items() if _has(path, kept)}
    axes = {
        path: names
        for path, names in axes.items()
        if not path.endswith("bias") or (part.out_bias if path == "o/bias" else part.qkv_bias)
    }
    if part.qk_norm in ("head", "flat"):
        axes |= _norm(config, "q_norm") | (_norm(config, "k_norm") if own else {})
    return {f"attn/{path}": names for path, names in axes.items()}


def _has(path: str, kept: Mapping[str, bool]) -> bool:
    return all(kept.get(part, True) for part in path.split("/"))


def _norm(config: DecoderConfig, name: str) -> dict[str, tuple[str | None, ...]]:
    norm = config.arch.norm
    return {f"{name}/{part}": (None,) for part, there in (("scale", norm.scale), ("bias", norm.bias)) if there}
