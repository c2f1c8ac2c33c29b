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
    for number, stack in enumerate(config.plan[0]):
        prefix = "layers" if config.uniform else f"layers/{number}"
        axes |= {f"{prefix}/{path}": ("layers", *names) for path, names in _block(config, stack.kind).items()}
    axes |= _norm(config, "final_norm")
    if not config.tied:
        axes["head/kernel"] = ("embed", "vocab")
    if arch.head_bias:
        axes["head_bias"] = ("vocab",)
    return axes


def _block(config: DecoderConfig, kind: Kind) -> LogicalAxes:
    arch = config.arch
    axes = dict(_mixer(config, kind.mixer))
    if arch.placement != "post":
        axes |= _norm(config, "attn_norm") | ({} if arch.parallel else _norm(config, "mlp_norm"))
    if arch.placement != "pre":
        axes |= _norm(config, "attn_post_norm") | _norm(config, "mlp_post_norm")
    if kind.sparse and arch.moe is not None:
        return axes | {f"moe/{path}": names for path, names in arch.moe.logical_axes().items()}
    kept = {"gate": arch.mlp.gated, "bias": arch.mlp.bias}
    return axes | {f"mlp/{path}": names for path, names in _MLP.items() if _has(path, kept)}


def _mixer(config: DecoderConfig, name: str) -> LogicalAxes:
    part = getattr(config.arch, name)
    if name == "delta":
        return {f"delta/{path}": names for path, names in _DELTA.items()}
    if name == "latent":
        kept = {"q": part.q_rank is None, "q_a": part.q_rank is not None, "q_b": part.q_rank is not None}
        axes = {path: names for path, names in _LATENT.items() if _has(path, {**kept, "bias": part.bias})}
        axes |= {"kv_norm/scale": (None,)} | ({} if part.q_rank is None else {"q_norm/scale": (None,)})
        return {f"attn/{path}": names for path, names in axes.items()}
    kept = {"gate": part.gated, "sinks": part.sinks}
    axes = {path: names for path, names in _ATTN.items() if _has(path, kept)}
    axes = {
        path: names
        for path, names in axes.items()
        if not path.endswith("bias") or (part.out_bias if path == "o/bias" else part.qkv_bias)
    }
    if part.qk_norm in ("head", "flat"):
        axes |= _norm(config, "q_norm") | _norm(config, "k_norm")
    return {f"attn/{path}": names for path, names in axes.items()}


def _has(path: str, kept: Mapping[str, bool]) -> bool:
    return all(kept.get(part, True) for part in path.split("/"))


def _norm(config: DecoderConfig, name: str) -> dict[str, tuple[str | None, ...]]:
    norm = config.arch.norm
    return {f"{name}/{part}": (None,) for part, there in (("scale", norm.scale), ("bias", norm.bias)) if there}
