"""Tokens per CPU-second of packed batches: ours, Grain's packing, a torch DataLoader, and a bare gather.

python tools/benchmarks/data_throughput.py [--store DIR] [--batches 200] [--rounds 7] [--seq-len 2048] [--batch-size 32]

All make batches of the same shape from the same store (by default Python's own library in a BPE of 4,096, built and
cached at first use), with segment ids and positions, in one process, in turn, `rounds` times; CPU time counts all
threads. Printed: medians, and the median over the rounds of the ratios. torch is not part of the workspace: without it
its rows are n/a. `uv run --locked python -m pip` is not there either, so: a virtual environment with torch and the
packages, or PYTHONPATH.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from styrax.data import LMData, TokenStore, to_grain
from styrax.data.cache import cached_store

Batches = Callable[[], Iterator[Any]]


def bare(store: TokenStore, rows: int, length: int) -> Iterator[np.ndarray]:
    """Gather random windows of a memory map: the limit of anything that reads tokens so."""
    rng = np.random.default_rng(0)
    places = np.arange(length)
    while True:
        starts = rng.integers(0, store.num_tokens - length, rows)
        yield store.tokens[starts[:, None] + places].astype(np.int32)


def ours(data: LMData) -> Iterator[Any]:
    """Every step's batch, in this thread."""
    return map(data.batch, itertools.count())


def through_grain(data: LMData) -> Iterator[Any]:
    """Ours, as a Grain dataset of steps."""
    import grain

    return iter(to_grain(data).to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def grains(store: TokenStore, rows: int, length: int, pack: str) -> Iterator[Any]:
    """Grain's own shuffle, packing and batching."""
    import grain
    from grain import experimental

    class Documents:
        def __len__(self) -> int:
            return len(store)

        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            return {"tokens": store[int(index)]}

        def __repr__(self) -> str:
            return "Documents"

    read = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    dataset = grain.MapDataset.source(Documents()).seed(0).shuffle().repeat().to_iter_dataset(read)
    if pack == "concat":
        dataset = experimental.ConcatThenSplitIterDataset(dataset, length_struct={"tokens": length})
    else:
        dataset = dataset.map(lambda record: {"tokens": record["tokens"][:length]})
        dataset = experimental.FirstFitPackIterDataset(dataset, length_struct={"tokens": length}, num_packing_bins=64)
    return iter(dataset.batch(rows, drop_remainder=True))


def torchs(store: TokenStore, rows: int, length: int) -> Iterator[Any]:
    """A torch DataLoader whose dataset makes whole batches in numpy, by `__getitems__`: documents, concatenated.

    Written as one would without styrax: the epoch's documents on one line, rows cut from it by searchsorted, one
    gather, segment ids and positions from the boundaries. Rows of an epoch are the indices that torch shuffles.
    """
    import torch  # pyright: ignore[reportMissingImports] - not part of the workspace

    torch.set_num_threads(1)
    end, places = store.meta["tokenizer"]["eos_id"], np.arange(rows * length)
    starts, lengths = store.docs["start"], store.docs["tokens"]
    order = np.random.default_rng(0).permutation(len(store))
    begin = np.concatenate([[0], np.cumsum(lengths[order])])
    where = starts[order]

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return int(begin[-1]) // length

        def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
            low = np.asarray(indices) * length
            first = np.searchsorted(begin, low, "right") - 1
            count = np.searchsorted(begin, low + length, "left") - first
            row = np.repeat(np.arange(len(low)), count)
            number = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
            place = first[row] + number
            start = np.maximum(begin[place], low[row])
            sizes = np.minimum(begin[place + 1], low[row] + length) - start
            column = row * length + start - low[row]
            index = places[: len(low) * length] + np.repeat(where[place] - begin[place] + start - column, sizes)
            targets = store.tokens[index].astype(np.int32)
            tokens = np.empty_like(targets)
            tokens[1:] = targets[:-1]
            tokens[column] = end
            segment = np.repeat((number + 1).astype(np.int32), sizes)
            position = (places[: len(low) * length] - np.repeat(column, sizes)).astype(np.int32)
            mask = np.ones(len(targets), np.float32)
            arrays = {"tokens": tokens, "targets": targets, "segment_ids": segment, "positions": position}
            arrays["loss_mask"] = mask
            return {name: torch.from_numpy(array.reshape(-1, length)) for name, array in arrays.items()}

    def endless() -> Iterator[Any]:
        while True:
            yield from torch.utils.data.DataLoader(
                Rows(), batch_size=rows, shuffle=True, drop_last=True, collate_fn=lambda batch: batch
            )

    return endless()


def measure(batches: Iterator[Any], count: int, tokens: int) -> float:
    """Tokens per CPU-second over `count` batches, after one that is not counted."""
    next(batches)
    begin = time.process_time()
    for _ in range(count):
        next(batches)
    return count * tokens / (time.process_time() - begin)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", help="a token store (default: Python's library, cached)")
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    store = TokenStore(args.store) if args.store else cached_store(["python:stdlib"], tokenizer="bpe:4096")
    rows, length = args.batch_size, args.seq_len
    data = {
        pack: LMData(store, seq_len=length, batch_size=rows, pack=pack, held_out=0) for pack in ("concat", "best_fit")
    }
    contestants: dict[str, Iterator[Any]] = {
        "bare gather of a memory map": bare(store, rows, length),
        "styrax concat": ours(data["concat"]),
        "styrax best_fit": ours(data["best_fit"]),
        "styrax concat, as a Grain dataset": through_grain(data["concat"]),
        "grain concat-then-split": grains(store, rows, length, "concat"),
        "grain first-fit, 64 bins": grains(store, rows, length, "first_fit"),
    }
    try:
        contestants["torch DataLoader, __getitems__"] = torchs(store, rows, length)
        next(contestants["torch DataLoader, __getitems__"])
    except ImportError:
        contestants.pop("torch DataLoader, __getitems__", None)
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(args.rounds):
        for name, batches in contestants.items():
            count = args.batches if "grain " not in name else max(1, args.batches // 8)
            found[name].append(measure(batches, count, rows * length))
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    names = ("styrax-data", "grain", "numpy", "torch")
    print(f"python {platform.python_version()}, " + ", ".join(f"{name} {version(name)}" for name in names))
    print(f"{len(store)} documents, {store.num_tokens:,} tokens; {rows} x {length}; {args.rounds} rounds")
    print(f"{'':36} {'Mtoken / CPU-s':>14} {'x bare':>8} {'x grain concat':>15} {'x torch':>8}")
    for name, speeds in found.items():
        ratios = [
            f"{statistics.median(a / b for a, b in zip(speeds, found[other], strict=True)):.3g}"
            if other in found
            else "n/a"
            for other in ("bare gather of a memory map", "grain concat-then-split", "torch DataLoader, __getitems__")
        ]
        print(f"{name:36} {statistics.median(speeds) / 1e6:14.4g} {ratios[0]:>8} {ratios[1]:>15} {ratios[2]:>8}")
    for pack, each in data.items():
        line = each.lines[0]
        print(f"padding, {pack}: {100 * (1 - line.targets / line.places):.4f} % of an epoch")
    begin = time.perf_counter()
    LMData(store, seq_len=length, batch_size=rows, pack="best_fit", held_out=0).batch(1_000_000)
    seconds = time.perf_counter() - begin
    print(f"cold, best_fit: opening the data and making the batch of step 1,000,000 took {seconds:.3f} s")


def version(name: str) -> str:
    """An installed version, or n/a."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "n/a"


if __name__ == "__main__":
    main()
