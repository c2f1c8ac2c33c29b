"""What the families of encoders have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.core import UserError
from styrax.models.arch import Norm
from styrax.models.encoder_config import EncoderConfig, Image
from styrax.models.hf.rules import Rule, linear, same

if TYPE_CHECKING:
    from jaxtyping import Shaped

Table = Mapping[str, Any]

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
}
_HEADS = ("classifier.", "pooler.", "head.")


@dataclass(frozen=True)
class EncoderFamily:
    """How encoders of one kind are read and written.

    Attributes:
        model_type: What config.json calls it.
        prefix: What stands before the names of most tensors in a file of a model with a head.
        read: config.json, and the names of the tensors without prefix -> config.
        write: Config -> config.json, with the class of transformers as `architectures`.
        rules: Where each tensor goes, by its name without prefix.
        ignored: Beginnings of the names of tensors that belong to heads that are not read.
        sentences: Whether folders of sentence-transformers say how to pool.
    """

    model_type: str
    prefix: str
    read: Callable[[Table, Collection[str]], EncoderConfig]
    write: Callable[[EncoderConfig], dict[str, Any]]
    rules: Callable[[EncoderConfig], tuple[Rule, ...]]
    ignored: tuple[str, ...] = ()
    sentences: bool = False

    def bare(self, name: str) -> str:
        """Give a tensor the name that the rules know it by; older files call a norm's weight and bias otherwise.

        Args:
            name: In a file.
        """
        name = name.removeprefix(self.prefix)
        stem, _, last = name.rpartition(".")
        return {"gamma": f"{stem}.weight", "beta": f"{stem}.bias"}.get(last, name)

    def full(self, name: str, config: EncoderConfig) -> str:
        """Give a tensor the name that it has in a file.

        Args:
            name: From a rule.
            config: Of the model.
        """
        return self.prefix + name if config.pool.num_classes and not name.startswith("classifier.") else name

    def ignores(self, name: str, config: EncoderConfig) -> bool:
        """Tell whether a tensor belongs to a head that is not read, or is a table that follows from the config.

        Args:
            name: Without prefix.
            config: Of the model.
        """
        rules = self.rules(config)
        heads = [head for head in _HEADS if not any(rule.theirs.startswith(head) for rule in rules)]
        return name.endswith(".position_ids") or name.startswith((*heads, *self.ignored))


@dataclass(frozen=True)
class TowersFamily:
    """How two encoders in one folder are read and written.

    Attributes:
        model_type: What config.json calls the whole.
        architecture: The class of transformers that is named there.
        towers: Field of `TowersConfig` -> the family of that encoder; its prefix is before all its tensors.
        tables: Field -> the table in config.json that it has.
        rules: Of what belongs to neither.
    """

    model_type: str
    architecture: str
    towers: Mapping[str, EncoderFamily]
    tables: Mapping[str, str]
    rules: tuple[Rule, ...]


@dataclass(frozen=True, eq=False)
class Reshaped(Rule):
    """A tensor of theirs that is a parameter of ours in another shape, before any turning.

    Attributes:
        whole: Their shape.
        flat: Ours.
    """

    whole: tuple[int, ...] = ()
    flat: tuple[int, ...] = ()

    def save(self, parts: Any, expert: int = 0) -> Shaped[np.ndarray, "..."]:
        """Make a tensor of theirs; see `Rule`."""
        return super().save(parts, expert).reshape(self.whole)

    def shape(self, parts: Any) -> tuple[int, ...]:
        """Say what shape a tensor of theirs has; see `Rule`."""
        found = super().shape(parts)
        return self.whole if found == self.flat else found

    def cut(self, whole: Shaped[np.ndarray, "..."], part: int) -> Shaped[np.ndarray, "..."]:
        """Take one part out of one tensor; see `Rule`."""
        return super().cut(whole.reshape(self.flat), part)


def sizes(table: Table, eps: float, act: str) -> dict[str, Any]:
    """Read sizes, activation and norm.

    Args:
        table: All of config.json.
        eps: Of the norm, where it is not said.
        act: The activation, where it is not said.
    """
    name = table.get("hidden_act") or act
    if name not in ACTIVATIONS:
        raise UserError(f"hidden_act {name!r} in config.json is not known; known are {', '.join(ACTIVATIONS)}")
    return {
        "num_layers": table.get("num_hidden_layers", 12),
        "embed_dim": table.get("hidden_size", 768),
        "num_heads": table.get("num_attention_heads", 12),
        "mlp_dim": table.get("intermediate_size", 3072),
        "activation": ACTIVATIONS[name],
        "norm": Norm(kind="layer", bias=True, eps=table.get("layer_norm_eps", eps)),
    }


def write_sizes(config: EncoderConfig) -> dict[str, Any]:
    """Write what `sizes` reads.

    Args:
        config: Of the model.
    """
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.embed_dim,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_width,
        "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.activation, config.activation),
        "layer_norm_eps": config.norm.eps,
    }


def classes(table: Table, names: Collection[str]) -> int:
    """Read how many classes there are.

    Args:
        table: All of config.json.
        names: Of the tensors; without a classifier there are none.
    """
    if "classifier.weight" not in names:
        return 0
    return len(table["id2label"]) if table.get("id2label") else table.get("num_labels", 2)


def write_classes(config: EncoderConfig) -> dict[str, Any]:
    """Write what `classes` reads.

    Args:
        config: Of the model.
    """
    labels = {str(number): f"LABEL_{number}" for number in range(config.pool.num_classes)}
    return {"id2label": labels, "label2id": {name: int(number) for number, name in labels.items()}} if labels else {}


def pair(theirs: str, ours: str, weight: str = "scale") -> list[Rule]:
    """Map a weight and a bias as they are.

    Args:
        theirs: Name without `.weight`.
        ours: Path without what `weight` says.
        weight: What the weight is called here.
    """
    return [same(f"{theirs}.weight", f"{ours}/{weight}"), same(f"{theirs}.bias", f"{ours}/bias")]


def image_of(table: Table, *, class_token: bool) -> Image:
    """Read the size of pictures.

    Args:
        table: All of config.json.
        class_token: Whether a token goes before the patches.
    """
    size, patch = table.get("image_size", 224), table.get("patch_size", 16)
    height, width = (size, size) if isinstance(size, int) else size
    if not isinstance(patch, int):
        if len(set(patch)) != 1:
            raise UserError(f"patch_size in config.json: expected square patches, got {patch}")
        patch = patch[0]
    channels = table.get("num_channels", 3)
    return Image(height=height, width=width, patch=patch, channels=channels, class_token=class_token)


def write_image(image: Image) -> dict[str, Any]:
    """Write what `image_of` reads.

    Args:
        image: Of the config.
    """
    size = image.height if image.height == image.width else [image.height, image.width]
    return {"image_size": size, "patch_size": image.patch, "num_channels": image.channels}


def patches(config: EncoderConfig, theirs: str) -> list[Rule]:
    """Map the convolution that cuts pictures into patches.

    Args:
        config: Of the model.
        theirs: Its name, without `.weight`.
    """
    image, dim = config.input, config.embed_dim
    assert isinstance(image, Image)
    whole = (dim, image.channels, image.patch, image.patch)
    kernel = Reshaped(
        f"{theirs}.weight", ("input/patches/kernel",), turn=True, whole=whole, flat=(dim, math.prod(whole[1:]))
    )
    return [kernel, same(f"{theirs}.bias", "input/patches/bias")]


def blocks(config: EncoderConfig, block: list[Rule], theirs: str) -> list[Rule]:
    """Repeat the rules of a block for every layer.

    Args:
        config: Of the model.
        block: Rules, with names and paths within a block.
        theirs: The list of layers.
    """
    return [
        rule.within(f"{theirs}.{layer}.", f"layers/{layer}/") for layer in range(config.num_layers) for rule in block
    ]


def heads(config: EncoderConfig, dense: str) -> list[Rule]:
    """Map a projection of the vector and a classifier, as far as there are.

    Args:
        config: Of the model.
        dense: Name of the projection.
    """
    rules = linear(dense, "pool/dense", bias=True) if config.pool.dense != "none" else []
    return rules + (linear("classifier", "head", bias=True) if config.pool.num_classes else [])
