"""Decoder language models in Flax NNX: stacked layers, packed documents, a key/value cache, generation."""

from typing import TYPE_CHECKING

from styrax.core import lazy_exports

if TYPE_CHECKING:
    from styrax.models.cache import KVCache
    from styrax.models.config import DecoderConfig
    from styrax.models.decoder import Decoder
    from styrax.models.generate import generate
    from styrax.models.sharding import decoder_axes
    from styrax.models.stack import unstack

__all__ = ["Decoder", "DecoderConfig", "KVCache", "decoder_axes", "generate", "unstack"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Decoder": "decoder",
        "DecoderConfig": "config",
        "KVCache": "cache",
        "decoder_axes": "sharding",
        "generate": "generate",
        "unstack": "stack",
    },
)
