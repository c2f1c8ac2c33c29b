"""Write packages/optim/tests/golden/soap.npz: what pytorch_optimizer's SOAP does to square matrices in thirteen steps.

    python tools/golden/optim_soap.py   # with numpy, torch and pytorch_optimizer 4.1 installed

Only square matrices of full rank: the null space of a rank-deficient statistic has no basis of its own. Written with
torch 2.13.0, pytorch_optimizer 4.1.0, numpy 2.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from pytorch_optimizer import SOAP  # pyright: ignore[reportMissingImports]

OUT = Path(__file__).parents[2] / "packages/optim/tests/golden/soap.npz"
STEPS, SIZE = 13, 6


def run(seed: int, **kwargs: object) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    start = rng.normal(size=(SIZE, SIZE)).astype(np.float32)
    grads = (rng.normal(size=(STEPS, SIZE, SIZE)) * np.linspace(0.5, 2, SIZE)).astype(np.float32)
    w = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = SOAP([w], lr=3e-3, precondition_frequency=4, **kwargs)
    seen = []
    for g in grads:
        w.grad = torch.from_numpy(g.copy())
        optimizer.step()
        seen.append(w.detach().numpy().copy())
    return start, grads, np.stack(seen)


def main() -> None:
    arrays = {}
    cases = {"plain": {"weight_decay": 0.0}, "decayed": {"betas": (0.9, 0.95), "shampoo_beta": 0.8}}
    for seed, (name, kwargs) in enumerate(cases.items()):
        arrays[f"{name}_0"], arrays[f"{name}_grads"], arrays[f"{name}_w"] = run(seed, **kwargs)
    np.savez_compressed(OUT, **arrays)
    versions = f"torch {torch.__version__}, pytorch_optimizer {importlib.metadata.version('pytorch_optimizer')}"
    print(f"{OUT.name}: {versions}, numpy {np.__version__}, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
