"""Signals outside of the loop: in start-up, in a compilation, and after the last step."""

import json
import signal
import time

from support import lines


def interrupted(styrax, config, ready, *numbers):
    """Start, send signals one after another when ``ready()``, and give what was said on both channels."""
    process = styrax.start("train", config, "--run", "run")
    while not ready():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.2)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, (process.returncode, out, err)
    assert "Traceback" not in err and "bug" not in err and "ignored" not in err, err
    return out, err


def test_a_signal_is_heard_in_every_part_of_a_run(styrax):
    config = styrax.config(train__steps=4, train__sample_prompt='"def "', train__sample_tokens=200)
    run = styrax.folder / "run"

    def happened(event):
        events = run / "events.jsonl"
        return lambda: events.exists() and f'"{event}"' in events.read_text()

    out, err = interrupted(styrax, config, (run / ".starting").exists, signal.SIGINT)
    assert err.startswith("SIGINT: stopping as soon as nothing is lost")
    assert err.endswith("error: SIGINT before training began; the same command starts again\n")
    assert "saved" not in out

    out, err = interrupted(styrax, config, happened("start"), signal.SIGINT, signal.SIGINT)
    # The second one comes in time only if compiling takes a while.
    assert err.endswith(("stopped at once\n", "the same command starts again\n", "Ctrl-C again stops at once\n"))
    assert not happened("compile")()

    out, err = interrupted(styrax, config, happened("end"), signal.SIGTERM)
    assert "has no checkpoint, so it starts anew" in out
    assert "error: SIGTERM after the last step, which is saved; the same command takes the sample" in err
    assert [m["step"] for m in lines(run)] == [1, 2, 3, 4]
    assert [start["configuration"] for start in json.loads((run / "versions.json").read_text())] == ["../tiny.toml"] * 2
