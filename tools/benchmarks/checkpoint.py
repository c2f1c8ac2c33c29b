"""Checkpoints: ours against Orbax, safetensors, torch Distributed Checkpoint and bare writes, on one disk.

python tools/benchmarks/checkpoint.py [--rounds 2] [--tree big|small|half] [--quick] [--folder DIR] [--json FILE]

Each figure of each contestant is taken in a process of its own, the contestants in turn, `rounds` times (every other
round in reverse). A process makes the tree (jax arrays, as a compiled function gives them), warms up with a small one,
saves, and loads what it saved. Printed are medians, and medians of the ratios within a round:

save      seconds until everything is on the disk (what the peer does not sync itself is synced by us)
blocked   the share of it after which the caller may go on and change the arrays
memory    the most that was resident at once, less what was before (VmHWM after `clear_refs`, less VmRSS), over the
          size of the tree; for a load the loaded tree itself is 1. Pages of mapped files count.
load      seconds from a new object to arrays in memory, the file cache warm; ours verifies every byte
CPU       seconds of processor time, all threads

torch and safetensors are not part of the workspace; put them on PYTHONPATH, else they are n/a. The goals are those of
the project. Orbax's best is searched in the first round among the settings in `checkpoint_peers.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib.metadata
import importlib.util
import io
import itertools
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TREES = {  # arrays, bytes of each, dtype
    "big": (200, 2**30 // 200 // 1024 * 1024, "float32"),
    "small": (2000, 4000, "float32"),
    "half": (32, 2**28 // 32, "bfloat16"),
}
QUICK = {"big": (8, 2**20, "float32"), "small": (100, 4000, "float32"), "half": (4, 2**20, "bfloat16")}
NEEDS = {"safetensors + fsync": "safetensors", "torch DCP": "torch"}
OURS, DEFAULT, BEST = "styrax", "orbax, defaults", "orbax, at its best"


# In the process of one measurement


def memory(name: str) -> int:
    """A figure of `/proc/self/status`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(name)


def measured(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Run something; gives its result, and its wall time, processor time and peak of extra memory."""
    gc.collect()
    # Freed memory that the allocator kept would hide what is used anew.
    ctypes.CDLL(None).malloc_trim(0)
    os.sync()
    Path("/proc/self/clear_refs").write_text("5")
    before, usage, begin = memory("VmRSS"), resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    result = work()
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
    return result, {"wall": wall, "cpu": cpu, "memory": memory("VmHWM") - before}


def save_and_load(task: dict[str, Any]) -> dict[str, Any]:
    """Save a tree and load it, once each, or as often as the task's options say."""
    import jax
    import numpy as np
    from checkpoint_peers import PEERS, abstract, make_tree

    folder = Path(task["folder"])
    saver, loader = (PEERS[task["peer"]](options) for options in (task["save"], task["load"]))
    tiny = make_tree(2, 2**21, task["tree"][2])
    like = abstract(tiny)
    saver.save(folder / "tiny", tiny)
    jax.block_until_ready(loader.load(folder / "tiny", like))
    tree = make_tree(*task["tree"])
    size = sum(leaf.nbytes for leaf in tree.values())
    like = abstract(tree)
    blocked, save = measured(lambda: saver.save(folder / "tree", tree))
    stored = sum(path.stat().st_size for path in (folder / "tree").rglob("*") if path.is_file())
    last = list(tree)[-1]
    expected = np.asarray(tree[last]).tobytes()
    tree.clear()
    loaded, load = measured(lambda: jax.block_until_ready(loader.load(folder / "tree", like)))
    found = loaded[last]
    found = found if hasattr(found, "dtype") and not hasattr(found, "untyped_storage") else found.view(-1)
    got = bytes(found.untyped_storage()) if hasattr(found, "untyped_storage") else np.asarray(found).tobytes()
    assert got == expected, f"{task['peer']} gave back other values"
    return {"save": save, "load": load, "blocked": blocked / save["wall"], "size": size, "stored": stored / size}


def look(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds to say what a checkpoint of many leaves holds: our commands and manifest, Orbax's `metadata()`."""
    from checkpoint_peers import PEERS, make_tree

    from styrax.checkpoint import read_manifest
    from styrax.core.cli import main as command

    folder, tree = Path(task["folder"]), make_tree(*task["tree"])
    ours, orbax = (PEERS[name]({}) for name in (OURS, DEFAULT))
    ours.save(folder / "ours", tree)
    orbax.save(folder / "orbax", tree)

    def run(*arguments: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            assert command(["checkpoint", *arguments]) in (0, None)
        assert "params" in text.getvalue() or arguments[0] == "ls"

    works = {
        "read_manifest": lambda: read_manifest(folder / "ours/00000001"),
        "ls": lambda: run("ls", str(folder / "ours")),
        "show": lambda: run("show", str(folder / "ours")),
        "orbax metadata()": lambda: orbax.metadata(folder / "orbax"),
    }
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(4):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            found[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def drift(task: dict[str, Any]) -> dict[str, Any]:
    """Memory after each of many saves by one store."""
    from checkpoint_peers import make_tree

    from styrax.checkpoint import CheckpointConfig

    tree = {"large": make_tree(*task["tree"]), "small": make_tree(100, 4000, "float32")}
    size, held = sum(leaf.nbytes for part in tree.values() for leaf in part.values()), []
    with CheckpointConfig(keep_last=2).build(Path(task["folder"]) / "drift") as store:
        for step in range(task["saves"]):
            store.save(step, {"params": tree})
            store.wait()
            held.append(memory("RssAnon") / size)
    half = len(held) // 2
    return {"size": size, "held": held, "growth": statistics.mean(held[-5:]) - statistics.mean(held[half : half + 5])}


TASKS = {"save_and_load": save_and_load, "look": look, "drift": drift}


# In the process that a person starts


class Runs:
    """Starts the processes, keeps what they found, and prints it.

    Attributes:
        goals: What was aimed at, the figure, the limit and whether it was met.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.goals: list[dict[str, Any]] = []
        self.samples: dict[str, Any] = {}

    def process(self, task: str, **arguments: Any) -> dict[str, Any]:
        """Run one task in a process and a folder of its own."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            text = json.dumps({"task": task, "folder": folder, **arguments})
            done = subprocess.run([sys.executable, __file__, "--task", text], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{text} failed:\n{done.stderr[-3000:]}")
        os.sync()
        return json.loads(done.stdout.splitlines()[-1])

    def goal(self, what: str, value: float, limit: float, *, at_least: bool = False) -> None:
        """Say whether a goal was met."""
        met = value >= limit if at_least else value <= limit
        self.goals.append({"goal": what, "value": value, "limit": limit, "met": met})
        print(
            f"  {what}: {value:.3g}, goal at {'least' if at_least else 'most'} {limit:g}: {'met' if met else 'NOT MET'}"
        )

    def tree(self, name: str, tree: tuple[int, int, str], rounds: int) -> None:
        """Race on one tree, and print."""
        from checkpoint_peers import LOAD_OPTIONS, PEERS, SAVE_OPTIONS

        def run(peer: str, save: dict[str, Any], load: dict[str, Any]) -> dict[str, Any]:
            return self.process("save_and_load", tree=tree, peer=peer, save=save, load=load)

        peers = [peer for peer in PEERS if importlib.util.find_spec(NEEDS.get(peer, "jax"))]
        tries = len(SAVE_OPTIONS) if tree[0] * tree[1] < 2**26 else None  # too small for a bound on reading to matter
        # Each process tries one way to save and one to load, since what was written hardly changes how to read it.
        tried = [
            (save, load, run(BEST, save, load))
            for save, load in zip(itertools.cycle(SAVE_OPTIONS), LOAD_OPTIONS[:tries], strict=False)
        ]
        best_save = min(tried, key=lambda each: each[2]["save"]["wall"])[0]
        best_load = min(tried, key=lambda each: each[2]["load"]["wall"])[1]
        found: dict[str, list[dict[str, Any]]] = {peer: [] for peer in peers}
        for number in range(rounds):
            for peer in peers if number % 2 == 0 else peers[::-1]:
                options = (best_save, best_load) if peer == BEST else ({}, {})
                found[peer].append(run(peer, *options))
        self.samples[name] = {"best": [best_save, best_load], **found}
        size = found[OURS][0]["size"]
        print(f"\n{name}: {tree[0]} arrays of {tree[1]:,} bytes, {tree[2]}, {size / 2**20:.0f} MiB; {rounds} round(s)")
        print(f"  Orbax's best here: {json.dumps(best_save)} to save, {json.dumps(best_load)} to load")
        self._table(found, [*peers, *(peer for peer in PEERS if peer not in peers)])
        save, load = ({peer: self._ratio(found, peer, part) for peer in (DEFAULT, BEST)} for part in ("save", "load"))
        ours = {
            part: statistics.median(r[part]["memory"] / r["size"] for r in found[OURS]) for part in ("save", "load")
        }
        if name == "small":
            self.goal("save, Orbax's best / ours", 1 / save[BEST], 20, at_least=True)
            self.goal("load, Orbax's best / ours", 1 / load[BEST], 20, at_least=True)
            return
        self.goal("save, ours / Orbax at its defaults", save[DEFAULT], 0.75)
        self.goal("save, ours / Orbax at its best", save[BEST], 1.25)
        self.goal("verified load, ours / Orbax at its best", load[BEST], 1.2)
        self.goal("blocked, as a share of the save", statistics.median(r["blocked"] for r in found[OURS]), 0.05)
        self.goal("extra memory of a save / the tree", ours["save"], 0.15)

    def _ratio(self, found: dict[str, list[dict[str, Any]]], peer: str, part: str) -> float:
        return statistics.median(
            a[part]["wall"] / b[part]["wall"] for a, b in zip(found[OURS], found[peer], strict=True)
        )

    def _table(self, found: dict[str, list[dict[str, Any]]], peers: list[str]) -> None:
        def middle(peer: str, figure: Callable[[dict[str, Any]], float]) -> float:
            return statistics.median(map(figure, found[peer]))

        heads = (
            "save s",
            "ours / it",
            "blocked",
            "CPU s",
            "memory",
            "load s",
            "ours / it",
            "CPU s",
            "memory",
            "stored",
        )
        print(f"  {'':20}" + "".join(f"{head:>10}" for head in heads))
        for peer in peers:
            if peer not in found:
                print(f"  {peer:20}" + f"{'n/a':>10}" * len(heads))
                continue
            cells = [f"{middle(peer, lambda r: r['save']['wall']):.3f}", f"{self._ratio(found, peer, 'save'):.3f}"]
            cells += [f"{middle(peer, lambda r: r['blocked']):.1%}", f"{middle(peer, lambda r: r['save']['cpu']):.2f}"]
            cells += [f"{middle(peer, lambda r: r['save']['memory'] / r['size']):.2f}"]
            cells += [f"{middle(peer, lambda r: r['load']['wall']):.3f}", f"{self._ratio(found, peer, 'load'):.3f}"]
            cells += [f"{middle(peer, lambda r: r['load']['cpu']):.2f}"]
            cells += [f"{middle(peer, lambda r: r['load']['memory'] / r['size']):.2f}"]
            cells += [f"{middle(peer, lambda r: r['stored']):.3f}"]
            print(f"  {peer:20}" + "".join(f"{cell:>10}" for cell in cells))

    def look(self, tree: tuple[int, int, str]) -> None:
        """Compare what tells what a checkpoint holds."""
        found = self.samples["look"] = self.process("look", tree=tree)
        print(f"\nlooking at {tree[0]} leaves: " + ", ".join(f"{name} {1e3 * t:.1f} ms" for name, t in found.items()))
        for name in ("ls", "show"):
            self.goal(f"Orbax metadata() / {name}", found["orbax metadata()"] / found[name], 50, at_least=True)

    def drift(self, tree: tuple[int, int, str], saves: int) -> None:
        """Watch the memory over many saves."""
        found = self.samples["drift"] = self.process("drift", tree=tree, saves=saves)
        held = found["held"]
        shown = ", ".join(f"{held[i]:.2f}" for i in sorted({0, saves // 4, saves // 2, 3 * saves // 4, saves - 1}))
        print(f"\n{saves} saves of {found['size'] / 2**20:.0f} MiB: memory / the tree, from first to last: {shown}")
        self.goal("growth over the second half, as a share of the tree", found["growth"], 0.05)


def version(name: str) -> str:
    """An installed version, or n/a."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "n/a"


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tree", choices=TREES, action="append", help="only these trees, and nothing else")
    parser.add_argument("--quick", action="store_true", help="small trees: only whether the program runs")
    parser.add_argument("--folder", help="where to write (default: a temporary one)")
    parser.add_argument("--json", help="also write every sample to this file")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        os.environ["JAX_PLATFORMS"] = "cpu"
        task = json.loads(args.task)
        print(json.dumps(TASKS[task["task"]](task)))
        return
    names = ("styrax-checkpoint", "orbax-checkpoint", "tensorstore", "jax", "numpy", "safetensors", "torch")
    print(f"python {platform.python_version()}, " + ", ".join(f"{name} {version(name)}" for name in names))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        free = shutil.disk_usage(folder).free
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {free / 2**30:.0f} GiB free in {folder}")
        runs, trees = Runs(Path(folder)), QUICK if args.quick else TREES
        for name in args.tree or trees:
            runs.tree(name, trees[name], args.rounds)
        if not args.tree:
            runs.look(trees["small"])
            runs.drift((4, 2**20, "float32") if args.quick else (16, 2**22, "float32"), 12 if args.quick else 50)
    print(f"\n{sum(goal['met'] for goal in runs.goals)} of {len(runs.goals)} goals met")
    if args.json:
        Path(args.json).write_text(json.dumps({"goals": runs.goals, "samples": runs.samples}, indent=1))


if __name__ == "__main__":
    main()
