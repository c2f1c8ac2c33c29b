"""An iterator over batches with a position that can be saved, prepared ahead in a thread."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from styrax.core.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from styrax.data.sharded import Spec

VERSION = 2
CLOSE_SECONDS = 2.0


class StepSource(Protocol):
    """What a loader reads: `LMData`, `ArrayData`, or anything with these."""

    @property
    def fingerprint(self) -> str:
        """Changes when batches would."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the batches depend on, in JSON."""
        ...

    @property
    def num_steps(self) -> int | None:
        """How many steps there are; `None` for no end."""
        ...

    @property
    def specs(self) -> Sequence[Spec]:
        """The specs of all steps, each once."""
        ...

    def spec(self, step: int) -> Spec:
        """Shape and dtype of each array of a step's whole batch; needed for a sharding alone."""
        ...

    def batch(self, step: int, rows: slice | None = None) -> dict[str, np.ndarray]:
        """Make rows of one step's batch."""
        ...

    def differences(self, saved: Mapping[str, Any], step: int, allow: Sequence[str] = ()) -> list[str]:
        """Say what keeps these data from going on, at a step, where others stopped."""
        ...


class Loader:
    """Yields the batches of `data` from a step on, the same whatever `prefetch` is.

    The state counts batches that were given out, not those prepared, and is one for all processes. When a
    batch cannot be made, the error is raised here, and again at every `next` until `seek` or `set_state`.

    Args:
        data: What makes the batches.
        step: The first step.
        sharding: A `jax.sharding.Sharding` of `[batch, seq]` for global arrays, or `None` for numpy.
        prefetch: Batches to prepare ahead; 0 makes each when it is asked for.
        timeout: Seconds after which a batch that does not come is an error, for storage that hangs; `None` waits for
            ever. Batches that are not prepared ahead are not watched.

    Raises:
        UserError: A negative step or prefetch, or a sharding that does not divide the batch.
    """

    def __init__(
        self,
        data: StepSource,
        *,
        step: int = 0,
        sharding: Any = None,
        prefetch: int = 2,
        timeout: float | None = 600.0,
    ):
        if prefetch < 0:
            raise UserError(f"prefetch = {prefetch}: expected 0 or more")
        if timeout is not None and not timeout > 0:
            raise UserError(f"timeout = {timeout}: expected seconds above 0, or None")
        self._data = data
        self._make: Callable[[int], Any] = data.batch
        if sharding is not None:
            from styrax.data.sharded import step_maker

            self._make = step_maker(data, sharding)
        self._prefetch, self._timeout = prefetch, timeout
        self._ahead: _Ahead | None = None
        self._finalizer: weakref.finalize | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._step = 0
        #: Seconds that the last `next` waited for its batch.
        self.wait_seconds = 0.0
        self.seek(step)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._closed or self._at_end():
            raise StopIteration
        if self._error is not None:
            raise self._error
        begin = time.perf_counter()
        try:
            if self._prefetch == 0:
                batch = self._make(self._step)
            else:
                if self._ahead is None:
                    self._ahead = _Ahead(self._make, self._step, self._data.num_steps, self._prefetch)
                    self._finalizer = weakref.finalize(self, _finish, self._ahead)
                batch = self._ahead.take(self._timeout)
        except _Late:
            self._stop()
            self._error = UserError(
                f"the batch of step {self._step} did not come within {self._timeout:g} seconds: reading hangs, "
                "or is too slow; check the storage that holds the data, or give the loader more time (timeout)"
            )
            raise self._error from None
        except Exception as error:
            self._error = error
            raise
        self._step += 1
        self.wait_seconds = time.perf_counter() - begin
        return batch

    @property
    def specs(self) -> Sequence[Spec]:
        """Shape and dtype of each array, for each shape of batch to come."""
        return self._data.specs

    def _at_end(self) -> bool:
        return self._data.num_steps is not None and self._step >= self._data.num_steps

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_state(self) -> dict[str, Any]:
        """Describe the position: small JSON.

        Returns:
            `version`, `step` (the next one to be given out), `fingerprint` of the data and the `settings`
            behind it, so that a mismatch can be explained.
        """
        return {
            "version": VERSION,
            "step": self._step,
            "fingerprint": self._data.fingerprint,
            "settings": dict(self._data.settings),
        }

    def set_state(self, state: Mapping[str, Any], *, allow: Sequence[str] = ()) -> None:
        """Go to a position that `get_state` gave.

        Args:
            state: The position.
            allow: Settings that may differ from those that the state was saved with. Of `LMData`, `mixture`,
                `batch_size`, `seq_len` and `skip_steps` may differ from this step on, so that no row is repeated or
                left out by mistake; after a change of any other, such as `seed`, the data go on in an order that
                begins anew.

        Raises:
            UserError: It is no such state, or belongs to other data; the message shows what differs.
        """
        step = state.get("step") if isinstance(state, Mapping) else None
        if not isinstance(state, Mapping) or not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise UserError(f"expected a data state with 'version', 'step' and 'fingerprint', got {state!r}")
        if state.get("version") != VERSION:
            raise UserError(
                f"the data state has version {state.get('version')!r}, expected {VERSION}: "
                "another version of styrax-data saved it; upgrade, or start a new run"
            )
        if state.get("fingerprint") != self._data.fingerprint:
            saved = state.get("settings")
            if not isinstance(saved, Mapping):
                raise UserError(f"expected a data state with the 'settings' behind its fingerprint, got {state!r}")
            problems = self._data.differences(saved, step, allow)
            if problems:
                raise UserError(
                    "the data differ from those that the state was saved with:\n"
                    + "\n".join(f"  - {problem}" for problem in problems)
                    + "\nto go on exactly, restore these settings and the text as it was; to change the data from here "
                    "on, name what may differ (allow_changes); to train on other data, start a new run"
                )
        self.seek(step)

    def seek(self, step: int) -> None:
        """Go to a step, at no cost; skips data after a loss spike, or repeats it.

        Raises:
            UserError: A negative step, or a closed loader.
        """
        if step < 0:
            raise UserError(f"step {step}: expected 0 or more")
        if self._closed:
            raise UserError("this loader is closed; make another with data.loader(step=...)")
        self._stop()
        self._error = None
        self._step = int(step)

    def close(self) -> None:
        """Stop reading; returns within seconds even when a read never does."""
        self._closed = True
        ahead = self._stop()
        if ahead is not None:
            ahead.join(CLOSE_SECONDS)

    def _stop(self) -> _Ahead | None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.stop()
            if self._finalizer is not None:
                self._finalizer.detach()
        return ahead


class _Late(Exception):
    """A batch that did not come in time."""


class _Ahead:
    """A thread that makes batches into a bounded queue; it never holds the loader, so that can be freed."""

    def __init__(self, make: Callable[[int], Any], step: int, end: int | None, depth: int):
        self._ready: deque[Any] = deque()
        self._change = threading.Condition()
        self._stopped = False
        self._depth = depth
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(make, step, end), name="styrax-data", daemon=True)
        self._thread.start()

    def take(self, seconds: float | None) -> Any:
        """Wait for the next batch, or raise what stopped them."""
        with self._change:
            if not self._change.wait_for(lambda: self._ready or self._failed or self._stopped, seconds):
                raise _Late
            if self._ready:
                batch = self._ready.popleft()
                self._change.notify_all()
                return batch
        if self._failed is not None:
            raise self._failed
        raise StopIteration

    def stop(self) -> None:
        """Make no more batches, and drop those made."""
        with self._change:
            self._stopped = True
            self._ready.clear()
            self._change.notify_all()

    def join(self, seconds: float) -> None:
        """Wait for the thread, at most so long."""
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self, make: Callable[[int], Any], step: int, end: int | None) -> None:
        while end is None or step < end:
            with self._change:
                self._change.wait_for(lambda: self._stopped or len(self._ready) < self._depth)
                if self._stopped:
                    return
            try:
                batch = make(step)
            except BaseException as error:
                with self._change:
                    self._failed = error
                    self._change.notify_all()
                return
            with self._change:
                if self._stopped:
                    return
                self._ready.append(batch)
                self._change.notify_all()
            del batch
            step += 1


def _finish(ahead: _Ahead) -> None:
    """Stop a thread whose loader was freed, or at the end of the process."""
    ahead.stop()
    ahead.join(CLOSE_SECONDS)
