"""The name of every axis of every parameter of an encoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from styrax.models.arch import Norm
    from styrax.models.encoder_config import EncoderConfig
    from styrax.models.sharding import LogicalAxes

Axes = dict[str, tuple[str | None, ...]]


def encoder_axes(config: EncoderConfig) -> LogicalAxes:
    """Name the axes of an encoder's parameters.

    Axis `i` of the parameter at a path has the name `axes[i]`; `None` is never split. Rules such as
    `styrax.core.DEFAULT_RULES` say which mesh axes a name is split over.

    Args:
        config: Of the model.

    Returns:
        Path of the parameter -> one name per axis, for exactly the parameters that the model has.

    Example:
        >>> from styrax.models.encoder_config import EncoderConfig
        >>> encoder_axes(EncoderConfig())["layers/attn/q/kernel"]
        ('layers', 'embed', 'heads')
    """
    axes = _input(config)
    if config.embed_norm:
        axes |= _norm(config.norm, "embed_norm")
    block = _attn(qkv_bias=config.qkv_bias) | _MLP | _norm(config.norm, "attn_norm") | _norm(config.norm, "mlp_norm")
    axes |= {f"layers/{path}": ("layers", *names) for path, names in block.items()}
    if config.placement == "pre":
        axes |= _norm(config.norm, "final_norm")
    if config.pool.by == "map":
        head = {"probe": (None,)} | _attn(qkv_bias=True) | _MLP | _norm(config.norm, "norm")
        axes |= {f"pool/{path}": names for path, names in head.items()}
    if config.pool.dense != "none":
        axes |= {"pool/dense/kernel": ("embed", None), "pool/dense/bias": (None,)}
    if config.pool.num_classes:
        axes |= {"head/kernel": ("embed", None), "head/bias": (None,)}
    return axes


_MLP: Axes = {
    "mlp/up/kernel": ("embed", "mlp"),
    "mlp/up/bias": ("mlp",),
    "mlp/down/kernel": ("mlp", "embed"),
    "mlp/down/bias": (None,),
}


def _attn(*, qkv_bias: bool) -> Axes:
    axes: Axes = {f"attn/{name}/kernel": ("embed", "heads") for name in ("q", "k", "v")}
    if qkv_bias:
        axes |= {f"attn/{name}/bias": ("heads",) for name in ("q", "k", "v")}
    return axes | {"attn/o/kernel": ("heads", "embed"), "attn/o/bias": (None,)}


def _input(config: EncoderConfig) -> Axes:
    axes: Axes = {"input/positions/embedding": (None, "embed")}
    given = config.input
    if given.kind == "text":
        types: Axes = {"input/types/embedding": (None, "embed")} if given.num_types else {}
        return axes | types | {"input/tokens/embedding": ("vocab", "embed")}
    axes["input/patches/kernel"] = (None, "embed")
    if given.patch_bias:
        axes["input/patches/bias"] = (None,)
    if given.class_token:
        axes["input/class_token"] = (None,)
    return axes


def _norm(norm: Norm, name: str) -> Axes:
    return {f"{name}/{part}": (None,) for part, there in (("scale", norm.scale), ("bias", norm.bias)) if there}
