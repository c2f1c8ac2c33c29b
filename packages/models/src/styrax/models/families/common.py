"""What most families' config.json have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from styrax.core import UserError
from styrax.models.arch import MLP
from styrax.models.config import DecoderConfig
from styrax.models.hf.names import MTPNames, Names, decoder_rules, mtp_copies
from styrax.models.hf.rope import both_spellings, read_rope
from styrax.models.hf.rules import Rule

Table = Mapping[str, Any]

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
LAYERS = {
    "full_attention": "attn",
    "sliding_attention": "local",
    "chunked_attention": "local",
    "linear_attention": "delta",
}


@dataclass(frozen=True)
class Family:
    """How models of one kind are read and written.

    Attributes:
        model_type: What config.json calls it.
        architecture: The class of transformers that is named there.
        read: config.json -> config.
        write: Config -> what config.json says beside the common keys.
        names: The words of its tensors' names, or a function of the config that lists the rules.
    """

    model_type: str
    architecture: str
    read: Callable[[Table], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]]
    names: Names | Callable[[DecoderConfig], tuple[Rule, ...]]

    def rules(self, config: DecoderConfig) -> tuple[Rule, ...]:
        """List where each tensor goes; see `styrax.models.hf.rules`.

        Args:
            config: Of the model.
        """
        return decoder_rules(config, self.names) if isinstance(self.names, Names) else self.names(config)

    @property
    def mtp(self) -> MTPNames | None:
        """The words for multi-token prediction; `None` if the files have no place for it."""
        return self.names.mtp if isinstance(self.names, Names) else None

    def copies(self, config: DecoderConfig) -> tuple[Rule, ...]:
        """List tensors that say again what others say; they are written, and need not be there to be read.

        Args:
            config: Of the model.
        """
        return mtp_copies(config, self.names) if isinstance(self.names, Names) else ()

    def to_hf(self, config: DecoderConfig, *, vocab_size: int) -> dict[str, Any]:
        """Write config.json.

        Args:
            config: Of the model.
            vocab_size: Rows of the embedding.
        """
        table = {"architectures": [self.architecture], "model_type": self.model_type, "vocab_size": vocab_size}
        modules = {} if self.mtp is None else {self.mtp.count: config.arch.head.mtp}
        return {**table, **self.write(config), **modules}


def need(table: Table, *names: str) -> None:
    """Raise for keys that config.json lacks, all at once.

    Args:
        table: All of config.json.
        names: Keys that have no default.

    Raises:
        UserError: Some are missing.
    """
    if missing := [name for name in names if table.get(name) is None]:
        raise UserError(f"config.json lacks {', '.join(missing)}; is it the config of a whole model?")


def base(table: Table, *, theta: float = 10_000.0, tied: bool = False, layer: str | None = None) -> dict[str, Any]:
    """Read sizes and rotary positions.

    Args:
        table: All of config.json.
        theta: Base of the rotary frequencies, where it is not said.
        tied: Whether head and embedding are one, where it is not said.
        layer: The type of layer whose rotary positions are the model's, where there are several.

    Returns:
        Fields of a `DecoderConfig`.
    """
    need(table, "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    said = table.get("tie_word_embeddings")
    return {
        "num_layers": table["num_hidden_layers"],
        "embed_dim": table["hidden_size"],
        "num_heads": table["num_attention_heads"],
        "num_kv_heads": table.get("num_key_value_heads"),
        "head_dim": table.get("head_dim"),
        "mlp_dim": table["intermediate_size"],
        "tied": tied if said is None else said,
        "rope": read_rope(table, theta, layer),
        "max_len": table.get("max_position_embeddings", 2048),
    }


def written(config: DecoderConfig) -> dict[str, Any]:
    """Write what `base` reads.

    Args:
        config: Of the model.
    """
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.embed_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.mlp_width,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.max_len,
        **both_spellings(config.rope),
    }


def mlp(table: Table, key: str = "hidden_act", default: str = "silu", **fields: Any) -> MLP:
    """Read the activation of the MLP.

    Args:
        table: All of config.json.
        key: What the family calls it.
        default: Where it is not said.
        fields: Of `MLP`.

    Raises:
        UserError: It is unknown.
    """
    name = table.get(key) or default
    if name not in ACTIVATIONS:
        raise UserError(f"{key} {name!r} in config.json is not known; known are {', '.join(ACTIVATIONS)}")
    return MLP(activation=ACTIVATIONS[name], **fields)  # pyright: ignore[reportArgumentType]


def act(config: DecoderConfig) -> str:
    """Write the activation as transformers calls it.

    Args:
        config: Of the model.
    """
    return {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.arch.mlp.activation, config.arch.mlp.activation)


def cycle(values: Sequence[Any]) -> tuple[Any, ...]:
    """Cut a row down to what it repeats.

    Args:
        values: One for each layer.

    Example:
        >>> cycle([1, 2, 1, 2, 1]), cycle([1, 1, 2])
        ((1, 2), (1, 1, 2))
    """
    for length in range(1, len(values)):
        if all(value == values[number % length] for number, value in enumerate(values)):
            return tuple(values[:length])
    return tuple(values)


def layers(table: Table, default: Callable[[int], str]) -> tuple[str, ...]:
    """Read which layer is of which kind.

    Args:
        table: All of config.json.
        default: Number of a layer -> its type, where `layer_types` is not said.

    Raises:
        UserError: A type is unknown, or there are not as many as layers.
    """
    count = table["num_hidden_layers"]
    given = table.get("layer_types") or [default(layer) for layer in range(count)]
    unknown = sorted({str(name) for name in given} - LAYERS.keys())
    if unknown or len(given) != count:
        got = f"{', '.join(unknown)}" if unknown else f"{len(given)} of them for {count} layers"
        raise UserError(f"layer_types in config.json: expected {', '.join(LAYERS)}, one for each layer; got {got}")
    return cycle([LAYERS[name] for name in given])


def layer_types(config: DecoderConfig, local: str = "sliding_attention") -> list[str]:
    """Write what `layers` reads.

    Args:
        config: Of the model.
        local: What the layers called "local" are called there.
    """
    names = {"attn": "full_attention", "local": local, "delta": "linear_attention"}
    return [names[kind.mixer] for kind in config.kinds]
