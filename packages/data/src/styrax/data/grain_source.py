"""The one place that meets Grain: a dataset as a `grain.MapDataset` of steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import grain
    import numpy as np

    from styrax.data.dataset import LMData

ENDLESS = 1 << 40


class Steps:
    """Whole batches by step: a random-access source for Grain.

    Args:
        data: What makes the batches.
        steps: How many there are.
    """

    def __init__(self, data: LMData, steps: int):
        self._data, self._steps = data, steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self._data.batch(int(index))

    def __repr__(self) -> str:
        return f"Steps({self._data.fingerprint}, {self._steps})"


def to_grain(data: LMData, *, steps: int | None = None) -> grain.MapDataset[dict[str, Any]]:
    """Give the batches to Grain: element i is `data.batch(i)`.

    Everything of Grain works on it (`map`, `random_map`, iterators, their checkpoint state). A batch is one
    cheap call, so Grain's default of 16 threads and 500 elements ahead costs more than it saves. Read with

        to_grain(data).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))

    and do not shuffle, since the steps are in random order already. `mp_prefetch` needs parsed absl flags in
    Grain 0.2.18: call `absl.flags.FLAGS.mark_as_parsed()` first in a program without `absl.app`.

    Args:
        data: What makes the batches.
        steps: How many elements; endless for practical purposes by default.

    Returns:
        A `grain.MapDataset`.
    """
    import grain

    return grain.MapDataset.source(Steps(data, ENDLESS if steps is None else steps))
