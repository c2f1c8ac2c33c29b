"""A source of arrays as a checkpoint of this package, one array in memory at a time.

Arrays that a save would hand to Orbax go there from a file that is mapped, not read: the source's own where it has
the very bytes, else a copy beside the checkpoint that goes when the checkpoint is whole.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from styrax.checkpoint import commit, digest, structure
from styrax.checkpoint.config import CheckpointConfig
from styrax.checkpoint.errors import CheckpointError, explain
from styrax.checkpoint.formats.base import Array, loaded, refuse
from styrax.checkpoint.manifest import ARRAYS, LEAVES, Item, Leaf, Manifest, leaf_name, list_incomplete
from styrax.checkpoint.naming import orbax_name
from styrax.checkpoint.saving import writer
from styrax.checkpoint.snapshot import ALIGN, NAME, for_orbax
from styrax.checkpoint.store import Store
from styrax.core import tree


def import_arrays(
    items: Mapping[str, Mapping[str, Any]],
    directory: str | Path,
    step: int = 0,
    *,
    config: CheckpointConfig | None = None,
    overwrite: bool = False,
    progress: Callable[[str, int], None] | None = None,
) -> None:
    """Make a checkpoint of arrays by path, as `Store.save` would of the tree that has these paths.

    Args:
        items: Item -> tree path -> `Array`, or an array of numpy or jax. Keys become those of nested dictionaries.
        directory: Of the checkpoints; made if missing, and locked meanwhile.
        step: The step to give it.
        config: `pack_below` and `timeout` of it are used; nothing older is deleted.
        overwrite: Replace a checkpoint of the same step.
        progress: Called with the path and bytes of each array when it is read.

    Raises:
        CheckpointError: The step is there already, a path is both an array and a dictionary (all such are listed),
            or the checkpoint cannot be written. What was there is untouched then.
    """
    config = config or CheckpointConfig()
    wrong = [f"item {name!r}: a name is letters, digits, '_', '.', '-', and starts with none of '.-'" for name in items]
    refuse(Path(directory), [text for text, name in zip(wrong, items) if not NAME.fullmatch(name)], "Name it otherwise")
    arrays = {name: {path: Array.of(array) for path, array in flat.items()} for name, flat in items.items()}
    nested = {name: _nest(name, list(flat)) for name, flat in arrays.items()}
    with Store(directory, config) as store:
        there = [*store.steps(), *list_incomplete(store.directory)]
        if step in there and not overwrite:
            raise CheckpointError(
                f"{store.directory} has a checkpoint of step {step} already; choose another step or folder, or say "
                "that it may be replaced (overwrite)"
            )
        folder = commit.staging(store.directory, step)
        spool = commit.staging(store.directory, step)  # the next writer sweeps it, should this one be killed
        try:
            folder.mkdir()
            spool.mkdir()
            found = _write(folder, spool, arrays, nested, config, progress or (lambda path, nbytes: None))
            shutil.rmtree(spool, ignore_errors=True)
            manifest = Manifest(
                step=step,
                created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                items=found,
                files=commit.seal(folder),
                writer=writer(),
            )
            commit.publish(folder, manifest)
        except CheckpointError:
            raise
        except (OSError, ValueError) as error:
            raise explain(error, store.directory, f"step {step} cannot be written") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(spool, ignore_errors=True)


def _write(
    folder: Path,
    spool: Path,
    items: Mapping[str, Mapping[str, Array]],
    nested: Mapping[str, Any],
    config: CheckpointConfig,
    report: Callable[[str, int], None],
) -> dict[str, Item]:
    found: dict[str, Item] = {}
    large: dict[str, dict[str, np.ndarray]] = {}
    (folder / LEAVES).parent.mkdir()
    with (folder / LEAVES).open("wb") as packed:
        for name, arrays in items.items():
            leaves: dict[str, Leaf] = {}
            for path, array in arrays.items():  # in the source's order, which it may read ahead in
                if array.nbytes >= max(config.smallest, 1) and for_orbax(array.dtype):
                    where = leaf_name(name, path)
                    data = large.setdefault(name, {})[orbax_name(path)] = _map(where, array, spool)
                    leaves[path] = dataclasses.replace(_leaf(path, array, "orbax"), digest=digest.of(data))
                else:
                    leaves[path] = _pack(packed, path, array)
                report(path, array.nbytes)
            order = tree.flatten(nested[name])
            found[name] = Item(
                kind="tree", leaves=tuple(leaves[path] for path in order), structure=structure.describe(nested[name])
            )
        end = packed.tell()
    if not end:
        shutil.rmtree((folder / LEAVES).parent)
    if large:
        from styrax.checkpoint import arrays as engine

        engine.Writing(folder / ARRAYS, large, timeout=config.timeout, raw=config.raw).wait()
    return found


def _leaf(path: str, array: Array, where: Any) -> Leaf:
    return Leaf(path=path, kind="array", shape=array.shape, dtype=array.dtype.name, where=where, nbytes=array.nbytes)


def _pack(handle: IO[bytes], path: str, array: Array) -> Leaf:
    handle.write(b"\0" * (-handle.tell() % ALIGN))
    data = loaded(path, array).reshape(-1).view(np.uint8)
    leaf = dataclasses.replace(_leaf(path, array, "packed"), offset=handle.tell(), digest=digest.of(data))
    handle.write(data.data)
    return leaf


def _map(path: str, array: Array, spool: Path) -> np.ndarray:
    if array.mapped is not None:
        return array.mapped()
    file = spool / str(len(list(spool.iterdir())))
    data = loaded(path, array)
    with file.open("wb") as handle:
        handle.write(data.reshape(-1).view(np.uint8).data)
    del data
    return np.asarray(np.memmap(file, np.uint8, "r")).view(array.dtype).reshape(array.shape)


def _nest(item: str, paths: list[str]) -> Any:
    """Make the tree of nested dictionaries that has these paths, each leaf its own path."""
    if paths == [""]:
        return ""
    root: dict[str, Any] = {}
    problems = []
    for path in sorted(paths):  # an array comes before what would be below it
        *above, last = (key.replace("%2F", "/").replace("%25", "%") for key in path.split("/"))
        node: Any = root
        for key in above:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last in node or not path:
            problems.append(f"{leaf_name(item, path)}: cannot be in a dictionary that another array has the place of")
        else:
            node[last] = path
    refuse(Path(item), problems, "Choose another separator, or none (''), or leave these out")
    return root
