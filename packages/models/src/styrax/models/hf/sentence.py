"""The small files by which a sentence-transformers folder says how tokens become one vector."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from styrax.core import UserError
from styrax.models.encoder_config import Pool
from styrax.models.hf.load import read_json

if TYPE_CHECKING:
    from os import PathLike

MODULES, POOLING = "modules.json", "1_Pooling"
_MODES = {"cls_token": "cls", "cls": "cls", "mean_tokens": "mean", "mean": "mean", "lasttoken": "last"}
_PACKAGE = "sentence_transformers.models."


def read_pool(folder: str | PathLike[str]) -> Pool | None:
    """Read how a folder pools.

    Args:
        folder: Of a model.

    Returns:
        `None` if the folder is not one of sentence-transformers.

    Raises:
        UserError: It pools in a way that is not known, or has a part that is not known.
    """
    folder = Path(folder)
    if not (folder / MODULES).is_file():
        return None
    modules = read_json(folder / MODULES, list)
    parts = {str(each.get("type", "")).rpartition(".")[2]: each.get("path", "") for each in modules}
    unknown = sorted(parts.keys() - {"Transformer", "Pooling", "Normalize"})
    if unknown or "Pooling" not in parts:
        got = f"also {', '.join(unknown)}" if unknown else "no Pooling"
        raise UserError(f"{folder / MODULES}: expected Transformer, Pooling and perhaps Normalize, got {got}")
    path = folder / parts["Pooling"] / "config.json"
    table = read_json(path, dict)
    prefix = "pooling_mode_"
    on = [key.removeprefix(prefix) for key, value in table.items() if key.startswith(prefix) and value is True]
    on = [table["pooling_mode"]] if isinstance(table.get("pooling_mode"), str) else on
    if len(on) != 1 or on[0] not in _MODES:
        raise UserError(f"{path}: expected one way to pool of cls_token, mean_tokens and lasttoken, got {on or 'none'}")
    return Pool(by=_MODES[on[0]], normalise="Normalize" in parts)  # pyright: ignore[reportArgumentType]


def is_sentence_pool(pool: Pool) -> bool:
    """Tell whether such a folder can say it.

    Args:
        pool: Of a config.

    Example:
        >>> is_sentence_pool(Pool(by="mean")), is_sentence_pool(Pool(by="map"))
        (True, False)
    """
    return pool.by in ("cls", "mean", "last") and pool.dense == "none" and not pool.num_classes


def write_modules(pool: Pool) -> bytes:
    """Write the list of parts.

    Args:
        pool: Of a config; see `is_sentence_pool`.
    """
    parts = [("", "Transformer"), (POOLING, "Pooling"), *([("2_Normalize", "Normalize")] if pool.normalise else [])]
    table = [{"idx": n, "name": str(n), "path": path, "type": _PACKAGE + name} for n, (path, name) in enumerate(parts)]
    return _bytes(table)


def write_pooling(pool: Pool, width: int) -> bytes:
    """Write the config of the pooling.

    Args:
        pool: Of a config; see `is_sentence_pool`.
        width: Of the vector.
    """
    modes = {
        "cls_token": "cls",
        "mean_tokens": "mean",
        "max_tokens": "",
        "mean_sqrt_len_tokens": "",
        "lasttoken": "last",
    }
    table = {f"pooling_mode_{name}": pool.by == by for name, by in modes.items()}
    return _bytes({"word_embedding_dimension": width, **table})


def _bytes(table: Any) -> bytes:
    return (json.dumps(table, indent=2) + "\n").encode()
