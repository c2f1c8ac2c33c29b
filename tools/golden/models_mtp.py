"""Write packages/models/tests/golden/mtp.npz: logits of modules for multi-token prediction, in float32.

    python tools/golden/models_mtp.py   # with numpy, styrax-models, torch and transformers installed

The layers and norms are those of transformers, and the values of the tensors follow from their names; see
`mtp_cases.reference` beside the tests. styrax only writes the folders that transformers reads. Written with
transformers 5.24.0, torch 2.13.0.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "packages/models/tests"))

from mtp_cases import GOLDEN, MODULES, reference  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Write all cases."""
    arrays = {}
    for name in MODULES:
        with tempfile.TemporaryDirectory() as folder:
            arrays |= {f"{name}/{number}": each for number, each in enumerate(reference(name, Path(folder)))}
    np.savez_compressed(GOLDEN, **arrays)
    print(GOLDEN, GOLDEN.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
