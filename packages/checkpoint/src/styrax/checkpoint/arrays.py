"""The only module that talks to Orbax: large and sharded arrays, by its version 1 free functions.

Orbax lays out, writes and reshards; what counts as a checkpoint, and when, is decided elsewhere.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from styrax.checkpoint import processes
from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.naming import item_name

_LEAST_IN_FLIGHT = 512 * 2**20
# Cheap to reshard from, at the price of buffers while writing; smaller arrays are one piece for each shard.
_CHUNK, _CHUNKED_ABOVE = 64 * 2**20, 256 * 2**20
_MOST = 4  # times as many pieces as there would be of that size: with more the array stays whole
_CHECK_EVERY = 0.5


class _Expected(logging.Filter):
    """Leaves out what Orbax says when it finds nothing to merge, which is so wherever `raw` is."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "Skipping merge of OCDBT" not in str(record.msg)


class Writing:
    """A write that Orbax has begun.

    Args:
        directory: Where Orbax makes its checkpoint; must not exist.
        items: Item -> flat dictionary of arrays, which must not change until `wait` returns. Arrays on
            accelerators are copied to the host before this returns.
        timeout: Seconds that the write may take.
        compress: Whether to compress them (Zstandard).
        raw: Write each part of an array to a file of its own, as it is; otherwise many to one file.
    """

    def __init__(
        self,
        directory: Path,
        items: Mapping[str, Mapping[str, Any]],
        *,
        timeout: int,
        compress: bool = False,
        raw: bool = False,
    ) -> None:
        self._timeout = timeout
        self._expected = _Expected()
        if raw:
            _orbax_log().addFilter(self._expected)
        context = _context(timeout)
        saving = context.array_options.saving
        saving.use_compression = compress
        saving.use_ocdbt = saving.use_zarr3 = not raw
        with context:
            self._response = ocp.save_checkpointables_async(
                str(directory), {item_name(name): dict(arrays) for name, arrays in items.items()}
            )

    def wait(self, check: Callable[[], None] = lambda: None) -> None:
        """Return when everything is written, by all processes; raise what Orbax raised.

        Args:
            check: Called now and then; what it raises ends the wait.
        """
        try:
            self._wait(check)
        finally:
            _orbax_log().removeFilter(self._expected)

    def _wait(self, check: Callable[[], None]) -> None:
        deadline = time.monotonic() + self._timeout
        while True:
            begin = time.monotonic()
            try:
                return self._response.result(timeout=_CHECK_EVERY)
            except TimeoutError as error:
                check()
                now = time.monotonic()
                if now > deadline or now - begin < _CHECK_EVERY / 2:  # too early for ours: it is one of Orbax's own
                    raise CheckpointError(f"Orbax did not finish within {self._timeout} s (timeout)") from error


def read(directory: Path, items: Mapping[str, Mapping[str, Any]], *, timeout: int) -> dict[str, dict[str, Any]]:
    """Read some arrays of some items.

    Args:
        directory: Orbax's checkpoint.
        items: Item -> name -> what to read it as: a `jax.ShapeDtypeStruct` with a sharding gives a `jax.Array`,
            `numpy_like` a numpy array.
        timeout: Seconds for Orbax's own waits.
    """
    wanted = {item_name(name): dict(arrays) for name, arrays in items.items()}
    leaves = [leaf for arrays in wanted.values() for leaf in arrays.values()]
    largest = max((leaf.dtype.itemsize * _size(leaf.shape) for leaf in leaves), default=0)
    context = _context(timeout)
    # Each process reads by itself what it needs: so none waits in Orbax for another one, whose files may be damaged.
    me, _ = processes.place()  # which starts no devices if there is one process
    sharing = context.multiprocessing_options
    sharing.primary_host, sharing.active_processes, sharing.barrier_sync_key_prefix = me, {me}, f"process-{me}"
    # Bounded reads are both leaner and faster than all at once; one array must fit.
    context.pytree_options.loading.partial_load = True  # what else lies there is not asked for
    context.memory_options.read_concurrent_bytes = max(_LEAST_IN_FLIGHT, 2 * largest)
    with context:
        found = ocp.load_checkpointables(str(directory), wanted)
    missing = [
        f"{name}: {leaf}"
        for name, arrays in wanted.items()
        for leaf, like in arrays.items()
        # Orbax has been seen to hand back the description of an array that it did not find.
        if (got := found[name].get(leaf)) is like or not isinstance(got, (jax.Array, np.ndarray))
    ]
    if missing:
        raise CheckpointError(f"Orbax did not find these arrays in {directory}: {', '.join(missing)}")
    return {name: dict(found[item_name(name)]) for name in items}


def numpy_like(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Describe an array to be read as numpy, without the memory for it."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def _orbax_log() -> logging.Logger:
    return logging.getLogger("absl")


def _context(timeout: int) -> Any:
    context = ocp.Context()
    context.array_options.saving.use_compression = False
    context.array_options.saving.enable_write_sharding_file = False
    context.array_options.saving.scoped_storage_options_creator = _storage
    context.memory_options.deepcopy_host_arrays = False  # what we hand over is our own copy
    context.async_options.timeout_secs = timeout
    return context


def _storage(key: Any, value: Any) -> Any:
    part = value.sharding.shard_shape(value.shape) if isinstance(value, jax.Array) else value.shape
    size = _size(part) * value.dtype.itemsize
    if size <= _CHUNKED_ABOVE or _pieces(part, value.dtype.itemsize) > _MOST * -(-size // _CHUNK):
        return None
    return ocp.options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=_CHUNK)


def _pieces(shape: tuple[int, ...], itemsize: int) -> int:
    """Count the pieces that Orbax cuts an array into: equal ones, so one with large prime factors into very many.

    Example:
        >>> _pieces((2**14, 2**14), 4), _pieces((100_000_007,), 4)
        (16, 100000007)
    """
    left, pieces = list(shape), 1
    while left and max(left) > 1 and _size(tuple(left)) * itemsize > _CHUNK:
        axis = left.index(max(left))
        factor = next((n for n in range(2, math.isqrt(left[axis]) + 1) if left[axis] % n == 0), left[axis])
        left[axis] //= factor
        pieces *= factor
    return pieces


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for dimension in shape:
        size *= dimension
    return size
