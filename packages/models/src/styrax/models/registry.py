"""Families by the name that config.json gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from styrax.core import UserError
from styrax.core.errors import nearest
from styrax.models.config import DecoderConfig
from styrax.models.families.bert import BERT
from styrax.models.families.cohere import COHERE2
from styrax.models.families.common import Family
from styrax.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from styrax.models.families.encoders import EncoderFamily, TowersFamily
from styrax.models.families.gemma import GEMMA, GEMMA2, GEMMA3
from styrax.models.families.gemma4 import GEMMA4
from styrax.models.families.gpt2 import GPT2
from styrax.models.families.gpt_oss import GPT_OSS
from styrax.models.families.granite import GRANITE
from styrax.models.families.llama import LLAMA
from styrax.models.families.llama4 import LLAMA4
from styrax.models.families.mistral import MISTRAL, MIXTRAL
from styrax.models.families.olmo import OLMO, OLMO2, OLMO3, OLMOE
from styrax.models.families.phi import PHI, PHI3
from styrax.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, QWEN3_NEXT
from styrax.models.families.siglip import SIGLIP, SIGLIP_TEXT, SIGLIP_VISION
from styrax.models.families.smollm import SMOLLM3
from styrax.models.families.vit import VIT

_ALL = (
    *(
        COHERE2,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        GEMMA,
        GEMMA2,
        GEMMA3,
        GEMMA4,
        GPT2,
        GPT_OSS,
        GRANITE,
        LLAMA,
        LLAMA4,
        MISTRAL,
        MIXTRAL,
    ),
    *(OLMO, OLMO2, OLMO3, OLMOE, PHI, PHI3, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, QWEN3_NEXT, SMOLLM3),
)
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ALL}
ENCODERS: Mapping[str, EncoderFamily] = {
    family.model_type: family for family in (BERT, SIGLIP_TEXT, SIGLIP_VISION, VIT)
}
#: Models of two encoders.
TOWERS: Mapping[str, TowersFamily] = {SIGLIP.model_type: SIGLIP}
#: Other names for the same, as far as the decoder goes.
ALIASES = {"kimi_k2": "deepseek_v3", "gemma3": "gemma3_text", "gemma4": "gemma4_text", "llama4": "llama4_text"}


def family_of(table: Mapping[str, Any]) -> tuple[Family, Mapping[str, Any]]:
    """Find the family that a config.json is of.

    Args:
        table: All of config.json. Of a model that also sees or hears, its `text_config` counts.

    Returns:
        The family, and the part of the table that it reads.

    Raises:
        UserError: It is of none that is known, or its weights are quantised.

    Example:
        >>> family_of({"model_type": "qwen3"})[0].architecture
        'Qwen3ForCausalLM'
    """
    if table.get("quantization_config"):
        method = table["quantization_config"].get("quant_method", "some method")
        raise UserError(
            f"the weights are quantised ({method}), which cannot be read; use a checkpoint in bfloat16 or float32, or "
            "a GGUF file"
        )
    outer = table.get("model_type")
    if isinstance(table.get("text_config"), Mapping):
        inner = table["text_config"]
        table = {
            "model_type": ALIASES.get(str(outer), outer),
            "tie_word_embeddings": table.get("tie_word_embeddings"),
        } | inner
    name = ALIASES.get(str(table.get("model_type")), table.get("model_type"))
    if name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UserError(
            f"model_type {name!r} in config.json is not known{nearest(str(name), FAMILIES)}; known are {known}"
        )
    return FAMILIES[str(name)], {**table, "model_type": name}


def read_table(table: Mapping[str, Any]) -> DecoderConfig:
    """Turn a config.json into a config.

    Args:
        table: All of config.json.

    Raises:
        UserError: It is of no known family, or its values do not fit together.

    Example:
        >>> sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
        >>> read_table({"model_type": "llama", "num_attention_heads": 2, **sizes}).head_width
        4
    """
    family, inner = family_of(table)
    try:
        return family.read(inner)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"config.json of a {family.model_type} model: {error}") from error
