"""A process that saves, to be killed or left to end; started by the tests, in `conftest.py`.

It imports everything once and then forks a child for each task, so that a kill costs no import. A child that
is not killed falls off the end of this script, through the interpreter's real shutdown.
"""

import atexit
import errno
import json
import os
import secrets
import shutil
import signal
import sys
import threading
import time
from pathlib import Path


def items(step: int, generation: int = 0, leaves: int = 0) -> dict:
    """What a step holds: an array for Orbax, some packed ones, more arrays, JSON; told by the numbers.

    Nothing of jax, whose start would take longer than all else that a forked worker does.
    """
    import numpy as np

    return {
        "params": {
            "large": np.full((64, 512), step + generation / 1000, np.float32),
            "small": [np.full(7, step, np.int32), {"a.b": np.float32(generation)}],
            "more": [np.full(5, step + number, np.int32) for number in range(leaves)],
        },
        "run": {"step": step, "generation": generation, "leaves": leaves},
    }


def config(**changes):
    """Small enough a threshold that `large` goes to Orbax."""
    from styrax.checkpoint import CheckpointConfig

    return CheckpointConfig(**{"pack_below": 65536, "keep_last": 3, **changes})


def loop(directory: str, acks: str, same: bool = False, leaves: int = 0, **changes) -> None:
    """Save for ever; write down each step (and generation) that is safe, after its ticket said so."""
    with config(**changes).build(directory) as store, open(acks, "ab", buffering=0) as log:  # noqa: PTH123
        done = store.steps()
        log.write(b"begun\n")
        generation = 0
        while True:
            generation += 1
            step = 1 + generation % 2 if same else max(done, default=0) + generation
            ticket = store.save(step, items(step, generation, leaves))
            if generation % 3:
                ticket.committed()
                log.write(f"{step} {generation}\n".encode())


def sweep(directory: str, acks: str) -> None:
    """Leave what dead writers leave, and open the folder, for ever."""
    root = Path(directory)
    with open(acks, "ab", buffering=0) as log:  # noqa: PTH123
        while True:
            log.write(b"begun\n")
            for number in range(2):
                for kind in ("trash", "staging", "replaced"):
                    shutil.copytree(root / "00000001", root / f".{kind}-00000001-{secrets.token_hex(8)}")
                (root / f"0000000{number + 2}").rename(root / f".replaced-0000000{number + 2}-{secrets.token_hex(8)}")
            log.write(b"begun\n")
            config().build(directory).close()
            log.write(b"1 1\n")


def export(directory: str, acks: str, name: str = "out.safetensors") -> None:
    """Export arrays of ever larger numbers to the same place, for ever."""
    import numpy as np

    from styrax.checkpoint import formats

    folder = Path(directory)
    with open(acks, "ab", buffering=0) as log:  # noqa: PTH123
        log.write(b"begun\n")
        for number in range(1, 10**6):
            arrays = {f"w{leaf}": np.full(5000, number, np.int32) for leaf in range(20)}
            formats.write(folder / name, arrays, max_shard=100_000, overwrite=True)
            log.write(f"1 {number}\n".encode())


def import_(directory: str, acks: str) -> None:
    """Import as new steps and as the same ones, for ever."""
    import numpy as np

    from styrax.checkpoint import formats

    with open(acks, "ab", buffering=0) as log:  # noqa: PTH123
        log.write(b"begun\n")
        for number in range(1, 10**6):
            arrays = {name: np.full(size, number, np.int32) for name, size in (("large", 9000), ("small", 9))}
            step = 1 + number % 3
            formats.import_arrays({"params": arrays}, directory, step, config=config(pack_below=1000), overwrite=True)
            log.write(f"{step} {number}\n".encode())


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
            threading.Thread(target=_insist, daemon=True).start()
        os.kill(os.getpid(), signal.SIGINT)


def _insist() -> None:
    while True:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)


def hold(directory: str) -> None:
    """Keep the lock until killed."""
    store = config().build(directory)
    if os.fork() == 0:
        print("held", flush=True)  # by the child: it has closed its copy of the lock by now
        time.sleep(60)  # a child that outlives its parent must not keep the lock
        os._exit(0)
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
