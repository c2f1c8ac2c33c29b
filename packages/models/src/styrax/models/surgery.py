"""Changes to a model that is there: other parts, frozen parts, fewer layers, a head of its own or not.

Every function gives a new model and leaves the old one as it was; arrays that do not change are shared by both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from styrax.core import UserError, tree
from styrax.core.errors import nearest
from styrax.models.hf.plan import layer_paths, placed

if TYPE_CHECKING:
    from styrax.models.decoder import Decoder

M = TypeVar("M", bound=nnx.Module)


class Frozen(nnx.Variable):
    """An array that was an `nnx.Param`, and that no gradient is taken of."""


class Grafted(NamedTuple):
    """What became of a model.

    Attributes:
        model: The new one.
        taken: Paths of what came from the source.
        kept: Paths of what the source does not have, or not in this shape.
    """

    model: Any
    taken: tuple[str, ...]
    kept: tuple[str, ...]


def swap(model: M, parts: Mapping[str, Any]) -> M:
    """Put other arrays or modules in the place of those at some paths.

    Args:
        model: Any NNX module.
        parts: Path -> an array of the same shape and dtype, or a module.

    Raises:
        UserError: There is nothing at a path, or another shape or dtype; all are listed.

    Example:
        >>> from styrax.models import DecoderConfig
        >>> model = DecoderConfig(num_layers=1, embed_dim=16, num_heads=2).build(vocab_size=5, rngs=nnx.Rngs(0))
        >>> new = swap(model, {"final_norm/scale": 2 * jnp.ones(16)})
        >>> float(new.final_norm.scale[0]), float(model.final_norm.scale[0])
        (2.0, 1.0)
    """
    new, problems, made = _copy(model), [], []
    known = _places(tree.flatten(model))
    for path, part in parts.items():
        if path not in known:
            problems.append(f"{path}: there is nothing{nearest(path, known)}")
            continue
        parent, name, old = _at(new, path)
        if isinstance(old, nnx.Variable) and not isinstance(part, nnx.Module):
            given, wanted = jnp.asarray(part), old[...]
            if (given.shape, given.dtype) != (wanted.shape, wanted.dtype):
                problems.append(f"{path}: expected {_sized(wanted)}, got {_sized(given)}")
            made.append((parent, name, type(old)(given)))
        elif isinstance(old, nnx.Variable) != isinstance(part, nnx.Module):
            made.append((parent, name, part))
        else:
            kinds = ("an array", "a module") if isinstance(old, nnx.Variable) else ("a module", "an array")
            problems.append(f"{path}: expected {kinds[0]}, got {kinds[1]}")
    if problems:
        raise UserError("swap:\n  " + "\n  ".join(problems))
    for parent, name, part in made:
        _set(parent, name, part)
    return new


def graft(model: nnx.Module, source: nnx.Module, *, only: str = "**") -> Grafted:
    """Take all arrays from another model that it has at the same path in the same shape.

    So a model gets the weights of one that lacks some of its parts, such as multi-token prediction or a new head.

    Args:
        model: What to put them into; their dtypes become those it has.
        source: Where they come from.
        only: A pattern of paths, such as `layers/**`.

    Raises:
        UserError: Nothing fits.

    Example:
        >>> from styrax.models import Arch, DecoderConfig, Head
        >>> small = {"num_layers": 1, "embed_dim": 16, "num_heads": 2}
        >>> old = DecoderConfig(**small).build(vocab_size=5, rngs=nnx.Rngs(0))
        >>> config = DecoderConfig(**small, arch=Arch(head=Head(mtp=1)))
        >>> found = graft(config.build(vocab_size=5, rngs=nnx.Rngs(1)), old)
        >>> len(found.taken), {path.split("/")[0] for path in found.kept}
        (11, {'mtp'})
    """
    ours, theirs = tree.flatten(model), tree.flatten(source)
    taken = [
        path
        for path, leaf in ours.items()
        if tree.match(only, path) and path in theirs and theirs[path].shape == leaf.shape
    ]
    if not taken:
        raise UserError(f"graft: no array that matches {only!r} has the same path and shape in both models")
    new = {path: jnp.asarray(theirs[path], leaf.dtype) if path in taken else leaf for path, leaf in ours.items()}
    return Grafted(tree.unflatten(model, new), tuple(taken), tuple(path for path in ours if path not in taken))


def freeze(model: M, *patterns: str) -> M:
    """Keep what matches from being trained: no gradient, no state of the optimizer, no update.

    The arrays are no `nnx.Param` any more, so that `nnx.split(model, nnx.Param, ...)` leaves them out.

    Args:
        model: Any NNX module.
        patterns: Of paths, such as `embed/**` or `layers/**`; arrays of a stack of layers are frozen together.

    Raises:
        UserError: A pattern matches no parameter.

    Example:
        >>> from styrax.models import DecoderConfig
        >>> model = DecoderConfig(num_layers=1, embed_dim=16, num_heads=2).build(vocab_size=5, rngs=nnx.Rngs(0))
        >>> _, params, rest = nnx.split(freeze(model, "layers/**", "embed/**"), nnx.Param, ...)
        >>> list(tree.flatten(params))
        ['final_norm/scale']
    """
    return _retyped(model, patterns, nnx.Param, Frozen, "freeze")


def thaw(model: M, *patterns: str) -> M:
    """Train again what `freeze` has frozen.

    Args:
        model: Any NNX module.
        patterns: Of paths; `**` thaws all.

    Raises:
        UserError: A pattern matches nothing that is frozen.
    """
    return _retyped(model, patterns, Frozen, nnx.Param, "thaw")


def untie(model: Decoder) -> Decoder:
    """Give the head a kernel of its own, at first the transposed embedding.

    Args:
        model: A decoder with a tied head.

    Raises:
        UserError: It is not tied.
    """
    if not model.config.tied:
        raise UserError("untie: the model is not tied; its head has a kernel already")
    flat = tree.flatten(model)
    return _rebuilt(model, {"tied": False}, flat | {"head/kernel": flat["embed/embedding"].T})


def tie(model: Decoder, *, keep: str = "embed") -> Decoder:
    """Let the head use the embedding.

    Args:
        model: A decoder with a head of its own.
        keep: Which values both get: those of the "embed" or of the "head".

    Raises:
        UserError: It is tied already, or `keep` is neither.
    """
    if model.config.tied:
        raise UserError("tie: the model is tied already")
    if keep not in ("embed", "head"):
        raise UserError(f'tie: keep: expected "embed" or "head", got {keep!r}')
    flat = tree.flatten(model)
    kernel = flat.pop("head/kernel")
    return _rebuilt(model, {"tied": True}, flat if keep == "embed" else flat | {"embed/embedding": kernel.T})


def drop_mtp(model: Decoder) -> Decoder:
    """Leave out what only predicts tokens beyond the next one; the logits stay the same.

    Args:
        model: A decoder with `arch.head.mtp` above 0.

    Raises:
        UserError: It has none.
    """
    arch = model.config.arch
    if not arch.head.mtp:
        raise UserError("drop_mtp: the model has no multi-token prediction (arch.head.mtp is 0)")
    flat = {path: leaf for path, leaf in tree.flatten(model).items() if not path.startswith("mtp/")}
    return _rebuilt(model, {"arch": replace(arch, head=replace(arch.head, mtp=0))}, flat)


def keep_layers(model: Decoder, layers: Sequence[int]) -> Decoder:
    """Make a model of some of the layers, in any order; a layer may come more than once.

    Args:
        model: A decoder.
        layers: Numbers of the layers, from 0.

    Raises:
        UserError: A number is no layer's, there is none, or what is left does not hang together: a layer would share
            keys and values of one that is gone, or arrays beside the layers have other shapes.

    Example:
        >>> from styrax.models import DecoderConfig
        >>> model = DecoderConfig(num_layers=4, embed_dim=16, num_heads=2).build(vocab_size=5, rngs=nnx.Rngs(0))
        >>> keep_layers(model, [0, 3]).config.num_layers
        2
    """
    config = model.config
    wrong = [layer for layer in layers if not 0 <= layer < config.num_layers]
    if wrong or not layers:
        raise UserError(f"keep_layers: expected numbers from 0 to {config.num_layers - 1}, got {list(layers)}")
    kinds = [config.kinds[layer] for layer in layers]
    arch = replace(config.arch, layers=tuple(kind.mixer for kind in kinds), sparse=tuple(kind.sparse for kind in kinds))
    new = replace(config, num_layers=len(layers), arch=arch)
    if list(new.kinds) != kinds or (arch.head.mtp and new.kinds[-1] != config.kinds[-1]):
        raise UserError(f"keep_layers: the layers {list(layers)} alone would be of other kinds than they are now")
    old, flat, where = tree.flatten(model), {}, layer_paths(config)
    empty = nnx.eval_shape(lambda: new.build(vocab_size=model.vocab_size, rngs=nnx.Rngs(0), policy=model.policy))
    spots = {spot: number for number, spot in layer_paths(new).items()}
    for path in tree.flatten(empty):
        if not path.startswith("layers/"):
            flat[path] = old[path]
            continue
        prefix = next(prefix for prefix, _ in spots if path.startswith(prefix))
        rest, rows = path.removeprefix(prefix), []
        count = sum(1 for kept, _ in spots if kept == prefix)
        for index in range(count):
            number = int(spots[prefix, index].removeprefix("layers/").rstrip("/"))
            source, place = placed(f"layers/{layers[number]}/{rest}", where)
            rows.append(old[source][place])
        flat[path] = jnp.stack(rows)
    changed = [
        f"{path}: {_sized(flat[path])} would have to be {_sized(leaf)}"
        for path, leaf in tree.flatten(empty).items()
        if flat[path].shape != leaf.shape
    ]
    if changed:
        raise UserError("keep_layers: the other layers belong to the model as a whole:\n  " + "\n  ".join(changed))
    return _like(model, tree.unflatten(empty, flat))


def _rebuilt(model: Decoder, changes: Mapping[str, Any], flat: Mapping[str, Any]) -> Decoder:
    config = replace(model.config, **changes)
    empty = nnx.eval_shape(lambda: config.build(vocab_size=model.vocab_size, rngs=nnx.Rngs(0), policy=model.policy))
    return _like(model, tree.unflatten(empty, flat))


def _like(model: Any, new: Any) -> Any:
    """Freeze what was frozen."""
    frozen = [path for path in tree.flatten(new) if path in _frozen(model)]
    return freeze(new, *frozen) if frozen else new


def _frozen(model: nnx.Module) -> set[str]:
    return set(tree.flatten(nnx.split(model, Frozen, ...)[1]))


def _copy(model: M) -> M:
    return nnx.merge(*nnx.split(model))


def _retyped(model: M, patterns: Sequence[str], old: type, new: type, name: str) -> M:
    _, chosen, _ = nnx.split(model, old, ...)
    paths = list(tree.flatten(chosen))
    if unmatched := [each for each in patterns if not any(tree.match(each, path) for path in paths)]:
        what = "parameter" if old is nnx.Param else "frozen array"
        raise UserError(
            "\n".join(f"{name}: {each!r} matches no {what}{nearest(each, _places(paths))}" for each in unmatched)
        )
    made = _copy(model)
    for path in paths:
        if any(tree.match(each, path) for each in patterns):
            parent, key, variable = _at(made, path)
            _set(parent, key, new(variable[...]))
    return made


def _places(paths: Any) -> list[str]:
    """Give all paths and what they go through."""
    found: dict[str, None] = {}
    for path in paths:
        parts = path.split("/")
        found |= {"/".join(parts[:length]): None for length in range(1, len(parts) + 1)}
    return list(found)


def _at(model: Any, path: str) -> tuple[Any, str, Any]:
    """Find what is at a path: its parent, its name there, and itself."""
    parent, node, name = None, model, ""
    for name in path.split("/"):
        parent, node = node, _get(node, name)
    return parent, name, node


def _get(node: Any, name: str) -> Any:
    return node[int(name)] if name.isdigit() else getattr(node, name)


def _set(node: Any, name: str, value: Any) -> None:
    if name.isdigit():
        node[int(name)] = value
    else:
        setattr(node, name, value)


def _sized(array: jax.Array) -> str:
    return f"{array.dtype.name}{list(array.shape)}"
