"""A process that saves to a folder and uploads from there, to be killed; started by `test_remote_s3.py`.

It imports everything once and then forks a child for each line that it reads, so that a kill costs no import.
"""

import json
import os
import sys

import numpy as np


def items(step: int) -> dict:
    """What a step holds, told by its number."""
    return {
        "params": {"w": np.random.default_rng(step).integers(0, 256, 2_000_000, np.uint8), "n": np.int64(step)},
        "run": {"step": step},
    }


def loop(directory: str, url: str, options: dict, acks: str) -> None:
    """Save for ever; write down each step that is in the bucket, after its ticket said so."""
    from styrax.checkpoint import CheckpointConfig
    from styrax.checkpoint.remote import Mirror, TieredStore

    mirror = Mirror(url=url, keep_last=3)
    config = CheckpointConfig(pack_below=2**30, keep_last=2)
    with TieredStore(directory, mirror, config, storage_options=options) as store, open(acks, "ab", 0) as log:  # noqa: PTH123
        step = max(store.steps(), default=0)
        while True:
            step += 1
            if store.save(step, items(step)).uploaded():
                log.write(f"{step}\n".encode())


def _serve() -> None:
    import s3fs  # noqa: F401

    import styrax.checkpoint.remote.tiers  # noqa: F401

    print("ready", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        pid = os.fork()
        if pid == 0:
            output = os.open(task.pop("output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            return loop(**task)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    return None


if __name__ == "__main__":
    _serve()
