"""The text that names a tokenizer: `byte`, `bpe:4096` or the path of a `tokenizer.json`."""

from pathlib import Path

from styrax.core.errors import UsageError, nearest

SMALLEST_VOCAB = 258


def bpe_size(spec: str) -> int | None:
    """Give the vocabulary size in `bpe:N`; `None` for `byte` and paths.

    Raises:
        UsageError: The text names no tokenizer.

    Example:
        >>> bpe_size("bpe:4096"), bpe_size("byte"), bpe_size("my/tokenizer.json")
        (4096, None, None)
    """
    kind, colon, size = spec.partition(":")
    if kind == "bpe" and colon and size.isdecimal() and int(size) >= SMALLEST_VOCAB:
        return int(size)
    if spec == "byte" or (kind != "bpe" and (Path(spec).suffix == ".json" or Path(spec).is_file())):
        return None
    raise UsageError(
        f"tokenizer {spec!r}: expected 'byte', 'bpe:N' with N of {SMALLEST_VOCAB} or more, or the path of a "
        f"tokenizer.json{nearest(spec, ['byte', 'bpe:4096'])}"
    )
