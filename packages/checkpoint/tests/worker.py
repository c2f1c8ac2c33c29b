"""A process that saves, to be killed or left to end; started by the tests, in `conftest.py`.

It imports everything once and then forks a child for each task, so that a kill costs no import. A child that
is not killed falls off the end of this script, through the interpreter's real shutdown.
"""

import atexit
import contextlib
import errno
import json
import os
import signal
import sys
import time
from pathlib import Path


def items(step: int, generation: int = 0) -> dict:
    """What a step holds: an array for Orbax, some packed ones, a key, JSON; all told by the two numbers."""
    import jax
    import numpy as np

    return {
        "params": {
            "large": np.full((64, 512), step + generation / 1000, np.float32),
            "small": [np.full(7, step, np.int32), {"a.b": np.float32(generation)}],
            "key": jax.random.key(step),
        },
        "run": {"step": step, "generation": generation},
    }


def config(**changes):
    """Small enough a threshold that `large` goes to Orbax."""
    from styrax.checkpoint import CheckpointConfig

    return CheckpointConfig(**{"pack_below": 65536, "keep_last": 3, **changes})


def loop(directory: str, acks: str, same: bool = False, ready: str = "", **changes) -> None:
    """Save for ever; write down each step (and generation) that is safe, after `wait` said so."""
    with config(**changes).build(directory) as store, open(acks, "ab", buffering=0) as log:  # noqa: PTH123
        done = store.steps()
        generation = 0
        while True:
            generation += 1
            step = 1 + generation % 2 if same else max(done, default=0) + generation
            store.save(step, items(step, generation))
            if generation % 3:
                store.wait()
                log.write(f"{step} {generation}\n".encode())


def one(
    directory: str,
    end: str,
    fail: str = "",
    slow: float = 0,
    mb: int = 1,
    pack: bool = False,
    fork: bool = False,
    **changes,
):
    """Save step 7 and come to an end without `close`."""
    import numpy as np

    from styrax.checkpoint import commit

    if fail or slow:
        write = commit.write_file

        def broken(path, data):
            time.sleep(slow or 0.3)
            if fail:
                raise OSError(getattr(errno, fail), "made to fail by the test")
            write(path, data)

        commit.write_file = broken
    store = config(pack_below=2**40 if pack else 1000, **changes).build(directory)
    store.save(7, {"params": {"w": np.arange(mb * 250_000, dtype=np.float32)}, "run": {"a": 1}})
    print("saved", flush=True)
    if fork:
        pid = os.fork()
        if pid == 0:
            # What the interpreter's shutdown would run; the rest of it hangs in XLA after a fork.
            atexit._run_exitfuncs()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    if end == "collect":
        try:
            store.wait()
        except ValueError as error:
            print("told:", error, flush=True)
    if end == "raise":
        raise RuntimeError("the program's own error")
    if end == "exit":
        sys.exit(0)
    if end == "os._exit":
        os._exit(3)
    if end == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    if end == "handled":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    if end in ("interrupt", "twice"):
        # A shell starts jobs in the background with it ignored, and they hand that on.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if end == "twice":
            child = os.fork()
            if child == 0:
                while os.getppid() != 1:
                    time.sleep(0.5)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(os.getppid(), signal.SIGINT)
                os._exit(0)
        os.kill(os.getpid(), signal.SIGINT)


def hold(directory: str) -> None:
    """Keep the lock until killed."""
    store = config().build(directory)
    if os.fork() == 0:
        time.sleep(60)  # a child that outlives its parent must not keep the lock
        os._exit(0)
    print("held", flush=True)
    time.sleep(60)
    store.close()


def _serve() -> dict | None:
    """Fork a child for each line of stdin: its pid and, later, its exit status go to stdout."""
    import styrax.checkpoint.arrays
    import styrax.checkpoint.store  # noqa: F401

    print("ready", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        pid = os.fork()
        if pid == 0:
            output = os.open(task.pop("output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ.update(task.pop("env", {}))
            return task
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    return None


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    given = json.loads(sys.argv[1]) if len(sys.argv) > 1 else _serve()
    if given is not None:
        globals()[given.pop("task")](**given)
