"""The tiny models of `golden/families.npz`, with values that follow from the names of their tensors."""

import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

GOLDEN = Path(__file__).parent / "golden" / "families.npz"
LENGTH = 40
POSITIONS = [0, 1, 5, 9, 17, 26, 33, 39]  # beyond every window, chunk and original length


class Case(NamedTuple):
    """A model as transformers writes it.

    Attributes:
        name: Of the case.
        table: config.json.
        shapes: Name of a tensor -> its shape, and its initial value if all of it is the same.
    """

    name: str
    table: dict[str, Any]
    shapes: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return self.table["vocab_size"]


def values(name: str, shape: list[int], initial: float | None) -> np.ndarray:
    """Draw a tensor: norms and biases near their initial values, others large enough that a wrong term shows."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    return (0.2 * noise if initial is None else initial + 0.1 * noise).astype(np.float32)


def tokens(vocab_size: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, vocab_size, (2, LENGTH))


def cases() -> dict[str, tuple[Case, np.ndarray]]:
    """Read all cases and what transformers made of them: logits `[2, positions, vocab]`."""
    with np.load(GOLDEN) as found:
        listed = json.loads(found["cases"].tobytes())
        return {name: (Case(name, *rest), found[name]) for name, rest in listed.items()}


def write(case: Case, folder: Path) -> Path:
    """Write the folder of a model."""
    from styrax.models.hf import write_tensors

    made = (
        (name, shape, "float32", lambda n=name, s=shape, i=at: values(n, s, i))
        for name, (shape, at) in case.shapes.items()
    )
    write_tensors(folder, made, files={"config.json": json.dumps(case.table).encode()})
    return folder


def changed(config: Any, path: str, value: Any) -> Any:
    """Replace a field of a config of configs, such as `arch.attn.window`."""
    name, _, rest = path.partition(".")
    return dataclasses.replace(config, **{name: changed(getattr(config, name), rest, value) if rest else value})
