"""The contracts between libraries. They are structural: an implementer need not import this module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int32

    from styrax.core.precision import Policy


@runtime_checkable
class DataIterator(Protocol):
    """An endless or finite iterator of batches whose position can be saved; Grain's iterators are such."""

    def __iter__(self) -> Iterator[Any]:
        """Give itself."""
        ...

    def __next__(self) -> Any:
        """Give the next batch."""
        ...

    def get_state(self) -> Any:
        """Describe the position: small JSON, enough for a fresh iterator of the same data to go on."""
        ...

    def set_state(self, state: Any) -> None:
        """Go to a position that `get_state` gave, here or in another process."""
        ...


@runtime_checkable
class Optimizer(Protocol):
    """A pair of pure functions; every `optax.GradientTransformation` is such."""

    def init(self, params: Any) -> Any:
        """Make the state for these parameters."""
        ...

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Turn gradients into updates to add to the parameters; give them with the next state."""
        ...


@runtime_checkable
class Checkpointer(Protocol):
    """Saves named items of a step and restores any of them."""

    def save(self, step: int, items: Mapping[str, Any]) -> Any:
        """Save; when it returns, the arrays may be donated or changed, and writing may go on behind."""
        ...

    def restore(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        """Restore the named items, as the abstract trees in `like` say, or as they were saved for `None`."""
        ...

    def steps(self) -> list[int]:
        """List the complete steps on disk, in order."""
        ...

    def wait(self) -> None:
        """Return when nothing is being written; raise what went wrong behind."""
        ...

    def close(self) -> None:
        """Wait, then free everything."""
        ...


@runtime_checkable
class Tracker(Protocol):
    """Takes the metrics of a run."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record one step's metrics."""
        ...

    def close(self) -> None:
        """Write out what is left and free everything."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        vocab_size: Ids are in `[0, vocab_size)`.
        eos_id: Ends a document.
        bos_id: Begins a document, or `None`.
        pad_id: Fills a row; never counted in a loss.
    """

    vocab_size: int
    eos_id: int
    bos_id: int | None
    pad_id: int

    def encode(self, text: str) -> list[int]:
        """Turn text into ids, with no special ids added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids into text; special ids give nothing."""
        ...

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Turn ids into pieces of text as they come, never splitting a character."""
        ...

    def save(self, path: Path) -> None:
        """Write everything that the tokenizer is."""
        ...


class Dataset(Protocol):
    """Batches as a pure function of the data, the seed and the step.

    A batch is a dict: `tokens`, `targets` (int32), `loss_mask` (float32), `segment_ids`, `positions` (int32),
    each `[batch, seq]`. The mask is 0 on padding and where a target would cross into another document
    without an end mark; segments count from 1, 0 is padding; positions restart at 0 in each segment.

    Attributes:
        vocab_size: Ids are in `[0, vocab_size)`.
        fingerprint: Changes when the batches would.
        tokenizer: What made the ids.
        token_bytes: For each id, how many UTF-8 bytes it stands for; special ids 0.
    """

    vocab_size: int
    fingerprint: str
    tokenizer: Tokenizer
    token_bytes: Int32[np.ndarray, " vocab"]

    def batch(self, step: int, rows: slice | None = None) -> dict[str, np.ndarray]:
        """Give one step's batch, or some rows of it."""
        ...

    def loader(self, *, step: int = 0, sharding: Any = None, prefetch: int = 2) -> DataIterator:
        """Iterate over batches from a step, as numpy arrays or as global arrays with a sharding."""
        ...

    def held_out(self) -> Sequence[dict[str, np.ndarray]]:
        """Give the batches that are never trained on."""
        ...

    def held_out_text(self) -> bytes:
        """Give the exact text behind the held-out batches."""
        ...


class ModelConfig(Protocol):
    """What an entry point in `styrax.models` is: a frozen dataclass with these methods."""

    def build(self, *, vocab_size: int, rngs: Any, policy: Policy) -> Any:
        """Make an `nnx.Module`; must work under `jax.jit` and `jax.eval_shape`."""
        ...

    def logical_axes(self) -> Mapping[str, tuple[str | None, ...]]:
        """Name the axes of every parameter, by path pattern."""
        ...


class DataConfig(Protocol):
    """What an entry point in `styrax.data` is: a frozen dataclass with this method."""

    def build(self, *, seed: int, cache_dir: Path | None = None, progress: Any = None) -> Dataset:
        """Make the dataset, preparing its store at first use and calling `progress(label, done, total)`."""
        ...


class OptimConfig(Protocol):
    """What an entry point in `styrax.optim` is: a frozen dataclass with these methods."""

    def build(self, params: Any, *, steps: int) -> Optimizer:
        """Make the optimizer for parameters (arrays or abstract) and a run's length."""
        ...

    def metrics(self, opt_state: Any) -> dict[str, Any]:
        """Read float32 scalars out of a state; the keys never change."""
        ...


class CheckpointConfig(Protocol):
    """What an entry point in `styrax.checkpoint` is: a frozen dataclass with this method."""

    def build(self, directory: Path) -> Checkpointer:
        """Open a folder for saving and restoring."""
        ...
