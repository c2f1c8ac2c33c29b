"""A token store: a folder that is written once, opened by mmap and checked before it is trusted.

meta.json          what the folder must hold: counts, sizes, sha256 of each file, tokenizer, build arguments
tokenizer.json     the tokenizer
tokens-00000.bin   every document's ids with the end token after each, uint16 or uint32, little endian
docs-00000.npy     one record per document: start and tokens (in the .bin), bytes (UTF-8), id_hash
ids-00000.jsonl    one JSON string per document: its id
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.core.errors import UserError
from styrax.data.hashing import fingerprint
from styrax.data.tokenizer import StoreTokenizer, parse_tokenizer

if TYPE_CHECKING:
    from jaxtyping import Integer

FORMAT = "styrax-token-store"
VERSION = 1
META, TOKENIZER = "meta.json", "tokenizer.json"
TOKENS, DOCS, IDS = "tokens-00000.bin", "docs-00000.npy", "ids-00000.jsonl"
RECORD = np.dtype([("start", "<i8"), ("tokens", "<i8"), ("bytes", "<i8"), ("id_hash", "<u8")])


class TokenStore:
    """A store on disk, read only.

    Opening reads `meta.json` and the document records, and compares every file's size: microseconds, whatever
    the size of the corpus. `verify` reads everything.

    Args:
        path: The folder.

    Raises:
        UserError: There is no store, it is cut short or changed, or a newer version wrote it; the message
            names the file, what was expected and found, and the command that builds it anew.

    Example:
        >>> import tempfile
        >>> from styrax.data import ByteTokenizer, write_store
        >>> store = write_store(f"{tempfile.mkdtemp()}/s", {"a": "Hi", "b": "there"}, ByteTokenizer())
        >>> len(store), store.num_tokens, store[1].tolist()
        (2, 9, [116, 104, 101, 114, 101, 256])
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.meta = _read_meta(self.path)
        self._check_files()
        self.docs: np.ndarray = np.load(self.path / DOCS, allow_pickle=False)
        self._check_docs()
        dtype = np.dtype(self.meta["dtype"])
        mapped = np.memmap(self.path / TOKENS, dtype=dtype, mode="r")
        self.tokens: Integer[np.ndarray, " tokens"] = mapped.view(np.ndarray)
        # Taken hold of now, so that an open store stays whole while its folder is replaced.
        self._ids = np.memmap(self.path / IDS, dtype=np.uint8, mode="r")
        self._tokenizer = (self.path / TOKENIZER).read_bytes()

    def __reduce__(self):
        return TokenStore, (self.path,)

    def __repr__(self) -> str:
        return f"TokenStore({str(self.path)!r}: {len(self)} documents, {self.num_tokens} tokens)"

    def __len__(self) -> int:
        return self.meta["num_documents"]

    def __getitem__(self, index: int) -> Integer[np.ndarray, " tokens"]:
        """Give one document's ids, the end token last; a view of the file."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of a store with {len(self)} documents")
        record = self.docs[index]
        return self.tokens[record["start"] : record["start"] + record["tokens"]]

    @property
    def num_tokens(self) -> int:
        """How many ids are stored, one end token per document among them."""
        return self.meta["num_tokens"]

    @property
    def num_bytes(self) -> int:
        """How many bytes of UTF-8 the documents have."""
        return self.meta["num_bytes"]

    @property
    def fingerprint(self) -> str:
        """What the store holds, whatever folder or machine it is on."""
        return self.meta["fingerprint"]

    @cached_property
    def tokenizer(self) -> StoreTokenizer:
        """The tokenizer that made the ids.

        Raises:
            UserError: `tokenizer.json` is not the one that the ids were made with.
        """
        tokenizer = parse_tokenizer(self._tokenizer.decode(errors="replace"), str(self.path / TOKENIZER))
        expected = self.meta["tokenizer"]["fingerprint"]
        if tokenizer.fingerprint != expected:
            raise UserError(
                f"{self.path / TOKENIZER}: expected tokenizer {expected}, got {tokenizer.fingerprint}; "
                f"{_rebuild(self.path, self.meta)}"
            )
        return tokenizer

    @cached_property
    def ids(self) -> list[str]:
        """The documents' ids, in order.

        Raises:
            UserError: `ids-00000.jsonl` is damaged.
        """
        try:
            ids = [json.loads(line) for line in self._ids.tobytes().splitlines()]
        except ValueError:
            ids = []
        if len(ids) != len(self):
            problem = f"{self.path / IDS}: expected {len(self)} lines of JSON, one id each"
            raise UserError(f"{problem}; {_rebuild(self.path, self.meta)}")
        return ids

    def text(self, index: int) -> str:
        """Decode one document: exactly the text that was stored."""
        return self.tokenizer.decode(self[index])

    def verify(self) -> None:
        """Read every byte and compare with the checksums in `meta.json`.

        Raises:
            UserError: Names every file that differs.
        """
        problems = []
        for name, entry in self.meta["files"].items():
            with (self.path / name).open("rb") as handle:
                got = hashlib.file_digest(handle, "sha256").hexdigest()
            if got != entry["sha256"]:
                problems.append(f"{self.path / name}: expected sha256 {entry['sha256']}, got {got}")
        if problems:
            raise UserError(
                "the token store is damaged:\n"
                + "\n".join(f"  - {problem}" for problem in problems)
                + f"\n{_rebuild(self.path, self.meta)}"
            )

    def _check_files(self) -> None:
        problems = []
        for name, entry in self.meta["files"].items():
            file = self.path / name
            got = file.stat().st_size if file.is_file() else None
            if got != entry["bytes"]:
                found = "no such file" if got is None else f"{got}"
                problems.append(f"{file}: expected {entry['bytes']} bytes, got {found}")
        expected = self.num_tokens * np.dtype(self.meta["dtype"]).itemsize
        if self.meta["files"][TOKENS]["bytes"] != expected:
            problems.append(f"{self.path / META}: {self.num_tokens} tokens need {expected} bytes of {TOKENS}")
        _raise(problems, self.path, self.meta)

    def _check_docs(self) -> None:
        docs, problems = self.docs, []
        if docs.dtype != RECORD or docs.shape != (len(self),):
            problems.append(f"{self.path / DOCS}: expected {len(self)} records, got {docs.shape} of type {docs.dtype}")
        else:
            ends = np.cumsum(docs["tokens"])
            whole = len(docs) > 0 and bool(
                ends[-1] == self.num_tokens
                and np.array_equal(docs["start"], ends - docs["tokens"])
                and (docs["tokens"] > 0).all()
            )
            if not whole:
                problems.append(f"{self.path / DOCS}: its records do not add up to {self.num_tokens} tokens")
        _raise(problems, self.path, self.meta)


def describe(content: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a store's meta: what it holds as one fingerprint, then a checksum of the meta itself."""
    meta = {"format": FORMAT, "version": VERSION, **content}
    holds = {name: entry["sha256"] for name, entry in content["files"].items() if name != TOKENIZER}
    about = {key: value for key, value in meta.items() if key not in {"build", "files"}}
    meta["fingerprint"] = fingerprint({**about, "files": holds})
    return {**meta, "checksum": fingerprint(meta)}


def is_store(path: Path) -> bool:
    """Tell whether a folder looks like a token store, of any version and in any state."""
    try:
        return json.loads((path / META).read_text(encoding="utf-8"))["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _read_meta(path: Path) -> dict[str, Any]:
    file = path / META
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        what = "has no meta.json" if path.is_dir() else "does not exist" if not path.exists() else "is a file"
        raise UserError(
            f"there is no token store at {path}: it {what}; build one: `styrax data build IN... --out {path}`"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{file} is damaged: expected JSON, got {error}; {_rebuild(path, {})}") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise UserError(f"{file}: expected the meta of a {FORMAT}, got something else; is it the right folder?")
    if meta.get("version") != VERSION:
        raise UserError(
            f"{file}: expected store version {VERSION}, got {meta.get('version')!r}; upgrade styrax-data, "
            f"or {_rebuild(path, meta)}"
        )
    got = fingerprint({key: value for key, value in meta.items() if key != "checksum"})
    if got != meta.get("checksum"):
        raise UserError(
            f"{file} is damaged: expected checksum {meta.get('checksum')}, got {got}; {_rebuild(path, meta)}"
        )
    return meta


def _raise(problems: list[str], path: Path, meta: Mapping[str, Any]) -> None:
    if problems:
        raise UserError(
            "the token store is incomplete or damaged:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
            + f"\n{_rebuild(path, meta)}"
        )


def _rebuild(path: Path, meta: Mapping[str, Any]) -> str:
    build = meta.get("build")
    build = build if isinstance(build, dict) else {}
    sources = build.get("sources") or []
    words = [shlex.quote(str(source)) for source in sources] or ["IN..."]
    for option in ("tokenizer", "errors", "split_on", "max_bytes"):
        if sources and build.get(option) is not None:
            words += [f"--{option.replace('_', '-')}", shlex.quote(str(build[option]))]
    return f"build it anew: `styrax data build {' '.join(words)} --out {shlex.quote(str(path))} --overwrite`"
