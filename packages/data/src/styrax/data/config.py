"""The data section of a run: which text, which tokenizer, which rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from styrax.core.config import Fraction, NonNegative, Positive
from styrax.core.errors import UserError
from styrax.data.spec import bpe_size

if TYPE_CHECKING:
    from styrax.data.build import Progress
    from styrax.data.dataset import LMData
    from styrax.data.tokenizer import StoreTokenizer


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    """Batches of text: from sources, tokenized at first use and cached, or from a store built before.

    Attributes:
        sources: Text files, folders, globs such as `corpus/**/*.txt`, or `python:stdlib`, the running
            Python's own library; one document per file.
        store: Folder of an existing token store, instead of sources.
        tokenizer: `byte`, `bpe:N` (trained on a sample of the sources) or the path of a byte-level
            `tokenizer.json`; a store brings its own.
        max_bytes: Take a fixed subset of the files, of at most this size.
        split_on: Cut each file into documents after every such text, for example two line ends.
        errors: What to do with files that are not UTF-8: `raise`, `replace` the bytes, or `skip` the file.
        seq_len: Tokens per row.
        batch_size: Rows per step, over all processes.
        pack: `concat`: documents follow one another in rows; `none`: one document, or a piece, per row.
        held_out: Share of documents that is never trained on, chosen by a hash of the id.
        max_held_out_batches: Evaluate on at most so many batches; none for all.
        prefetch: Batches prepared ahead in a thread.
        kind: Which data this is.
    """

    kind: Literal["tokens"] = "tokens"
    sources: tuple[str, ...] = ()
    store: str | None = None
    tokenizer: str = "bpe:4096"
    max_bytes: Positive | None = None
    split_on: str | None = None
    errors: Literal["raise", "replace", "skip"] = "raise"
    seq_len: Positive = 256
    batch_size: Positive = 8
    pack: Literal["concat", "none"] = "concat"
    held_out: Fraction = 0.01
    max_held_out_batches: Positive | None = 16
    prefetch: NonNegative = 2

    def __post_init__(self) -> None:
        problems = []
        if self.sources and self.store is not None:
            problems.append("sources and store are both set; expected one: text to tokenize, or a store of tokens")
        if self.held_out >= 1:
            problems.append(f"held_out = {self.held_out} leaves nothing to train on; expected less than 1")
        if self.split_on == "":
            problems.append("split_on is empty; expected the text after which to cut, or none")
        try:
            bpe_size(self.tokenizer)
        except UserError as error:
            problems.append(str(error))
        if problems:
            raise ValueError("\n".join(problems))

    def build(self, *, seed: int, cache_dir: Path | None = None, progress: Progress | None = None) -> LMData:
        """Make the dataset, building its store at first use.

        Args:
            seed: Decides the order of documents and rows.
            cache_dir: Where stores are kept; `$STYRAX_CACHE`, `$XDG_CACHE_HOME/styrax` or `~/.cache/styrax`.
            progress: Called as `progress(label, done, total)` while the store is built, in bytes.

        Returns:
            The dataset.

        Raises:
            UserError: Neither sources nor a store, missing or malformed text, a damaged store, a full disk.
        """
        from styrax.data.cache import cached_store
        from styrax.data.dataset import LMData
        from styrax.data.store import TokenStore

        if self.store is not None:
            store = TokenStore(Path(self.store).expanduser())
        elif self.sources:
            store = cached_store(
                self.sources,
                tokenizer=self.tokenizer,
                errors=self.errors,
                split_on=self.split_on,
                max_bytes=self.max_bytes,
                cache_dir=cache_dir,
                progress=progress,
            )
        else:
            raise UserError(
                'data has neither sources nor a store; set sources = ["corpus/**/*.txt"] (files, folders, '
                'globs or "python:stdlib"), or store = the folder that `styrax data build` made'
            )
        return LMData(
            store,
            seed=seed,
            seq_len=self.seq_len,
            batch_size=self.batch_size,
            pack=self.pack,
            held_out=self.held_out,
            max_held_out_batches=self.max_held_out_batches,
            prefetch=self.prefetch,
        )

    def load_tokenizer(self, path: Path) -> StoreTokenizer:
        """Read the tokenizer that a run keeps beside its checkpoints.

        Raises:
            UserError: The file is missing or is not a tokenizer.
        """
        from styrax.data.tokenizer import load_tokenizer

        return load_tokenizer(path)
