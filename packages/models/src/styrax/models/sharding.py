"""The name of every axis of every parameter: a table beside the model, not metadata inside it."""

from collections.abc import Mapping

LogicalAxes = Mapping[str, tuple[str | None, ...]]

_DECODER: LogicalAxes = {
    "embed/embedding": ("vocab", "embed"),
    "layers/attn_norm/scale": ("layers", None),
    "layers/attn/q/kernel": ("layers", "embed", "heads"),
    "layers/attn/k/kernel": ("layers", "embed", "kv_heads"),
    "layers/attn/v/kernel": ("layers", "embed", "kv_heads"),
    "layers/attn/o/kernel": ("layers", "heads", "embed"),
    "layers/mlp_norm/scale": ("layers", None),
    "layers/mlp/gate/kernel": ("layers", "embed", "mlp"),
    "layers/mlp/up/kernel": ("layers", "embed", "mlp"),
    "layers/mlp/down/kernel": ("layers", "mlp", "embed"),
    "final_norm/scale": (None,),
}


def decoder_axes(*, tied: bool) -> LogicalAxes:
    """Name the axes of a decoder's parameters.

    Axis `i` of the parameter at a path has the name `axes[i]`; `None` is never split. Rules such as
    `styrax.core.DEFAULT_RULES` say which mesh axes a name is split over.

    Args:
        tied: Whether the output head is the transposed embedding, so that there is no `head/kernel`.

    Returns:
        Path of the parameter -> one name per axis, for exactly the parameters that the model has.

    Example:
        >>> decoder_axes(tied=True)["layers/attn/q/kernel"]
        ('layers', 'embed', 'heads')
        >>> sorted(decoder_axes(tied=False).keys() - decoder_axes(tied=True).keys())
        ['head/kernel']
    """
    return dict(_DECODER) if tied else {**_DECODER, "head/kernel": ("embed", "vocab")}
