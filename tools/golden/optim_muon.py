"""Write packages/optim/tests/golden/muon.npz: what PyTorch's Muon does to two matrices in eight steps.

    python tools/golden/optim_muon.py   # with numpy and torch 2.9 or later installed

Weights and gradients are written as (inputs, outputs); PyTorch has them transposed. Written with torch 2.13.0, numpy 2.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

OUT = Path(__file__).parents[2] / "packages/optim/tests/golden/muon.npz"


def run(shape: tuple[int, int], adjust: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    start = rng.normal(size=shape).astype(np.float32) * 0.1
    grads = rng.normal(size=(8, *shape)).astype(np.float32)
    w = torch.nn.Parameter(torch.from_numpy(start.T.copy()))
    optimizer = torch.optim.Muon(
        [w], lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn=adjust, ns_steps=5
    )
    for g in grads:
        w.grad = torch.from_numpy(g.T.copy())
        optimizer.step()
    return start, grads, w.detach().numpy().T.copy()


def main() -> None:
    arrays = {}
    for seed, (name, shape, adjust) in enumerate(
        (("wide", (16, 32), "match_rms_adamw"), ("tall", (32, 16), "original"))
    ):
        arrays[f"{name}_0"], arrays[f"{name}_grads"], arrays[f"{name}_1"] = run(shape, adjust, seed)
    np.savez_compressed(OUT, **arrays)
    print(f"{OUT.name}: torch {torch.__version__}, numpy {np.__version__}, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
