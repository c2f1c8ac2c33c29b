"""Units of work over processes: each has a line of its own to this one, so that a death has a name."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, cast

from styrax.core.errors import UserError
from styrax.data.build.job import Job, make_part
from styrax.data.build.units import Unit

Task = tuple[Unit, str]
Report = Callable[[str, int, bool], None]

HERE_CHARS = 8_000_000
WORKER_CHARS = 2_000_000
GRACE_SECONDS = 5.0


def run_here(tasks: Iterable[Task], job: Job, report: Report) -> None:
    """Make parts one after another in this process, the tokenizer on all cores.

    Args:
        tasks: Units, each with the key of its part.
        job: What is done to them.
        report: Told the key, how many bytes of the unit have been read, and whether its part is complete.
    """
    for unit, key in tasks:
        make_part(job, unit, key, HERE_CHARS, lambda position, key=key: report(key, position, False))
        report(key, unit.size, True)


def run_workers(tasks: Iterable[Task], job: Job, workers: int, report: Report) -> None:
    """Make parts in worker processes, each with the tokenizer on one core.

    Args:
        tasks: Units, each with the key of its part; read on only when a worker is free.
        job: What is done to them; it must pickle.
        workers: How many processes.
        report: Told the key, how many bytes of the unit have been read, and whether its part is complete.

    Raises:
        UserError: What a worker raised, or that one ended; the message names its unit.
    """
    tasks, payload = iter(tasks), pickle.dumps(job)
    waiting: deque[Task] = deque()
    pool: list[_Worker] = []
    try:
        while True:
            # Read ahead while the workers are busy, so that none waits for an iterable.
            waiting.extend(itertools.islice(tasks, workers - len(waiting)))
            busy = sum(worker.task is not None for worker in pool)
            while len(pool) < min(workers, busy + len(waiting)):
                pool.append(_Worker.start())
            for worker in pool:
                if waiting and worker.ready and worker.task is None:
                    worker.give(waiting.popleft())
            listening = {worker.connection: worker for worker in pool if worker.task or not worker.ready}
            if not waiting and not any(worker.task for worker in pool):
                break
            for connection in wait(list(listening)):
                listening[cast("Connection", connection)].hear(payload, report)
        for worker in pool:
            worker.dismiss()
    finally:
        for worker in pool:
            worker.stop()


def can_leave(job: Job) -> str | None:
    """Tell why a job cannot go to another process, or `None` if it can."""
    for thing in (*job.filters, job.tokenizer, job.near, job.contamination):
        try:
            content = pickle.dumps(thing)
        except Exception as error:
            return f"{thing!r} cannot go to another process: {error}"
        main = sys.modules["__main__"]
        if b"__main__" in content and not getattr(main, "__file__", None) and getattr(main, "__spec__", None) is None:
            return f"{thing!r} is defined where no other process finds it; put it in a module"
    return None


def count_cores() -> int:
    """Tell how many cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass
class _Worker:
    """A process, the line to it, and what it is at work on."""

    process: SpawnProcess
    connection: Connection
    task: Task | None = None
    ready: bool = False

    @classmethod
    def start(cls) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,), name="styrax-data build", daemon=True)
        process.start()
        # Held open here, it would hide that the process has ended.
        theirs.close()
        return cls(process, ours)

    def give(self, task: Task) -> None:
        self.task = task
        self._send(task)

    def hear(self, payload: bytes, report: Report) -> None:
        """Take one message; the first one says that it has begun, and is answered with the job."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if kind == "ready":
            self.ready = True
            self._send(payload)
            return
        assert self.task is not None
        unit, key = self.task
        if kind == "read":
            report(key, value, False)
        elif kind == "done":
            self.task = None
            report(key, unit.size, True)
        else:
            error, trace = value
            raise error from RuntimeError(f"in a worker process, at {unit}:\n{trace}")

    def dismiss(self) -> None:
        if not self.ready:
            return
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(GRACE_SECONDS)

    def stop(self) -> None:
        """End it, whatever it does."""
        self.connection.close()
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(GRACE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(GRACE_SECONDS)

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it ended: `hear` finds out and says so
            self.connection.send(message)

    def _died(self) -> UserError:
        self.process.join(GRACE_SECONDS)
        code = self.process.exitcode
        how = f"exit code {code}" if code is None or code >= 0 else f"signal {_signal_name(-code)}"
        if not self.ready:
            return UserError(
                f"a worker process ended with {how} before it began; in a script, call this below "
                'if __name__ == "__main__":, or pass workers=1 to build in one process'
            )
        unit = self.task[0] if self.task else "no unit"
        memory = " (often: the system ran out of memory; pass a smaller number of workers)" if code == -9 else ""
        return UserError(
            f"a worker process ended with {how} at work on {unit}{memory}; what is finished is kept: the same call "
            "goes on from there"
        )


def _work(connection: Connection) -> None:
    """Be a worker process: take the job, then make parts until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the main process decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        try:
            connection.send(("ready", None))
            content = connection.recv()
            try:
                job: Job = pickle.loads(content)
            except Exception as error:
                raise UserError(
                    f"a worker process cannot take over the work: {error}; define filters and tokenizers in a module "
                    "that can be imported, or pass workers=1"
                ) from error
            for unit, key in iter(connection.recv, None):
                make_part(job, unit, key, WORKER_CHARS, lambda position: connection.send(("read", position)))
                connection.send(("done", None))
        except EOFError:
            raise
        except BaseException as error:
            connection.send(("failed", (_portable(error), traceback.format_exc())))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _portable(error: BaseException) -> BaseException:
    """Make an error that another process can read."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
