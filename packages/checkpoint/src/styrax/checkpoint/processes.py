"""What several processes of one run must do together. All of them call these in the same order."""

from __future__ import annotations

import numpy as np

from styrax.checkpoint.errors import CheckpointError


def several() -> bool:
    """Tell whether this run has more than one process."""
    import jax

    # Asked for first because counting processes starts jax's devices.
    return jax.distributed.is_initialized() and jax.process_count() > 1


def first() -> bool:
    """Tell whether this is process 0, which alone changes what is listed as a checkpoint."""
    import jax

    return not several() or jax.process_index() == 0


def share(value: int) -> int:
    """Give every process the number of process 0.

    Args:
        value: At most 31 bits; what the others pass is ignored.
    """
    if not several():
        return value
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def agree(error: Exception | None) -> None:
    """Raise on every process if one of them has an error: its own, or that another one failed."""
    if several():
        from jax.experimental import multihost_utils

        failed = np.flatnonzero(multihost_utils.process_allgather(np.int32(error is not None)))
        if error is None and failed.size:
            raise CheckpointError(f"process {', '.join(map(str, failed))} failed to save; see its own error")
    alone(error)


def alone(error: Exception | None) -> None:
    """Raise this process's error, like `agree`, without the others."""
    if error is not None:
        raise error
