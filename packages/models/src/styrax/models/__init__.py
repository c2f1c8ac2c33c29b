"""Models in Flax NNX: decoders of every common family, encoders, and their Hugging Face folders."""

from typing import TYPE_CHECKING

from styrax.core import lazy_exports

if TYPE_CHECKING:
    from styrax.models.arch import MLP, Arch, Attn, Delta, Latent, Norm
    from styrax.models.cache import KVCache
    from styrax.models.config import DecoderConfig, Scales
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
    from styrax.models.rope_config import Llama3, LongRope, Rope, Yarn
    from styrax.models.sampling import Sampling
    from styrax.models.sharding import decoder_axes
    from styrax.models.stack import unstack
    from styrax.models.text import TextStream, stream_text
    from styrax.models.towers import Towers
    from styrax.models.towers_config import TowersConfig

__all__ = [
    "MLP",
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
    "Groups",
    "Hidden",
    "KVCache",
    "Latent",
    "Llama3",
    "LongRope",
    "LossTerm",
    "MoE",
    "Norm",
    "Rope",
    "Routing",
    "Runner",
    "Sampling",
    "Scales",
    "Shared",
    "TextStream",
    "Towers",
    "TowersConfig",
    "Yarn",
    "cost_of",
    "decoder_axes",
    "encoder_axes",
    "encoder_from_pretrained",
    "from_gguf",
    "from_pretrained",
    "generate",
    "generate_batch",
    "save_encoder",
    "save_pretrained",
    "stream_text",
    "unstack",
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
        "Groups": "moe_config",
        "Hidden": "decoder",
        "KVCache": "cache",
        "Latent": "arch",
        "Llama3": "rope_config",
        "LongRope": "rope_config",
        "LossTerm": "losses",
        "MLP": "arch",
        "MoE": "moe_config",
        "Norm": "arch",
        "Rope": "rope_config",
        "Routing": "moe_config",
        "Runner": "decoding",
        "Sampling": "sampling",
        "Scales": "config",
        "Shared": "moe_config",
        "TextStream": "text",
        "Towers": "towers",
        "TowersConfig": "towers_config",
        "Yarn": "rope_config",
        "cost_of": "cost",
        "decoder_axes": "sharding",
        "encoder_axes": "encoder_sharding",
        "encoder_from_pretrained": "hf.load_encoder",
        "from_gguf": "hf.load_gguf",
        "from_pretrained": "hf.load",
        "generate": "generate",
        "generate_batch": "generate",
        "save_encoder": "hf.save_encoder",
        "save_pretrained": "hf.save",
        "stream_text": "text",
        "unstack": "stack",
    },
)
