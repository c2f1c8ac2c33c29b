"""What the metadata of a GGUF file mean: the config.json, and the names, of the same model at Hugging Face.

Source: llama.cpp, `gguf-py/gguf/constants.py` (keys and tensors), `convert_hf_to_gguf.py` (what its converter changes)
and `src/llama-model.cpp` (what it takes for granted).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.core import UserError
from styrax.core.errors import nearest
from styrax.models.hf.gguf import unpermute
from styrax.models.layers.rope import frequencies
from styrax.models.rope_config import Llama3, Rope

if TYPE_CHECKING:
    from jaxtyping import Float32

    from styrax.models.hf.gguf import Gguf

    Change = Callable[[Float32[np.ndarray, "..."]], Float32[np.ndarray, "..."]]

_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
}
_HEADS = ("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base", "vocab_size")
_SCALING = ("type", "factor", "original_context_length", "attn_factor", "finetuned")
_KNOWN = (*_SIZES, *_HEADS, *(f"rope.scaling.{name}" for name in _SCALING))
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
#: Tensors that are numbers of the config.
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """One architecture.

    Attributes:
        model_type: What config.json calls it.
        block: Words of a block's tensors -> theirs at Hugging Face.
        keys: Metadata that it has beside the common ones.
        more: Metadata, sizes and the file -> more of config.json.
        turned: Rows of queries and keys are in another order.
        shifted: Norms are stored with 1 added.
        partial: Part of a head may be rotated.
    """

    model_type: str
    block: Mapping[str, str]
    keys: tuple[str, ...] = ()
    more: Callable[[Mapping[str, Any], dict[str, Any], Gguf], dict[str, Any]] = field(default=lambda *_: {})
    turned: bool = False
    shifted: bool = False
    partial: bool = False


def read_metadata(file: Gguf) -> dict[str, Any]:
    """Say what config.json of the same model would.

    Args:
        file: An open file.

    Raises:
        UserError: The architecture is not known here, or metadata are missing, or there are some that are not known
            and would change the result; all are listed.
    """
    name, kind = _kind(file)
    given = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    missing = [f"{name}.{key} is missing" for key in _SIZES if key not in given and key != "attention.head_count_kv"]
    # What is 0 or false is not used.
    unknown = [key for key in given if key not in (*_KNOWN, *kind.keys) and np.any(given[key])]
    problems = missing + [f"{name}.{key} = {given[key]!r} is not known here" for key in unknown]
    if "token_embd.weight" not in file:
        problems.append("token_embd.weight is missing")
    if problems:
        raise UserError(f"{file.path} cannot be read as {name}:\n  " + "\n  ".join(problems))
    table: dict[str, Any] = {
        theirs: _plain(f"{name}.{key}", given[key]) for key, theirs in _SIZES.items() if key in given
    }
    width = int(given.get("attention.key_length") or table["hidden_size"] // table["num_attention_heads"])
    if given.get("attention.value_length", width) != width:
        raise UserError(
            f"{file.path}: keys are {width} wide and values {given['attention.value_length']}; expected the same"
        )
    table |= {
        "model_type": kind.model_type,
        "vocab_size": file["token_embd.weight"].shape[0],
        "head_dim": width,
        "tie_word_embeddings": "output.weight" not in file,
    }
    turned = int(given.get("rope.dimension_count") or width)
    if turned != width and not kind.partial:
        raise UserError(f"{file.path}: {name}.rope.dimension_count = {turned}: expected all {width} channels of a head")
    table["rope_parameters"] = _rope(file, given, table, turned / width)
    return table | kind.more(given, table, file)


def read_names(file: Gguf, table: Mapping[str, Any]) -> dict[str, tuple[str, Change | None]]:
    """Say what each tensor is called at Hugging Face, and how its values differ there.

    Args:
        file: An open file.
        table: From `read_metadata`.

    Returns:
        Name in the file -> name at Hugging Face, and what to do with the values. What has no such name keeps its own.
    """
    _, kind = _kind(file)
    heads, kv_heads = table["num_attention_heads"], table.get("num_key_value_heads") or table["num_attention_heads"]
    found: dict[str, tuple[str, Change | None]] = {}
    for name in file:
        if name in _FACTORS:
            continue
        word, _, rest = name.rpartition(".")
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)", word)
        theirs, change = _WHOLE.get(word, word), None
        if block is not None:
            number, word = block.groups()
            theirs = (
                f"model.layers.{number}.{kind.block[word]}" if word in kind.block else name.removesuffix(f".{rest}")
            )
        if kind.turned and word in ("attn_q", "attn_k"):
            change = _unpermuter(heads if word == "attn_q" else kv_heads)
        elif kind.shifted and name.endswith("norm.weight"):
            change = _without_one
        found[name] = f"{theirs}.{rest}", change
    return found


def _kind(file: Gguf) -> tuple[str, _Kind]:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in KINDS:
        close, known = nearest(str(name), KINDS), ", ".join(KINDS)
        raise UserError(f"{file.path}: general.architecture {name!r} is not known{close}; known are {known}")
    return name, KINDS[name]


def _plain(key: str, value: Any) -> int | float:
    """Make a number of Python; a float32 becomes the decimal that it was written for."""
    if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
        value = value[0].item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"{key}: expected a number, the same for all layers, got {value!r}")
    return value if isinstance(value, int) else float(str(np.float32(value)))


def _rope(file: Gguf, given: Mapping[str, Any], table: Mapping[str, Any], fraction: float) -> dict[str, Any]:
    theta, longest = _plain("rope.freq_base", given.get("rope.freq_base", 10_000.0)), table["max_position_embeddings"]
    written: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if fraction != 1:
        written["partial_rotary_factor"] = fraction
    scaling = given.get("rope.scaling.type", "none")
    factor, original = given.get("rope.scaling.factor"), given.get("rope.scaling.original_context_length")
    if "rope_factors_long.weight" in file:
        short, long = (file[f"rope_factors_{name}.weight"].read().tolist() for name in ("short", "long"))
        original = original or longest
        written |= {"rope_type": "longrope", "short_factor": short, "long_factor": long, "factor": longest / original}
        written["original_max_position_embeddings"] = original
        if "rope.scaling.attn_factor" in given:
            written["attention_factor"] = _plain("rope.scaling.attn_factor", given["rope.scaling.attn_factor"])
    elif "rope_freqs.weight" in file:
        written |= _divided(file["rope_freqs.weight"].read(), theta, table)
    elif scaling == "linear" or (scaling == "none" and factor and factor != 1):
        written |= {"rope_type": "linear", "factor": _plain("rope.scaling.factor", factor or 1.0)}
    elif scaling == "yarn":
        stretch = _plain("rope.scaling.factor", factor or longest / (original or longest))
        written |= {"rope_type": "yarn", "factor": stretch, "original_max_position_embeddings": original or longest}
        if "rope.scaling.attn_factor" in given:
            written["attention_factor"] = given["rope.scaling.attn_factor"] * (1 + 0.1 * math.log(stretch))
    elif scaling != "none":
        raise UserError(
            f"{file.path}: rope.scaling.type {scaling!r}: expected none, linear, yarn or longrope with its factors"
        )
    return written


def _divided(divisors: Float32[np.ndarray, " half"], theta: float, table: Mapping[str, Any]) -> dict[str, Any]:
    """Say what made frequencies be divided by these: Llama 3's formula, or something that has no name here."""
    width, factor = 2 * len(divisors), float(divisors.max())
    named = {"factor": factor, "original_max_position_embeddings": 8192}
    plain = frequencies(Rope(theta=theta), width)[0]
    ours = Rope(kind="llama3", theta=theta, factor=max(1.0, factor), original_max_len=8192, llama3=Llama3())
    if np.allclose(plain / divisors, frequencies(ours, width)[0], rtol=1e-5, atol=0):
        return {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **named}
    each = divisors.tolist()
    return {
        "rope_type": "longrope",
        "short_factor": each,
        "long_factor": each,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": table["max_position_embeddings"],
    }


def _unpermuter(heads: int) -> Change:
    return lambda values: unpermute(values, heads)


def _without_one(values: Float32[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    return values - 1


def _llama(given: Mapping[str, Any], table: dict[str, Any], file: Gguf) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in file, "mlp_bias": "blk.0.ffn_up.bias" in file}


def _phi3(given: Mapping[str, Any], table: dict[str, Any], file: Gguf) -> dict[str, Any]:
    return {"sliding_window": given.get("attention.sliding_window") or None}


def _gemma(given: Mapping[str, Any], table: dict[str, Any], largest: int) -> dict[str, Any]:
    # Nothing in the file tells it: llama.cpp knows the largest model by its layers.
    wide = table["num_hidden_layers"] == largest
    scalar = table["hidden_size"] / table["num_attention_heads"] if wide else table["head_dim"]
    cap = given.get("final_logit_softcapping")
    found = {"query_pre_attn_scalar": scalar, "final_logit_softcapping": cap and _plain("final_logit_softcapping", cap)}
    return found | (
        {"sliding_window": int(given["attention.sliding_window"])} if "attention.sliding_window" in given else {}
    )


def _gemma2(given: Mapping[str, Any], table: dict[str, Any], file: Gguf) -> dict[str, Any]:
    cap = _plain("attn_logit_softcapping", given.get("attn_logit_softcapping", 50.0))
    given = {"final_logit_softcapping": 30.0, **given}
    return {**_gemma(given, table, 46), "attn_logit_softcapping": cap}


def _gemma3(given: Mapping[str, Any], table: dict[str, Any], file: Gguf) -> dict[str, Any]:
    near = _plain("rope.freq_base_swa", given.get("rope.freq_base_swa", 10_000.0))
    ropes = {
        "full_attention": table["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": near},
    }
    pattern = given.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, np.ndarray):
        types = ["sliding_attention" if each else "full_attention" for each in pattern]
        return {**_gemma(given, table, 62), "rope_parameters": ropes, "layer_types": types}
    return {**_gemma(given, table, 62), "rope_parameters": ropes, "sliding_window_pattern": pattern}


_CAPS = ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window")
#: What `general.architecture` may be.
KINDS: Mapping[str, _Kind] = {
    "llama": _Kind(model_type="llama", block=_BLOCK, more=_llama, turned=True),
    "qwen2": _Kind(model_type="qwen2", block=_BLOCK),
    "qwen3": _Kind(model_type="qwen3", block={**_BLOCK, **_QK_NORMS}),
    "gemma2": _Kind(model_type="gemma2", block={**_BLOCK, **_POST_NORMS}, keys=_CAPS, more=_gemma2, shifted=True),
    "gemma3": _Kind(
        model_type="gemma3_text",
        block={**_BLOCK, **_QK_NORMS, **_POST_NORMS},
        keys=(*_CAPS, "attention.sliding_window_pattern", "rope.freq_base_swa"),
        more=_gemma3,
        shifted=True,
    ),
    "phi3": _Kind(
        model_type="phi3",
        block={**_BLOCK, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        keys=("attention.sliding_window",),
        more=_phi3,
        partial=True,
    ),
}
