"""A command as one process of several: how it joins the others, and how it leaves when something went wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from styrax.core import UserError
from styrax.core.distributed import abandon, initialize

LOST = ("gloo", "connection", "unavailable", "deadline_exceeded", "heartbeat", "coordination", "nccl", "socket closed")
"""What stands in errors of devices that could not reach another process."""


@contextlib.contextmanager
def together() -> Iterator[bool]:
    """Join the processes of this job, if the environment names any; see :func:`styrax.core.distributed.initialize`.

    A process that leaves by an error does not wait for the others. They are ended by jax, within about half a minute,
    if nobody does it before. An error because another process is gone says so.

    Yields:
        Whether this is process 0, or the only one.
    """
    import jax

    # It would take SIGTERM away from Python, and knows of no other signal; a run has its own way (accord.py).
    jax.config.update("jax_enable_preemption_service", False)
    if not initialize():
        yield True
        return
    try:
        yield jax.process_index() == 0
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        abandon(130 if interrupted else getattr(error, "exit_code", 1))
        if isinstance(error, jax.errors.JaxRuntimeError) and any(word in str(error).lower() for word in LOST):
            raise UserError(
                f"another process of this run has ended or cannot be reached ({str(error).splitlines()[0]}). What it "
                "said last tells why; the same command goes on from the newest whole checkpoint"
            ) from error
        raise
