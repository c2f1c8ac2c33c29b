"""Trajectories of elementwise optimizers from independent implementations, for packages/optim/tests.

The oracles need torch, which the workspace does not; install them aside and give the folders:

    pip install --target /tmp/torch torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    pip install --no-deps --target /tmp/oracles pytorch_optimizer==4.1.0 schedulefree==1.4.1 prodigyopt==1.1.2 \
        bitsandbytes==0.50.2
    TORCHDYNAMO_DISABLE=1 PYTHONPATH=/tmp/torch:/tmp/oracles \
        uv run --locked python tools/golden/optim_elementwise.py [NAME ...]

Each writes packages/optim/tests/golden/NAME.npz: weights before (`w0`, `b0`), gradients (`gw`, `gb`), weights after
each step (`w`, `b`), and what an oracle has besides.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[2] / "packages/optim/tests/golden"
STEPS = 30


def problem(shape: tuple[int, ...] = (6, 4), seed: int = 0) -> dict[str, np.ndarray]:
    """Make weights and gradients of a size that changes from step to step and element to element."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, size in (("w", shape), ("b", (5,))):
        scale = np.exp(rng.normal(size=size))
        made[f"{name}0"] = rng.normal(size=size).astype("float32")
        mean = rng.normal(size=size) * 0.5
        made[f"g{name}"] = ((rng.normal(size=(STEPS, *size)) + mean) * scale * 0.1).astype("float32")
    return made


def torch_run(given: dict[str, np.ndarray], make: Callable[[Any], Any], read: Any = None) -> dict[str, np.ndarray]:
    """Run a torch optimizer on given gradients; `read(optimizer)` gives more to keep of each step."""
    import torch

    params = {name: torch.nn.Parameter(torch.tensor(given[f"{name}0"])) for name in ("w", "b")}
    optimizer = make(list(params.values()))
    rows: dict[str, list[np.ndarray]] = {name: [] for name in params}
    for step in range(STEPS):
        for name, p in params.items():
            p.grad = torch.tensor(given[f"g{name}"][step])
        optimizer.step()
        for name, p in params.items():
            rows[name].append(p.detach().numpy().copy())
        for name, value in (read(optimizer, params) if read else {}).items():
            rows.setdefault(name, []).append(np.asarray(value))
    return {name: np.stack(row) for name, row in rows.items()}


def lion() -> dict[str, np.ndarray]:
    import pytorch_optimizer as po

    given = problem()
    return given | torch_run(given, lambda p: po.Lion(p, lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1))


def ademamix() -> dict[str, np.ndarray]:
    import pytorch_optimizer as po

    given = problem()

    def make(p: Any) -> Any:
        options = {"alpha": 5.0, "weight_decay": 0.1, "weight_decouple": True, "t_alpha_beta3": 20}
        return po.AdEMAMix(p, lr=1e-2, betas=(0.9, 0.999, 0.9999), **options)

    return given | torch_run(given, make)


def schedule_free() -> dict[str, np.ndarray]:
    from schedulefree import AdamWScheduleFreeReference

    given = problem()

    def make(p: Any) -> Any:
        optimizer = AdamWScheduleFreeReference(p, lr=2e-2, betas=(0.9, 0.999), weight_decay=0.1, warmup_steps=10)
        optimizer.train()
        return optimizer

    def read(optimizer: Any, params: Any) -> dict[str, np.ndarray]:
        return {f"x_{name}": optimizer.state[p]["x"].numpy().copy() for name, p in params.items()}

    return given | torch_run(given, make, read)


def mars() -> dict[str, np.ndarray]:
    import pytorch_optimizer as po

    given = problem()
    given["gw"] *= 5  # so that the clip acts on some steps
    options = {"lr_1d": 1e-2, "betas": (0.95, 0.99), "gamma": 0.025, "weight_decay": 0.1, "weight_decouple": True}
    return given | torch_run(given, lambda p: po.MARS(p, lr=1e-2, optimize_1d=True, foreach=False, **options))


def prodigy() -> dict[str, np.ndarray]:
    from prodigyopt import Prodigy

    # Small weights: beside 1, the first steps of 3e-6 are rounded by 2 % in float32, and the estimate is made of them.
    given = problem()
    given |= {name: given[name] * np.float32(1e-4) for name in ("w0", "b0")}
    return given | torch_run(
        given, lambda p: Prodigy(p, lr=1.0, weight_decay=0.1), lambda o, _: {"d": o.param_groups[0]["d"]}
    )


def adam_mini() -> dict[str, np.ndarray]:
    import pytorch_optimizer as po
    import torch

    given = problem((8, 8))
    model = torch.nn.Module()
    model.q_proj = torch.nn.Linear(8, 8, bias=False)
    model.norm = torch.nn.LayerNorm(5, bias=False)
    for name, p in zip("wb", model.parameters(), strict=True):
        p.data = torch.tensor(given[f"{name}0"])

    def make(p: Any) -> Any:
        model.q_proj.weight, model.norm.weight = p
        return po.AdamMini(model, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, num_embeds=8, num_heads=2)

    return given | torch_run(given, make)


def eight_bit() -> dict[str, np.ndarray]:
    """Of a matrix large enough for 8 bits: weights, codes and scales after the first and the fourth step."""
    import bitsandbytes as bnb
    from bitsandbytes.backends.cpu import ops
    from bitsandbytes.functional import create_dynamic_map

    # The CPU kernel for float32 finds codes by a coarse grid (4e-8 of the scale becomes 1.6e-5). For other dtypes
    # bitsandbytes searches the nearest, as on a GPU; so have it do that.
    exact = ops._quant_blockwise_fp32_direct
    ops._quant_blockwise_fp32_direct = lambda x, *rest: exact(x.double(), *rest)

    given = problem((8, 512))
    # No second moment so small that it is stored as zero, which ours never does; and float16 to store half as much.
    gradient = np.where(given["gw"] < 0, -1, 1) * np.maximum(np.abs(given["gw"]), 0.005)
    given["gw"] = gradient.astype("float16").astype("float32")

    def read(optimizer: Any, params: Any) -> dict[str, np.ndarray]:
        state = optimizer.state[params["w"]]
        names = {"mu": "state1", "nu": "state2", "mu_scale": "absmax1", "nu_scale": "absmax2"}
        return {name: state[key].numpy().copy() for name, key in names.items()}

    ran = torch_run(given, lambda p: bnb.optim.AdamW8bit(p, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1), read)
    maps = {"signed": create_dynamic_map(signed=True).numpy(), "unsigned": create_dynamic_map(signed=False).numpy()}
    kept = {name: rows[[0, 3]] for name, rows in ran.items() if name != "b"}
    return {"w0": given["w0"], "gw": given["gw"][:4].astype("float16")} | kept | maps


ALL = [lion, ademamix, schedule_free, mars, prodigy, adam_mini, eight_bit]


def main() -> None:
    wanted = sys.argv[1:]
    for name in ("torch", "pytorch_optimizer", "schedulefree", "prodigyopt", "bitsandbytes"):
        print(name, importlib.metadata.version(name))
    for make in ALL:
        if wanted and make.__name__ not in wanted:
            continue
        path = FOLDER / f"{make.__name__}.npz"
        np.savez_compressed(path, allow_pickle=False, **make())
        print(path.name, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
