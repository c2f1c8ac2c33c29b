"""Random tokens in place of text, to measure and to plan a run before its data are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from styrax.core.config import NonNegative, Positive, check
from styrax.core.errors import UserError
from styrax.data.settings import changed

if TYPE_CHECKING:
    import numpy as np

    from styrax.data.build import Progress
    from styrax.data.loader import Loader
    from styrax.data.sharded import Spec

CONTRACT = 1


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Batches of random tokens: of the shapes of real ones, without text, tokenizer or held-out documents.

    Attributes:
        vocab_size: Ids are drawn from `[0, vocab_size)`, each as likely as the others.
        seq_len: Tokens per row.
        batch_size: Rows per step, over all processes.
        document_len: Tokens per document; rows are filled with documents of this length. None means one per row.
        prefetch: Batches prepared ahead in a thread.
        kind: Which data this is.
    """

    kind: Literal["synthetic"] = "synthetic"
    vocab_size: Positive = 32000
    seq_len: Positive = 256
    batch_size: Positive = 8
    document_len: Positive | None = None
    prefetch: NonNegative = 2

    def __post_init__(self) -> None:
        check(self)

    def build(self, *, seed: int, cache_dir: Path | None = None, progress: Progress | None = None) -> SyntheticData:
        """Make the dataset; nothing is read or kept.

        Args:
            seed: Decides the tokens.
            cache_dir: Not used.
            progress: Not used.
        """
        return SyntheticData(self, seed=seed)

    def load_tokenizer(self, path: Path) -> Any:
        """Refuse: these ids stand for no text.

        Raises:
            UserError: Always.
        """
        raise UserError("the run was trained on random tokens (data.kind=synthetic): its ids stand for no text")

    def shapes(self) -> tuple[int | None, list[Spec]]:
        """Tell how many ids there are and what batches look like; see `TokensConfig.shapes`."""
        return self.vocab_size, SyntheticData(self, seed=0).specs


class SyntheticData:
    """Rows of random tokens; `batch(step)` depends on the settings, the seed and the step alone.

    They have the arrays of `styrax.data.LMData`. The best that a model can learn of them is that all ids are equally
    likely: a loss of `log(vocab_size)`.

    Args:
        config: Sizes.
        seed: Decides the tokens.

    Example:
        >>> data = SyntheticConfig(vocab_size=10, seq_len=6, batch_size=2, document_len=4).build(seed=0)
        >>> batch = data.batch(0)
        >>> batch["positions"][0].tolist(), batch["segment_ids"][0].tolist()
        ([0, 1, 2, 3, 0, 1], [1, 1, 1, 1, 2, 2])
        >>> bool((batch["tokens"][:, 1:4] == batch["targets"][:, :3]).all())
        True
    """

    #: There is none: ids stand for no text.
    tokenizer = None
    #: Nor have they bytes.
    token_bytes = None
    #: They never end.
    num_steps: int | None = None
    num_tokens: int | None = None

    def __init__(self, config: SyntheticConfig, *, seed: int = 0):
        self.config, self.seed = config, int(seed)
        self.vocab_size, self.prefetch = config.vocab_size, config.prefetch
        self.batch_size, self.seq_len = config.batch_size, config.seq_len

    def __repr__(self) -> str:
        return f"SyntheticData({self.settings})"

    @property
    def settings(self) -> dict[str, Any]:
        """What the batches depend on, in JSON."""
        config = self.config
        return {
            "contract": CONTRACT,
            "kind": config.kind,
            "vocab_size": config.vocab_size,
            "seq_len": config.seq_len,
            "batch_size": config.batch_size,
            "document_len": config.document_len,
            "seed": self.seed,
        }

    @property
    def fingerprint(self) -> str:
        """A hash of the settings."""
        from styrax.data.hashing import fingerprint

        return fingerprint(self.settings)

    def spec(self, step: int) -> Spec:
        """Give the shape and dtype of each array of a step's batch, which all steps share."""
        from styrax.data.dataset import DTYPES

        return {name: ((self.batch_size, self.seq_len), dtype) for name, dtype in DTYPES.items()}

    @property
    def specs(self) -> list[Spec]:
        """The one spec."""
        return [self.spec(0)]

    def batch(self, step: int, rows: slice | None = None) -> dict[str, np.ndarray]:
        """Make one step's batch, or some rows of it, and only those.

        Args:
            step: From 0, without end.
            rows: Which rows; all by default.

        Returns:
            int32 `tokens`, `targets`, `segment_ids`, `positions` and float32 `loss_mask`, `[rows, seq_len]`.

        Raises:
            UserError: A negative step.
        """
        import numpy as np

        from styrax.data.hashing import hash64

        if step < 0:
            raise UserError(f"step {step}: expected 0 or more")
        wanted = range(self.batch_size)[rows if rows is not None else slice(None)]
        width, length = self.seq_len, self.config.document_len or self.seq_len
        targets = np.zeros((len(wanted), width), np.int32)
        for place, row in enumerate(wanted):
            key = hash64("synthetic", f"{self.seed} {step} {row}")
            draw = np.random.Generator(np.random.Philox(key=key))
            targets[place] = draw.integers(0, self.vocab_size, width, dtype=np.int32)
        column = np.arange(width, dtype=np.int32)
        tokens = np.zeros_like(targets)
        tokens[:, 1:] = targets[:, :-1]
        tokens[:, column % length == 0] = 0  # a document begins with the same id, and its first token is a target
        everywhere = targets.shape
        return {
            "tokens": tokens,
            "targets": targets,
            "loss_mask": np.ones(everywhere, np.float32),
            "segment_ids": np.broadcast_to(column // length + 1, everywhere).copy(),
            "positions": np.broadcast_to(column % length, everywhere).copy(),
        }

    def held_out(self) -> tuple[()]:
        """There are no held-out batches: all are alike."""
        return ()

    def loader(self, *, step: int = 0, sharding: Any = None, prefetch: int | None = None) -> Loader:
        """Iterate over batches from a step on; see `LMData.loader`."""
        from styrax.data.loader import Loader

        return Loader(self, step=step, sharding=sharding, prefetch=self.prefetch if prefetch is None else prefetch)

    def differences(self, saved: Mapping[str, Any], step: int, allow: Sequence[str] = ()) -> list[str]:
        """Say what keeps these data from going on where others with the settings `saved` stopped."""
        return changed(self.settings, saved, allow)
