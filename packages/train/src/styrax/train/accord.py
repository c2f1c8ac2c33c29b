"""How the processes of a run stop at the same step, whichever of them is asked to, and see that they train alike."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from styrax.core import UserError

SECONDS = 1.0
"""About how far apart the processes ask one another."""

MOST = 1000
"""Steps between two questions, at most."""

NOTHING, WISH = 0, 1
SIGNALS = ("SIGINT", "SIGTERM")


class Accord:
    """What all processes know of the wish of any of them to stop.

    Now and then each process hands in what it knows, as a few bytes that the devices reduce right after a step; the
    answer is read after the next step, when it has long been there. So nothing waits, all processes read the same
    answer at the same step, and they ask about every second: how many steps that is they settle in the same way.

    Where there is one process there is nothing to agree on, and a signal counts from the moment it is noted.

    Args:
        mesh: The devices of the run; None is one process that trains alone.
        received: Gives the name of the signal that this process has noted, or None.
        clock: Seconds, never going back.

    Attributes:
        several: Whether there are other processes.
    """

    def __init__(
        self, mesh: Mesh | None, received: Callable[[], str | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.several = mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1
        self._received, self._clock = received, clock
        self._agreed, self._asked = NOTHING, None
        self._wait, self._steps, self._begun = 1, 0, clock()
        if self.several:
            assert mesh is not None
            self._mesh = mesh
            everywhere = NamedSharding(mesh, PartitionSpec())
            self._most = jax.jit(lambda each: each.max(axis=0), out_shardings=everywhere)

    @property
    def signal(self) -> str | None:
        """Name of the signal because of which the run stops, here or on another process."""
        if not self.several:
            return self._received()
        return SIGNALS[self._agreed - 2] if self._agreed >= 2 else None

    def wish(self, own: str | None) -> str | None:
        """Why a hook wishes to stop, here or on another process.

        Args:
            own: What the hooks of this process wish.
        """
        if not self.several:
            return own
        return (own or "a hook of another process wished so") if self._agreed == WISH else None

    def turn(self, wish: str | None) -> None:
        """A step was handed to the devices; every process calls this once a step.

        Args:
            wish: What the hooks of this process wish.
        """
        if not self.several:
            return
        self._wait -= 1
        self._steps += 1
        if self._asked is not None:
            code, short = (int(x) for x in np.asarray(self._asked))
            self._agreed, self._wait, self._asked = max(self._agreed, code), MOST - short, None
        if self._wait <= 0:
            self._asked = self._ask(wish)

    def check_alike(self, **facts: Any) -> None:
        """Refuse to train unless every process has the same of each of some things, such as data and configuration.

        Args:
            facts: Name -> something with a ``repr`` that tells it from others.

        Raises:
            UserError: On every process, with the names of those that differ.
        """
        if not self.several:
            return
        from jax.experimental import multihost_utils

        digests = [hashlib.blake2b(repr(fact).encode(), digest_size=8).digest() for fact in facts.values()]
        own = np.array([np.frombuffer(digest, np.int32) for digest in digests])
        every = np.asarray(multihost_utils.process_allgather(own))
        different = [name for i, name in enumerate(facts) if (every[:, i] != every[:1, i]).any()]
        if different:
            raise UserError(
                f"the processes of this run do not have the same {', '.join(different)}. All of them need the same "
                "command, configuration, versions, and data files"
            )

    def _ask(self, wish: str | None) -> Any:
        signal = self._received()
        code = SIGNALS.index(signal) + 2 if signal in SIGNALS else WISH if wish else NOTHING
        now = self._clock()
        steps = min(MOST, max(1, int(self._steps * SECONDS / max(now - self._begun, 1e-9))))
        self._steps, self._begun = 0, now
        # The most urgent of all codes, and the fewest of all numbers of steps.
        return self._reduce(np.array([[code, MOST - steps]], np.int32))

    def _reduce(self, own: np.ndarray) -> Any:
        """The largest of every process's numbers; returns before they are known."""
        where = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        return self._most(jax.make_array_from_callback((self._mesh.size, 2), where, lambda index: own))
