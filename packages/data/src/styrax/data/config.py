"""The data section of a run: which text, which tokenizer, which rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from styrax.core.config import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, check
from styrax.core.errors import UserError
from styrax.data.spec import bpe_size

if TYPE_CHECKING:
    from styrax.data.build import Progress
    from styrax.data.dataset import LMData
    from styrax.data.held_out import HeldOut
    from styrax.data.plan.mixture import Mixture
    from styrax.data.sharded import Spec
    from styrax.data.store import TokenStore
    from styrax.data.tokenizer import StoreTokenizer


Points = tuple[tuple[NonNegative, Positive], ...]
Pack = Literal["concat", "best_fit", "none"]
Errors = Literal["raise", "replace", "skip"]


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    """Batches of text: from sources, tokenized at first use and cached, or from a store built before.

    Attributes:
        sources: Text files, folders, globs such as `corpus/**/*.txt`, or `python:stdlib`, the running
            Python's own library; one document per file.
        store: Folder or URL (`s3://bucket/name`) of an existing token store, instead of sources.
        tokenizer: `byte`, `bpe:N` (trained on a sample of the sources) or the path of a byte-level
            `tokenizer.json`; a store brings its own.
        max_bytes: Take a fixed subset of the files, of at most this size.
        split_on: Cut each file into documents after every such text, for example two line ends.
        errors: What to do with files that are not UTF-8: `raise`, `replace` the bytes, or `skip` the file.
        seq_len: Tokens per row; or pairs `[step, tokens]`, the first at step 0, for a schedule.
        batch_size: Rows per step, over all processes; or pairs `[step, rows]`, likewise.
        pack: `concat`: documents follow one another in rows; `best_fit`: whole documents with the least padding;
            `none`: one document, or a piece, per row.
        held_out: Share of documents that is never trained on, chosen by a hash of the id. 1, all of them, is for sets
            that are only evaluated on.
        max_held_out_batches: Evaluate on at most so many batches; none for all.
        skip_steps: Ranges `[first, last + 1]` of steps whose data are left out, what follows moving up.
        allow_changes: Settings of the data that may differ when a run is resumed, such as `skip_steps`.
        prefetch: Batches prepared ahead in a thread.
        kind: Which data this is.
    """

    kind: Literal["tokens"] = "tokens"
    sources: tuple[str, ...] = ()
    store: str | None = None
    tokenizer: str = "bpe:4096"
    max_bytes: Positive | None = None
    split_on: str | None = None
    errors: Errors = "raise"
    seq_len: Positive | Points = 256
    batch_size: Positive | Points = 8
    pack: Pack = "concat"
    held_out: Fraction = 0.01
    max_held_out_batches: Positive | None = 16
    skip_steps: tuple[tuple[int, int], ...] = ()
    allow_changes: tuple[str, ...] = ()
    prefetch: NonNegative = 2

    def __post_init__(self) -> None:
        check(self)
        problems = []
        if self.sources and self.store is not None:
            problems.append("sources and store are both set; expected one: text to tokenize, or a store of tokens")
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
        return _rows(self, self._store(self.tokenizer, "data", cache_dir, progress), seed)

    def evaluation(
        self, tokenizer: StoreTokenizer, *, cache_dir: Path | None = None, progress: Progress | None = None
    ) -> HeldOut:
        """Give batches to evaluate a model on: of the share `held_out` of these documents, which may be all.

        Args:
            tokenizer: The model's, with which text is read in place of the one that is named here.
            cache_dir: See `build`.
            progress: See `build`.

        Raises:
            UserError: As `build` does, and a store of other tokens.
        """
        store = self._store(tokenizer, "the set", cache_dir, progress)
        return _held_out(self, store, [store], tokenizer)

    def _store(
        self, tokenizer: str | StoreTokenizer, what: str, cache_dir: Path | None, progress: Progress | None
    ) -> TokenStore:
        if self.store is None and not self.sources:
            raise UserError(
                f'{what} has neither sources nor a store; set sources = ["corpus/**/*.txt"] (files, folders, '
                'globs or "python:stdlib"), or store = the folder that `styrax data build` made'
            )
        return _open(self, tokenizer, cache_dir, progress)

    def shapes(self) -> tuple[int | None, list[Spec]]:
        """Tell how many ids there are and what batches look like, reading no text and building nothing.

        Returns:
            The size of the vocabulary (for `bpe:N` it is N, which a small text may not fill; `None` if only the store
            at a URL knows), and the specs that the data would announce.

        Raises:
            UserError: The tokenizer or the store is missing.

        Example:
            >>> vocab_size, specs = TokensConfig(tokenizer="bpe:512", seq_len=64, batch_size=4).shapes()
            >>> vocab_size, specs[0]["tokens"]
            (512, ((4, 64), dtype('int32')))
        """
        return _vocab_size(self, self.tokenizer), _specs(self.seq_len, self.batch_size)

    def load_tokenizer(self, path: Path) -> StoreTokenizer:
        """Read the tokenizer that a run keeps beside its checkpoints.

        Raises:
            UserError: The file is missing or is not a tokenizer.
        """
        from styrax.data.tokenizer import load_tokenizer

        return load_tokenizer(path)


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of a mixture: text, or a store built before.

    Attributes:
        sources: Text files, folders, globs, or `python:stdlib`; tokenized at first use and cached.
        store: Folder or URL (`s3://bucket/name`) of an existing token store, instead of sources.
        max_bytes: Take a fixed subset of the files, of at most this size.
        split_on: Cut each file into documents after every such text.
        errors: What to do with files that are not UTF-8: `raise`, `replace` the bytes, or `skip` the file.
        max_epochs: How often it may be read at most; then the others get its share.
    """

    sources: tuple[str, ...] = ()
    store: str | None = None
    max_bytes: Positive | None = None
    split_on: str | None = None
    errors: Errors = "raise"
    max_epochs: PositiveFloat | None = None

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Batches of several sources, mixed by weights that may change with the step.

    Attributes:
        sources: Table of sources by name.
        weights: Share of the rows of each source, by name, equal by default; or pairs `[step, weights]`, the first at
            step 0.
        interpolate: `hold` the weights of a pair until the next, or go there in a `linear` ramp.
        tokenizer: `byte` or the path of a byte-level `tokenizer.json`, for sources of text; stores bring their own, and
            all must have the same.
        seq_len: Tokens per row; or pairs `[step, tokens]`, the first at step 0, for a schedule.
        batch_size: Rows per step, over all processes; or pairs `[step, rows]`, likewise.
        pack: `concat`: documents follow one another in rows; `best_fit`: whole documents with the least padding;
            `none`: one document, or a piece, per row.
        held_out: Share of each source's documents that is never trained on, chosen by a hash of the id. 1, all of
            them, is for sets that are only evaluated on.
        max_held_out_batches: Evaluate on at most so many batches; none for all.
        skip_steps: Ranges `[first, last + 1]` of steps whose data are left out, what follows moving up.
        allow_changes: Settings of the data that may differ when a run is resumed, such as `mixture`.
        prefetch: Batches prepared ahead in a thread.
        kind: Which data this is.
    """

    kind: Literal["mixture"] = "mixture"
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    weights: dict[str, NonNegativeFloat] | tuple[tuple[NonNegative, dict[str, NonNegativeFloat]], ...] = ()
    interpolate: Literal["hold", "linear"] = "hold"
    tokenizer: str = "byte"
    seq_len: Positive | Points = 256
    batch_size: Positive | Points = 8
    pack: Pack = "concat"
    held_out: Fraction = 0.01
    max_held_out_batches: Positive | None = 16
    skip_steps: tuple[tuple[int, int], ...] = ()
    allow_changes: tuple[str, ...] = ()
    prefetch: NonNegative = 2

    def __post_init__(self) -> None:
        check(self)
        problems = []
        for name, source in self.sources.items():
            if bool(source.sources) == (source.store is not None):
                problems.append(f"sources.{name}: expected one of sources (text) and store (a folder of tokens)")
        try:
            trained = bpe_size(self.tokenizer) is not None
        except UserError as error:
            problems.append(str(error))
        else:
            if trained:
                problems.append(
                    f"tokenizer = {self.tokenizer!r} would be another one for each source; expected 'byte' or a "
                    "tokenizer.json, such as that of a store of all text (`styrax data build`)"
                )
        if problems:
            raise ValueError("\n".join(problems))

    def build(self, *, seed: int, cache_dir: Path | None = None, progress: Progress | None = None) -> LMData:
        """Make the dataset, building the stores of text sources at first use; see `TokensConfig.build`."""
        return _rows(self, self._mixture(self.tokenizer, "data", cache_dir, progress), seed)

    def evaluation(
        self, tokenizer: StoreTokenizer, *, cache_dir: Path | None = None, progress: Progress | None = None
    ) -> HeldOut:
        """Give batches to evaluate a model on; see `TokensConfig.evaluation`. Weights have no part in it."""
        mixture = self._mixture(tokenizer, "the set", cache_dir, progress)
        return _held_out(self, mixture, mixture.stores, tokenizer)

    def _mixture(
        self, tokenizer: str | StoreTokenizer, what: str, cache_dir: Path | None, progress: Progress | None
    ) -> Mixture:
        from styrax.data.plan.mixture import Mixture

        if not self.sources:
            raise UserError(
                f"{what} has no sources; name each, as [data.sources.web] with sources = [...] or store = ..."
            )
        stores = {name: _open(source, tokenizer, cache_dir, progress) for name, source in self.sources.items()}
        limits = {name: source.max_epochs for name, source in self.sources.items() if source.max_epochs is not None}
        return Mixture(stores, self.weights or None, interpolate=self.interpolate, max_epochs=limits or None)

    def shapes(self) -> tuple[int | None, list[Spec]]:
        """Tell how many ids there are and what batches look like; see `TokensConfig.shapes`."""
        known = (_vocab_size(source, self.tokenizer) for source in self.sources.values())
        return next((size for size in known if size is not None), None), _specs(self.seq_len, self.batch_size)

    def load_tokenizer(self, path: Path) -> StoreTokenizer:
        """Read the tokenizer that a run keeps beside its checkpoints."""
        from styrax.data.tokenizer import load_tokenizer

        return load_tokenizer(path)


def _open(
    source: TokensConfig | SourceConfig,
    tokenizer: str | StoreTokenizer,
    cache_dir: Path | None,
    progress: Progress | None,
) -> TokenStore:
    """Open the store that a configuration names, or that of its text, building it at first use."""
    from styrax.data.cache import cached_store
    from styrax.data.store.remote import open_store

    if source.store is not None:
        return open_store(source.store, cache_dir=cache_dir)
    return cached_store(
        source.sources,
        tokenizer=tokenizer,
        errors=source.errors,
        split_on=source.split_on,
        max_bytes=source.max_bytes,
        cache_dir=cache_dir,
        progress=progress,
    )


def _vocab_size(source: TokensConfig | SourceConfig, tokenizer: str) -> int | None:
    """Find the size of the vocabulary without reading text."""
    from styrax.data.store.files import is_url

    if source.store is not None:
        if is_url(source.store):
            return None
        from styrax.data.store import TokenStore

        return TokenStore(source.store).meta["tokenizer"]["vocab_size"]
    if (size := bpe_size(tokenizer)) is not None:
        return size
    from styrax.data.tokenizer import ByteTokenizer, load_tokenizer

    return ByteTokenizer.vocab_size if tokenizer == "byte" else load_tokenizer(Path(tokenizer)).vocab_size


def _specs(seq_len: int | Points, batch_size: int | Points) -> list[Spec]:
    """Give the spec of each phase of the schedules, each once, in order."""
    from styrax.data.dataset import DTYPES
    from styrax.data.plan.timeline import parse_points

    problems: list[str] = []
    widths, sizes = parse_points("seq_len", seq_len, problems), parse_points("batch_size", batch_size, problems)
    if problems:
        raise UserError("\n".join(problems))
    steps = sorted({step for step, _ in (*widths, *sizes)})

    def at(points: list[tuple[int, int]], step: int) -> int:
        return next(number for begin, number in reversed(points) if begin <= step)

    shapes = dict.fromkeys((at(sizes, step), at(widths, step)) for step in steps)
    return [{name: (shape, dtype) for name, dtype in DTYPES.items()} for shape in shapes]


def _held_out(
    config: TokensConfig | MixtureConfig, store: TokenStore | Mixture, stores: Sequence[Any], tokenizer: StoreTokenizer
) -> HeldOut:
    """Lay what a configuration holds out into rows, all of it if there is nothing else."""
    from styrax.data.held_out import HeldOut

    if problems := [
        f"the store {each.path} was made with another tokenizer than the run's: it has {each.tokenizer.vocab_size} ids "
        f"and the fingerprint {each.tokenizer.fingerprint}, expected {tokenizer.vocab_size} and {tokenizer.fingerprint}"
        for each in stores
        if each.tokenizer.fingerprint != tokenizer.fingerprint
    ]:
        raise UserError("\n".join(problems))
    whole = config.held_out == 1
    return HeldOut(_rows(replace(config, held_out=0.0) if whole else config, store, seed=0), whole=whole)


def _rows(config: TokensConfig | MixtureConfig, store: TokenStore | Mixture, seed: int) -> LMData:
    """Lay what a configuration names into rows, as it says."""
    from styrax.data.dataset import LMData

    return LMData(
        store,
        seed=seed,
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        pack=config.pack,
        held_out=config.held_out,
        max_held_out_batches=config.max_held_out_batches,
        skip_steps=config.skip_steps,
        allow=config.allow_changes,
        prefetch=config.prefetch,
    )
