"""Models in Flax NNX: decoders of every common family, encoders, and their Hugging Face folders."""

from typing import TYPE_CHECKING

from styrax.core import lazy_exports

if TYPE_CHECKING:
    from styrax.models.arch import MLP, Arch, Attn, Delta, Head, Latent, Norm, PerLayer, Sharing, Tuning
    from styrax.models.cache import KVCache
    from styrax.models.config import DecoderConfig, Runtime, Scales
    from styrax.models.cost import Cost, cost_of
    from styrax.models.decoder import Decoder, Hidden
    from styrax.models.decoding import Runner
    from styrax.models.encoder import Encoded, Encoder
    from styrax.models.encoder_config import EncoderConfig
    from styrax.models.encoder_sharding import encoder_axes
    from styrax.models.generate import Completion, generate, generate_batch
    from styrax.models.hf.load import from_pretrained
    from styrax.models.hf.load_encoder import encoder_from_pretrained
    from styrax.models.hf.load_gguf import from_gguf
    from styrax.models.hf.save import save_pretrained
    from styrax.models.hf.save_encoder import save_encoder
    from styrax.models.losses import LossTerm
    from styrax.models.moe_config import Clamped, Groups, MoE, Routing, Shared
    from styrax.models.mtp import MTP
    from styrax.models.rope_config import Llama3, LongRope, Rope, Yarn
    from styrax.models.sampling import Sampling
    from styrax.models.sharding import decoder_axes
    from styrax.models.stack import unstack
    from styrax.models.surgery import (
        Frozen,
        Grafted,
        drop_mtp,
        freeze,
        graft,
        keep_layers,
        swap,
        thaw,
        tie,
        untie,
    )
    from styrax.models.text import TextStream, stream_text
    from styrax.models.towers import Towers
    from styrax.models.towers_config import TowersConfig
    from styrax.models.view import view

__all__ = [
    "MLP",
    "MTP",
    "Arch",
    "Attn",
    "Clamped",
    "Completion",
    "Cost",
    "Decoder",
    "DecoderConfig",
    "Delta",
    "Encoded",
    "Encoder",
    "EncoderConfig",
    "Frozen",
    "Grafted",
    "Groups",
    "Head",
    "Hidden",
    "KVCache",
    "Latent",
    "Llama3",
    "LongRope",
    "LossTerm",
    "MoE",
    "Norm",
    "PerLayer",
    "Rope",
    "Routing",
    "Runner",
    "Runtime",
    "Sampling",
    "Scales",
    "Shared",
    "Sharing",
    "TextStream",
    "Towers",
    "TowersConfig",
    "Tuning",
    "Yarn",
    "cost_of",
    "decoder_axes",
    "drop_mtp",
    "encoder_axes",
    "encoder_from_pretrained",
    "freeze",
    "from_gguf",
    "from_pretrained",
    "generate",
    "generate_batch",
    "graft",
    "keep_layers",
    "save_encoder",
    "save_pretrained",
    "stream_text",
    "swap",
    "thaw",
    "tie",
    "unstack",
    "untie",
    "view",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Arch": "arch",
        "Attn": "arch",
        "Clamped": "moe_config",
        "Completion": "generate",
        "Cost": "cost",
        "Decoder": "decoder",
        "DecoderConfig": "config",
        "Delta": "arch",
        "Encoded": "encoder",
        "Encoder": "encoder",
        "EncoderConfig": "encoder_config",
        "Frozen": "surgery",
        "Grafted": "surgery",
        "Groups": "moe_config",
        "Head": "arch",
        "Hidden": "decoder",
        "KVCache": "cache",
        "Latent": "arch",
        "Llama3": "rope_config",
        "LongRope": "rope_config",
        "LossTerm": "losses",
        "MLP": "arch",
        "MTP": "mtp",
        "MoE": "moe_config",
        "Norm": "arch",
        "PerLayer": "arch",
        "Rope": "rope_config",
        "Routing": "moe_config",
        "Runner": "decoding",
        "Runtime": "config",
        "Sampling": "sampling",
        "Scales": "config",
        "Shared": "moe_config",
        "Sharing": "arch",
        "TextStream": "text",
        "Towers": "towers",
        "TowersConfig": "towers_config",
        "Tuning": "arch",
        "Yarn": "rope_config",
        "cost_of": "cost",
        "decoder_axes": "sharding",
        "drop_mtp": "surgery",
        "encoder_axes": "encoder_sharding",
        "encoder_from_pretrained": "hf.load_encoder",
        "freeze": "surgery",
        "from_gguf": "hf.load_gguf",
        "from_pretrained": "hf.load",
        "generate": "generate",
        "generate_batch": "generate",
        "graft": "surgery",
        "keep_layers": "surgery",
        "save_encoder": "hf.save_encoder",
        "save_pretrained": "hf.save",
        "stream_text": "text",
        "swap": "surgery",
        "thaw": "surgery",
        "tie": "surgery",
        "unstack": "stack",
        "untie": "surgery",
        "view": "view",
    },
)
