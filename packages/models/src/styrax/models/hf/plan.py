"""Fits the tensors of a checkpoint to the parameters of a model, before any of them is read."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from styrax.core import UserError
from styrax.core.errors import nearest
from styrax.models.hf.rules import Rule

if TYPE_CHECKING:
    from styrax.models.config import DecoderConfig

#: What checkpoints hold beside parameters: tables that follow from the config, and the parts of other models.
NOT_OURS = ("*.rotary_emb.inv_freq", "*.attn.bias", "*.attn.masked_bias", "*.rotary_emb.*_cached")
#: Where else the decoder of a model that also sees or hears may stand.
PREFIXES = ("", "language_model.", "model.language_model.", "transformer.")
OTHER_PARTS = (
    *("vision_tower.", "vision_model.", "multi_modal_projector.", "audio_tower.", "visual.", "embed_vision."),
    "embed_audio.",
)
#: By what a module is known that predicts further tokens: its product of embedding and activations.
MTP = re.compile(r"((?:.*\.)?layers\.(?P<layer>\d+)\.)eh_proj\.weight|((?:.*\.)?mtp\.)fc\.weight")
#: What layers that use the keys and values of others may have all the same, and never look at.
UNUSED = ("*layers.{layer}.self_attn.[kv]_proj.*", "*layers.{layer}.self_attn.[kv]_norm.*")


@dataclass(frozen=True)
class Source:
    """Where one layer of a parameter comes from.

    Attributes:
        rule: The rule of the tensor.
        part: Which of the rule's parts.
        rename: Name in the rule -> name in the file.
    """

    rule: Rule
    part: int
    rename: Mapping[str, str]


def layer_paths(config: DecoderConfig) -> dict[str, tuple[str, int | None]]:
    """Say where the parameters of each layer are: prefix as if all were apart -> prefix of its stack, and index.

    Args:
        config: Of the model.

    Example:
        >>> from styrax.models import DecoderConfig
        >>> layer_paths(DecoderConfig(num_layers=2))
        {'layers/0/': ('layers/', 0), 'layers/1/': ('layers/', 1)}
    """
    stacks, _ = config.plan
    found: dict[str, tuple[str, int | None]] = {}
    for number, stack in enumerate(stacks):
        prefix = "layers/" if config.uniform else f"layers/{number}/"
        found |= {f"layers/{layer}/": (prefix, index) for index, layer in enumerate(stack.layers)}
    return found


def placed(path: str, layers: Mapping[str, tuple[str, int | None]]) -> tuple[str, int | None]:
    """Turn the path of a parameter as if all layers were apart into that of its stack, and its index there.

    Args:
        path: From a rule.
        layers: From `layer_paths`.
    """
    if path.startswith("mtp/"):
        _, number, rest = path.split("/", 2)
        return f"mtp/{rest}", int(number)
    if not path.startswith("layers/"):
        return path, None
    number, _, rest = path.removeprefix("layers/").partition("/")
    prefix, index = layers[f"layers/{number}/"]
    return prefix + rest, index


def stacked(path: str) -> bool:
    """Tell whether the first axis of a parameter is layers, or modules that are like layers.

    Args:
        path: Of the parameter.
    """
    return path.startswith(("layers/", "mtp/"))


def further(config: DecoderConfig, tensors: Iterable[str]) -> list[str]:
    """List the tensors of modules that predict tokens beyond the next one.

    Args:
        config: Of the model.
        tensors: Names.

    Example:
        >>> from styrax.models import DecoderConfig
        >>> names = ["model.layers.1.eh_proj.weight", "model.layers.2.eh_proj.weight", "model.layers.2.enorm.weight"]
        >>> further(DecoderConfig(num_layers=2), names)
        ['model.layers.2.eh_proj.weight', 'model.layers.2.enorm.weight']
    """
    names, found = list(tensors), []
    for match in filter(None, map(MTP.fullmatch, names)):
        if match["layer"] is None or int(match["layer"]) >= config.num_layers:
            found.append(match[1] or match[3])
    return [name for name in names if name.startswith(tuple(found))]


def fit(
    rules: Sequence[Rule],
    config: DecoderConfig,
    parameters: Mapping[str, Any],
    tensors: Mapping[str, Any],
    *,
    where: str,
    copies: Sequence[Rule] = (),
) -> dict[str, list[Source]]:
    """Find the sources of every parameter.

    What the files have for multi-token prediction is passed over, if the model has no such parameters.

    Args:
        rules: Of the family.
        config: Of the model.
        parameters: Path -> what has a shape.
        tensors: Name -> what has a shape.
        where: Of the tensors, for the error text.
        copies: Of tensors that say again what others say, and need not be there.

    Returns:
        Path -> its sources, one for each layer of its stack, or one.

    Raises:
        UserError: A tensor is missing, too many or of another shape, or a parameter has no source; all are listed.
    """
    layers = layer_paths(config)
    names = [name for rule in rules for name in rule.names()]
    again = [name for rule in copies for name in rule.names()]
    rename = _renamed([*names, *again], tensors)
    known = {rename.get(name, name) for name in (*names, *again)}
    if not any(path.startswith("mtp/") for path in parameters):
        known.update(further(config, tensors))
    problems, sources = [], {path: {} for path in parameters}
    extra = sorted(name for name in tensors if name not in known and not _ignored(name, config, rename, rules))
    missing = [name for name in names if rename.get(name, name) not in tensors]
    problems += [f"missing: {name}{nearest(name, extra)}" for name in missing]
    problems += [f"not in the model: {name} {list(tensors[name].shape)}" for name in extra]
    for rule in (*rules, *copies):
        spots = [placed(path, layers) for path in rule.ours]
        if lost := [path for path, _ in spots if path not in parameters]:
            problems.append(f"no such parameter: {', '.join(lost)} (of {rule.theirs})")
            continue
        for part, (path, index) in enumerate(() if rule in copies else spots):
            sources[path][index or 0] = Source(rule, part, rename)
        shapes = [tuple(parameters[path].shape)[0 if index is None else 1 :] for path, index in spots]
        for name in rule.names():
            found = tensors.get(rename.get(name, name))
            if found is not None and tuple(found.shape) != rule.shape(shapes):
                problems.append(f"{name}: expected shape {list(rule.shape(shapes))}, got {list(found.shape)}")
    for path, parts in sources.items():
        wanted = parameters[path].shape[0] if stacked(path) else 1
        if len(parts) != wanted:
            problems.append(
                f"no tensor for {path}" + (f", layers {sorted(set(range(wanted)) - set(parts))}" if parts else "")
            )
    if problems:
        head = f"{where} is not a checkpoint of this model, {len(problems)} difference(s):"
        raise UserError("\n  ".join([head, *problems]) + "\nDoes config.json belong to these files?")
    return {path: [parts[index] for index in sorted(parts)] for path, parts in sources.items()}


def _renamed(names: Iterable[str], tensors: Mapping[str, Any]) -> dict[str, str]:
    """Find the prefix under which the names are there: some writers leave it out, some put more before it."""
    names = list(names)
    first = names[0]
    bare = first.split(".", 1)[1] if first.startswith(("model.", "transformer.")) else first
    for prefix in ("", *PREFIXES):
        for name in (first, bare):
            if prefix + name in tensors and prefix + name != first:
                cut = len(first) - len(name)
                return {each: prefix + each[cut:] for each in names if each[:cut] == first[:cut]} | {
                    each: prefix + each for each in names if each[:cut] != first[:cut] and prefix + each in tensors
                }
            if prefix + name in tensors:
                return {}
    return {}


def _ignored(name: str, config: DecoderConfig, rename: Mapping[str, str], rules: Sequence[Rule]) -> bool:
    shared = [layer for stack in config.plan[0] if stack.kind.role == "shared" for layer in stack.layers]
    unused = (pattern.format(layer=layer) for pattern in UNUSED for layer in shared)
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in (*NOT_OURS, *unused)):
        return True
    if config.tied and name.split(".")[-2:] == ["lm_head", "weight"]:
        return True  # some writers keep the tied head too; that it is the same, the loader looks
    prefixes = {rename[key].removesuffix(key) for key in rename if rename[key].endswith(key)}
    return bool(prefixes) and name.removeprefix("model.").startswith(OTHER_PARTS)
