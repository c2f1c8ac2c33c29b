"""A model from a GGUF file, each tensor dequantised straight into its shards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from flax import nnx

from styrax.core import Policy, UserError, rules_in_force, tree
from styrax.core.mesh import shardings
from styrax.models.hf.gguf import open_gguf
from styrax.models.hf.gguf_config import read_metadata, read_names
from styrax.models.hf.load import place
from styrax.models.hf.plan import fit, stacked
from styrax.models.hf.quants import dequantize
from styrax.models.registry import family_of, read_table

if TYPE_CHECKING:
    from os import PathLike

    from jax.sharding import Mesh
    from jaxtyping import Float32

    from styrax.models.decoder import Decoder
    from styrax.models.hf.gguf import GgufTensor
    from styrax.models.hf.gguf_config import Change


def from_gguf(
    path: str | PathLike[str],
    *,
    mesh: Mesh | None = None,
    rules: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    compute: str | None = None,
    **changes: Any,
) -> Decoder:
    """Load a model from a GGUF file, the format of llama.cpp.

    The metadata are turned into the config.json that the model has at Hugging Face, and the tensors into those that it
    has there: rows of queries and keys in their own order, norms without the 1 that was added. Tensors are dequantised
    one at a time, so that beside the parameters little memory is used.

    Args:
        path: Of a file on this machine, of architecture llama, qwen2, qwen3, gemma2, gemma3 or phi3.
        mesh: Where the parameters go; `None` puts all on the default device.
        rules: Logical axis -> mesh axes, for the mesh; `None` means those in force, see `styrax.core.use_rules`.
        dtype: Of the parameters, such as "bf16"; `None` means float32, which holds every value that the file has.
        compute: Of the computation; `None` means that of the parameters.
        changes: Fields of the `DecoderConfig` to change, such as `remat` or `max_len`.

    Returns:
        The model, its logits in float32.

    Raises:
        UserError: The file is damaged, its architecture is not known here, or its tensors do not fit its metadata, in
            name, shape or number; all are listed.
    """
    param = Policy(param=dtype or "float32").param
    policy = Policy(param=param, compute=compute or param)
    with open_gguf(path) as file:
        table = read_metadata(file)
        config = read_table(table)
        if changes:
            try:
                config = type(config)(**{**vars(config), **changes})
            except (TypeError, ValueError) as error:
                raise UserError(f"from_gguf: {error}") from error
        family, inner = family_of(table)
        tensors = {theirs: _Renamed(file[name], change) for name, (theirs, change) in read_names(file, table).items()}
        _check_kinds(file)
        vocab_size = inner["vocab_size"]
        empty = nnx.eval_shape(lambda: config.build(vocab_size=vocab_size, rngs=nnx.Rngs(0), policy=policy))
        wanted = tree.flatten(empty)
        sources = fit(family.rules(config), config, wanted, tensors, where=str(path))
        places: Mapping[str, Any] = {}
        if mesh is not None:
            places = tree.flatten(shardings(empty, config.logical_axes(), rules or rules_in_force(), mesh))
        made = {}
        for name, leaf in wanted.items():
            made[name] = place(tensors, sources[name], leaf.shape, leaf.dtype, places.get(name), stacked=stacked(name))  # pyright: ignore[reportArgumentType]
    return tree.unflatten(empty, made)


class _Renamed:
    """A tensor of the file as it is at Hugging Face."""

    dtype = np.dtype("float32")

    def __init__(self, tensor: GgufTensor, change: Change | None) -> None:
        self.shape, self.nbytes = tensor.shape, 4 * math.prod(tensor.shape)
        self._tensor, self._change = tensor, change

    def read(self) -> Float32[np.ndarray, "..."]:
        """Give the values."""
        values = self._tensor.read()
        return values if self._change is None else self._change(values)

    def drop(self) -> None:
        """Do nothing: to read gave the pages back."""


def _check_kinds(file: Mapping[str, GgufTensor]) -> None:
    """Say before anything is loaded, and not after minutes, that a tensor cannot be read."""
    problems = []
    for kind in sorted({tensor.kind for tensor in file.values()}):
        try:
            dequantize(kind, np.empty(0, np.uint8))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
