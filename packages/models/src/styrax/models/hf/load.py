"""A model from a Hugging Face folder, each tensor straight from the file into its shards."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from styrax.core import Policy, UserError, rules_in_force, tree
from styrax.core.mesh import shardings
from styrax.models.hf.mtp import asked, check_copies, check_there
from styrax.models.hf.plan import Source, fit, stacked
from styrax.models.hf.tensors import Tensors, open_tensors
from styrax.models.registry import ENCODERS, TOWERS, family_of, read_table

if TYPE_CHECKING:
    from os import PathLike

    from jax.sharding import Mesh
    from jaxtyping import Shaped

    from styrax.models.decoder import Decoder

_ALIGN = 64


def from_pretrained(
    folder: str | PathLike[str],
    *,
    mesh: Mesh | None = None,
    rules: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    compute: str | None = None,
    mtp: bool = False,
    **changes: Any,
) -> Decoder:
    """Load a model from a Hugging Face folder: `config.json` and safetensors.

    Transformers is not needed. Tensors are mapped into memory and copied into their shards one parameter at a time,
    so that beside the parameters little memory is used. No pickle is ever read.

    Args:
        folder: On this machine.
        mesh: Where the parameters go; `None` puts all on the default device.
        rules: Logical axis -> mesh axes, for the mesh; `None` means those in force, see `styrax.core.use_rules`.
        dtype: Of the parameters, such as "bf16"; `None` keeps each tensor's own.
        compute: Of the computation; `None` means that of the parameters, or of most of them.
        mtp: Load the modules for multi-token prediction too, which the config then has as `arch.head.mtp`; of
            DeepSeek-V3 and Qwen3-Next. Without it, their tensors are passed over.
        changes: Fields of the `DecoderConfig` to change, such as `remat` or `dropout`.

    Returns:
        The model, its logits in float32.

    Raises:
        UserError: The folder has no config.json that is known, or the tensors do not fit it, in name, shape or
            number; all are listed. Or `mtp` is asked for and not there.
    """
    folder = Path(folder)
    table = read_json(folder / "config.json")
    if (name := table.get("model_type")) in {**ENCODERS, **TOWERS}:
        raise UserError(f"{folder} is of an encoder ({name}); load it with encoder_from_pretrained")
    config = read_table(table)
    if changes:
        try:
            config = type(config)(**{**vars(config), **changes})
        except (TypeError, ValueError) as error:
            raise UserError(f"from_pretrained: {error}") from error
    family, inner = family_of(table)
    config = asked(config, family, inner) if mtp else config
    with open_tensors(folder) as tensors:
        check_there(config, family, tensors)
        own = common_dtype(tensors)
        param = Policy(param=dtype).param if dtype is not None else own
        policy = Policy(param=param, compute=compute or param)
        vocab_size = inner["vocab_size"]
        empty = nnx.eval_shape(lambda: config.build(vocab_size=vocab_size, rngs=nnx.Rngs(0), policy=policy))
        wanted = tree.flatten(empty)
        copies = family.copies(config)
        sources = fit(family.rules(config), config, wanted, tensors, where=str(folder), copies=copies)
        check_copies(copies, sources, tensors)
        if config.tied:
            _check_tied(tensors, sources["embed/embedding"][0])
        places: Mapping[str, Any] = {}
        if mesh is not None:
            places = tree.flatten(shardings(empty, config.logical_axes(), rules or rules_in_force(), mesh))
        made = {}
        for path, leaf in wanted.items():
            kept = leaf.dtype if dtype is not None else kept_dtype(tensors, sources[path])
            made[path] = place(tensors, sources[path], leaf.shape, kept, places.get(path), stacked=stacked(path))
    return tree.unflatten(empty, made)


def read_json(path: Path, kind: type = dict) -> Any:
    """Read a JSON object or array.

    Args:
        path: Of the file.
        kind: What it is to be, `dict` or `list`.

    Raises:
        UserError: It is not there, not JSON, or not of that kind.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; is {path.parent} the folder of a model?") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}; copy it again") from error
    if not isinstance(found, kind):
        raise UserError(f"{path}: expected a JSON {'array' if kind is list else 'object'}, got {type(found).__name__}")
    return found


def common_dtype(tensors: Tensors) -> str:
    """Name the dtype of most of the weights.

    Args:
        tensors: Of the folder.

    Raises:
        UserError: It is none that a model computes in.
    """
    counted: Counter[str] = Counter()
    for tensor in tensors.values():
        counted[tensor.dtype.name] += tensor.nbytes
    (name, _), *_ = counted.most_common(1)
    if name not in ("float32", "bfloat16", "float16", "float64"):
        raise UserError(f"{tensors.folder}: most of the weights are {name}; expected float32, bfloat16 or float16")
    return "float32" if name == "float64" else name


def kept_dtype(tensors: Tensors, sources: list[Source]) -> np.dtype:
    """Give the dtype that holds all sources of a parameter.

    Args:
        tensors: Of the folder.
        sources: Of the parameter.
    """
    dtypes = {tensors[each.rename.get(name, name)].dtype for each in sources for name in each.rule.names()}
    if np.dtype("float64") in dtypes:
        return np.dtype("float32")  # to which jax would cast it by itself
    return np.result_type(*dtypes) if len(dtypes) > 1 else dtypes.pop()


def place(
    tensors: Tensors, sources: list[Source], shape: tuple[int, ...], dtype: Any, sharding: Any, *, stacked: bool
) -> Any:
    """Copy a parameter from the files into its shards.

    Args:
        tensors: Of the folder.
        sources: One for each layer of its stack, or one.
        shape: Of the parameter.
        dtype: To cast to.
        sharding: Where it goes; `None` is the default device.
        stacked: Whether its first axis is the layers.
    """

    def part(index: tuple[slice, ...] | None) -> Shaped[np.ndarray, "..."]:
        index = tuple(slice(None) for _ in shape) if index is None else index
        sizes = [len(range(*each.indices(size))) for each, size in zip(index, shape, strict=True)]
        out = _memory(sizes, np.dtype(dtype))
        if not stacked:
            _fill(out, tensors, sources[0], index)
            return out
        for row, layer in zip(out, range(*index[0].indices(shape[0])), strict=True):
            _fill(row, tensors, sources[layer], index[1:])
        return out

    if sharding is None:
        return jax.block_until_ready(jax.device_put(part(None)))
    return jax.block_until_ready(jax.make_array_from_callback(shape, sharding, part))


def _fill(out: np.ndarray, tensors: Tensors, source: Source, index: tuple[slice, ...]) -> None:
    """Copy a part of a parameter's layer, expert by expert if there are several."""
    rule, names = source.rule, source.rule.names()
    if rule.experts is None:
        found = tensors[source.rename.get(names[0], names[0])]
        np.copyto(out, rule.load(lambda _: found.read(), source.part)[index], casting="unsafe")
        found.drop()
        return
    for row, expert in zip(out, range(*index[0].indices(rule.experts)), strict=True):
        found = tensors[source.rename.get(names[expert], names[expert])]
        np.copyto(row, rule.cut(found.read(), source.part)[index[1:]], casting="unsafe")
        found.drop()


def _memory(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """Make an array whose memory jax takes as it is on a CPU, for it begins at a multiple of 64 bytes."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGN, np.uint8)
    shift = -raw.ctypes.data % _ALIGN
    return raw[shift : shift + nbytes].view(dtype).reshape(shape)


def _check_tied(tensors: Tensors, embedding: Source) -> None:
    head = next((name for name in tensors if name.split(".")[-2:] == ["lm_head", "weight"]), None)
    name = embedding.rule.theirs
    if head is None:
        return
    ours = tensors[embedding.rename.get(name, name)]
    if ours.shape != tensors[head].shape or ours.read().tobytes() != tensors[head].read().tobytes():
        raise UserError(
            f"{tensors.folder}: config.json ties the head to the embedding, but {head} is not {name}; set "
            "tie_word_embeddings to false in config.json"
        )
