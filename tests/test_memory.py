"""A long run needs no more memory at its end than at its beginning."""

import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

STEPS, SAVES = 5000, 50


def resident(process):
    """Anonymous memory in MiB; None when the process has just ended."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return None
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) / 1024 if found else None


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_steps_and_saves(styrax):
    """Less than 1 MiB a save, by a straight line through what the process held after the first fifth."""
    changes = {"train__steps": STEPS, "checkpoint__every": STEPS // SAVES, "train__eval_every": STEPS // 10}
    run = styrax.folder / "run"
    with (styrax.folder / "out").open("w") as out:
        process = styrax.start("train", styrax.config(**changes), "--run", run, out=out)
        seen = []
        while process.poll() is None:
            steps = [int(each.name) for each in (run / "checkpoints").glob("[0-9]*")] if run.exists() else []
            held = resident(process)
            if steps and held is not None and STEPS // 5 < max(steps) < STEPS:
                seen.append((max(steps) * SAVES / STEPS, held))
            time.sleep(0.05)
    assert process.returncode == 0, (styrax.folder / "out").read_text()
    saves, held = np.array(seen).T
    assert len(set(saves)) > SAVES // 2
    slope = np.polyfit(saves, held, 1)[0]
    print(f"{slope:+.3f} MiB a save; {held[0]:.0f} MiB after save {saves[0]:.0f}, {held[-1]:.0f} at the end")
    assert slope < 1
