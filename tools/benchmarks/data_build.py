"""Building a token store against calling the tokenizer directly on texts that are in memory already.

python tools/benchmarks/data_build.py [--rounds 3] [--workers 1 2] [--tokenizer FILE] [--sources IN...]

The yardstick is one call `tokenizers.Tokenizer.encode_batch_fast(texts)`, on all cores: no file is read, no id is taken
out of its answer, nothing is checked or written. Ours is all of `build_store`: it finds and reads the files, starts
the processes, encodes, proves that the ids stand for the very bytes, writes, flushes and seals the store. They run in
turn, and the ratios of neighbours are what is printed, of wall time and of processor time (all processes together;
the one to trust where something else is running): over 1, ours is faster.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import tokenizers

from styrax.data import build_store, find_documents, load_tokenizer, train_bpe


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokenizer", help="a tokenizer.json; by default BPE of 4,096 is trained first")
    parser.add_argument("--sources", nargs="+", default=["python:stdlib"])
    args = parser.parse_args()
    names = ("styrax-data", "tokenizers", "numpy")
    versions = {name: importlib.metadata.version(name) for name in names}
    print(f"python {platform.python_version()}, {versions}, {os.cpu_count()} cores")

    documents = find_documents(args.sources)
    texts = [document.path.read_bytes().decode(errors="replace") for document in documents]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(args.tokenizer or f"{folder}/tokenizer.json")
        if not args.tokenizer:
            train_bpe(texts[:: max(1, len(texts) // 100)], 4096).save(file)
        tokenizer = load_tokenizer(file)
        yardstick = tokenizers.Tokenizer.from_file(str(file))
        yardstick.encode_special_tokens = True
        times: dict[int, list[tuple[float, float]]] = {workers: [] for workers in args.workers}
        direct: dict[int, list[tuple[float, float]]] = {workers: [] for workers in args.workers}
        tokens, size = 0, ""
        for _ in range(args.rounds):
            for workers in args.workers:
                begin = clocks()
                encoded = yardstick.encode_batch_fast(texts, add_special_tokens=False)
                direct[workers].append(since(begin))
                tokens = sum(map(len, encoded))
                del encoded
                begin = clocks()
                store = build_store(
                    args.sources, f"{folder}/s", tokenizer=tokenizer, errors="replace", workers=workers, overwrite=True
                )
                times[workers].append(since(begin))
                size = f"{len(store)} documents, {store.num_bytes / 1e6:.1f} MB, {tokens} tokens"
    print(size)
    for workers in args.workers:
        speeds = [tokens / statistics.median(wall for wall, _ in runs[workers]) / 1e6 for runs in (times, direct)]
        print(
            f"workers={workers}: ours {speeds[0]:.3f}, direct {speeds[1]:.3f} million tokens a second; ours / direct:"
        )
        for which, name in enumerate(("wall time", "processor time")):
            ratios = [a[which] / b[which] for a, b in zip(direct[workers], times[workers], strict=True)]
            middle, low, high = statistics.median(ratios), *np.quantile(ratios, [0.25, 0.75])
            print(f"  {name:<14} {middle:.3f} (quartiles {low:.3f} to {high:.3f})")


def clocks() -> tuple[float, float]:
    """Read the clock, and the processor time of this process and of those that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(usage.ru_utime + usage.ru_stime for usage in used)


def since(begin: tuple[float, float]) -> tuple[float, float]:
    """Tell how much of both has passed."""
    now = clocks()
    return now[0] - begin[0], now[1] - begin[1]


if __name__ == "__main__":
    main()
