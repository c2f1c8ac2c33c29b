"""Megatron-LM's token files, `NAME.bin` and `NAME.idx`, read as a token store.

NAME.idx   little endian: 9 bytes "MMIDIDX", u64 version 1, u8 code of the token type, u64 sequences, u64 entries of the
           document index; then i32 sizes of the sequences (tokens), i64 pointers to them (bytes in the .bin), i64
           document index: document d is the sequences from entry d up to entry d + 1
NAME.bin   the tokens

Source: Megatron-LM, `megatron/core/datasets/indexed_dataset.py`. datatrove and NeMo write the same.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from styrax.core.errors import UserError
from styrax.data.hashing import fingerprint, random_bits
from styrax.data.store.format import RECORD
from styrax.data.tokenizer import StoreTokenizer, load_tokenizer

if TYPE_CHECKING:
    from jaxtyping import Int32, Int64, Integer

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}

STRETCHES = 64
STRETCH_BYTES = 64 << 10
SAMPLED = 64
BLOCK = 1 << 22


class MegatronStore:
    """Megatron-LM's files as a store, read only; what takes a `TokenStore` to make batches of takes this too.

    Opening reads the index and checks that it fits the tokens' file and that each document's sequences follow one
    another. Documents without tokens are left out; the others keep their number in `ids`, `NAME#0`, `NAME#1`, ...

    The files hold no checksums, so `fingerprint` is one of the name, the numbers below, the whole index, the size of
    the tokens' file and 64 evenly spaced stretches of 64 KiB of it (all of it up to 4 MiB): a change elsewhere in
    the tokens is not seen.

    Args:
        prefix: The files' common path, without `.bin` and `.idx`.
        tokenizer: What made the ids, or its `tokenizer.json`; it knows the numbers below. Without it there is no text.
        vocab_size: Ids are in `[0, vocab_size)`.
        eos_id: Ends a document.
        bos_id: The first input of a document; `None`: `eos_id` is.
        pad_id: Fills a row; `None`: `eos_id` does.
        ended: The documents end in `eos_id` (`--append-eod`), of which a sample is checked.

    Attributes:
        path: `prefix`.
        meta: What the store is, like the `meta.json` of a token store.
        docs: One record per document, of type `styrax.data.store.RECORD`; `bytes` is 0, unknown.
        tokens: All ids, of the type in the index; a view of the file.
        mask: `None`: all tokens carry loss.

    Raises:
        UserError: Files that are missing, damaged or of another kind, numbers that are missing or do not fit; all
            in one message.

    Example:
        >>> import tempfile
        >>> prefix = f"{tempfile.mkdtemp()}/corpus"
        >>> index = HEADER.pack(MAGIC, 1, 8, 2, 3) + np.array([3, 2], "<i4").tobytes()
        >>> _ = Path(f"{prefix}.idx").write_bytes(index + np.array([0, 6, 0, 1, 2], "<i8").tobytes())
        >>> _ = Path(f"{prefix}.bin").write_bytes(np.array([5, 6, 0, 7, 0], "<u2").tobytes())
        >>> store = MegatronStore(prefix, vocab_size=8, eos_id=0)
        >>> store.ids[1], store[1].tolist()
        ('corpus#1', [7, 0])
    """

    mask = None

    def __init__(
        self,
        prefix: str | Path,
        *,
        tokenizer: StoreTokenizer | str | Path | None = None,
        vocab_size: int | None = None,
        eos_id: int | None = None,
        bos_id: int | None = None,
        pad_id: int | None = None,
        ended: bool = True,
    ):
        text = str(prefix)
        self.path = Path(text[:-4] if text.endswith((".bin", ".idx")) else text)
        if isinstance(tokenizer, (str, Path)):
            tokenizer = load_tokenizer(tokenizer)
        self._tokenizer = tokenizer
        numbers = {"vocab_size": vocab_size, "eos_id": eos_id, "bos_id": bos_id, "pad_id": pad_id}
        self._arguments = {**numbers, "tokenizer": tokenizer, "ended": ended}
        special = _special(self.path, tokenizer, numbers)
        index = _read_index(self.path)
        self._digest = index.digest
        self._documents, self.docs = _documents(self.path, index)
        self.tokens: Integer[np.ndarray, " tokens"] = np.memmap(_bin(self.path), index.dtype, "r").view(np.ndarray)
        self.meta: dict[str, Any] = {
            "format": "megatron",
            "version": VERSION,
            "dtype": index.dtype.str,
            "num_documents": len(self.docs),
            "num_tokens": int(self.docs["tokens"].sum()),
            "num_bytes": 0,
            "tokenizer": special,
            "files": {file.name: {"bytes": file.stat().st_size} for file in (_bin(self.path), _idx(self.path))},
        }
        content = {"index": index.digest, "tokens": _sample_digest(_bin(self.path))}
        self.meta["fingerprint"] = fingerprint({**self.meta, "content": content, "name": self.path.name})
        if ended:
            self._check_ends()

    def __reduce__(self):
        return partial(MegatronStore, self.path, **self._arguments), ()

    def __repr__(self) -> str:
        return f"MegatronStore({str(self.path)!r}: {len(self)} documents, {self.num_tokens} tokens)"

    def __len__(self) -> int:
        return len(self.docs)

    def __getitem__(self, index: int) -> Integer[np.ndarray, " tokens"]:
        """Give one document's ids as they are stored; a view of the file."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of a store with {len(self)} documents")
        record = self.docs[index]
        return self.tokens[record["start"] : record["start"] + record["tokens"]]

    @property
    def num_tokens(self) -> int:
        """How many ids the documents have."""
        return self.meta["num_tokens"]

    @cached_property
    def num_bytes(self) -> int:
        """How many bytes of UTF-8 the documents have: all tokens are read; 0, unknown, without a tokenizer."""
        if self._tokenizer is None:
            return 0
        sizes = self._tokenizer.token_bytes
        blocks = (self.tokens[i : i + BLOCK] for i in range(0, len(self.tokens), BLOCK))
        return sum(int(np.bincount(block, minlength=len(sizes)) @ sizes) for block in blocks)

    @property
    def fingerprint(self) -> str:
        """What the store holds, whatever folder or machine it is in: see the class."""
        return self.meta["fingerprint"]

    @property
    def tokenizer(self) -> StoreTokenizer:
        """The tokenizer that was given.

        Raises:
            UserError: None was.
        """
        if self._tokenizer is None:
            raise UserError(
                f"{self.path}: Megatron's files hold no tokenizer, so there is no text; give the tokenizer.json that "
                "the ids were made with: MegatronStore(..., tokenizer=...)"
            )
        return self._tokenizer

    @cached_property
    def ids(self) -> Sequence[str]:
        """The documents' ids, in order."""
        return _Ids(self.path.name, self._documents)

    def text(self, index: int) -> str:
        """Decode one document."""
        return self.tokenizer.decode(self[index])

    def verify(self) -> None:
        """Read everything: the index must be the one that was opened, and every token in the vocabulary.

        Raises:
            UserError: Names what differs.
        """
        index, problems = _read_index(self.path), []
        _documents(self.path, index)
        if index.digest != self._digest:
            problems.append(f"{_idx(self.path)}: changed since the store was opened")
        expected, got = int(index.sizes.sum(dtype=np.int64)) * index.dtype.itemsize, _bin(self.path).stat().st_size
        if got != expected:
            problems.append(f"{_bin(self.path)}: expected {expected} bytes, got {got}")
        tokens, size = np.memmap(_bin(self.path), index.dtype, "r"), self.meta["tokenizer"]["vocab_size"]
        for start in range(0, len(tokens), BLOCK):
            wrong = np.flatnonzero((tokens[start : start + BLOCK] < 0) | (tokens[start : start + BLOCK] >= size))
            if len(wrong):
                place = start + int(wrong[0])
                problems.append(
                    f"{_bin(self.path)}: expected ids from 0 to {size - 1}, got {tokens[place]} at token {place}; "
                    "made by another tokenizer?"
                )
                break
        _complain(self.path, problems)

    def _check_ends(self) -> None:
        eos = self.meta["tokenizer"]["eos_id"]
        chosen = np.linspace(0, len(self) - 1, min(SAMPLED, len(self))).astype(np.int64)
        last = self.tokens[self.docs["start"][chosen] + self.docs["tokens"][chosen] - 1]
        wrong = np.flatnonzero(last != eos)
        if len(wrong):
            raise UserError(
                f"{self.path}: {len(wrong)} of {len(chosen)} sampled documents do not end in eos_id = {eos}; document "
                f"{self.ids[int(chosen[wrong[0]])]} ends in {last[wrong[0]]}; pass the right eos_id, or ended=False if "
                "the files were made without --append-eod"
            )


class _Ids(Sequence[str]):
    """`NAME#number` for each document, made when it is asked for."""

    def __init__(self, name: str, numbers: np.ndarray):
        self._name, self._numbers = name, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        chosen = self._numbers[index].tolist()
        return [f"{self._name}#{i}" for i in chosen] if isinstance(index, slice) else f"{self._name}#{chosen}"


class _Index(NamedTuple):
    """What an `.idx` file says, and the sha256 of it."""

    dtype: np.dtype
    sizes: Int32[np.ndarray, " sequences"]
    pointers: Int64[np.ndarray, " sequences"]
    documents: Int64[np.ndarray, " documents+1"]
    digest: str


def _bin(path: Path) -> Path:
    return path.with_name(f"{path.name}.bin")


def _idx(path: Path) -> Path:
    return path.with_name(f"{path.name}.idx")


def _complain(path: Path, problems: list[str]) -> None:
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise UserError(
            f"cannot use the Megatron files {path}.bin and .idx:\n{lines}\n"
            "expected those that Megatron-LM's tools/preprocess_data.py writes; copy or make them anew"
        )


def _read_index(path: Path) -> _Index:
    _complain(path, [f"{file}: there is no such file" for file in (_bin(path), _idx(path)) if not file.is_file()])
    size = _idx(path).stat().st_size
    with _idx(path).open("rb") as handle:
        header = handle.read(HEADER.size)
        handle.seek(0)
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    magic, version, code, sequences, entries = HEADER.unpack(header.ljust(HEADER.size, b"\x00"))
    problems = []
    if magic != MAGIC:
        problems.append(f"{_idx(path)}: expected to begin with {MAGIC!r}, got {magic!r}: no Megatron index")
    elif version != VERSION:
        problems.append(f"{_idx(path)}: expected version {VERSION}, got {version}")
    elif code not in DTYPES or np.dtype(DTYPES[code]).kind not in "iu":
        names = ", ".join(f"{code} ({np.dtype(name)})" for code, name in DTYPES.items() if "f" not in name)
        problems.append(f"{_idx(path)}: expected a type of token among {names}, got {code}")
    else:
        expected = HEADER.size + sequences * 12 + entries * 8
        if size == expected + sequences > expected:
            problems.append(f"{_idx(path)}: has a mode for each sequence, so its data are not text alone")
        elif size != expected:
            problems.append(
                f"{_idx(path)}: expected {expected} bytes for {sequences} sequences and {entries} entries of the "
                f"document index, got {size}"
            )
    _complain(path, problems)
    content = np.memmap(_idx(path), np.uint8, "r").view(np.ndarray)
    return _Index(
        np.dtype(DTYPES[code]),
        np.frombuffer(content, "<i4", sequences, HEADER.size),
        np.frombuffer(content, "<i8", sequences, HEADER.size + sequences * 4),
        np.frombuffer(content, "<i8", entries, HEADER.size + sequences * 12),
        digest,
    )


def _documents(path: Path, index: _Index) -> tuple[Int64[np.ndarray, " docs"], np.ndarray]:
    """Make the records of the documents that have tokens, and say which those are."""
    width, sizes, pointers, edges = index.dtype.itemsize, index.sizes, index.pointers, index.documents
    problems = []
    if len(edges) < 2 or edges[0] != 0 or edges[-1] != len(sizes) or (np.diff(edges) < 0).any():
        problems.append(f"{_idx(path)}: its document index does not lead from sequence 0 to {len(sizes)}")
    if (sizes < 0).any() or (pointers < 0).any() or (pointers % width).any():
        problems.append(f"{_idx(path)}: expected sizes of 0 or more, and pointers that are multiples of {width}")
    _complain(path, problems)
    ends = pointers + sizes.astype(np.int64) * width
    got = _bin(path).stat().st_size
    if len(ends) and ends.max() > got:
        problems.append(f"{_bin(path)}: expected {ends.max()} bytes, got {got}: it is cut short, or another's")
    inside = np.ones(len(sizes), bool)
    inside[edges[edges < len(sizes)]] = False
    gaps = np.flatnonzero(inside[1:] & (pointers[1:] != ends[:-1])) + 1
    if len(gaps):
        document = int(np.searchsorted(edges, gaps[0], "right")) - 1
        problems.append(
            f"{_idx(path)}: {len(gaps)} sequences do not follow the one before in their document, the first of them "
            f"sequence {gaps[0]} in document {document}; expected each document in one piece"
        )
    before = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    lengths = before[edges[1:]] - before[edges[:-1]]
    numbers = np.flatnonzero(lengths)
    if not len(numbers):
        problems.append(f"{_idx(path)}: holds no tokens")
    _complain(path, problems)
    docs = np.zeros(len(numbers), RECORD)
    docs["start"] = pointers[edges[numbers]] // width
    docs["tokens"] = lengths[numbers]
    docs["id_hash"] = random_bits(len(lengths), "split", path.name)[numbers]
    return numbers, docs


def _special(path: Path, tokenizer: StoreTokenizer | None, numbers: dict[str, int | None]) -> dict[str, Any]:
    """Complete the vocabulary's numbers; complain about those that are missing or wrong."""
    problems = []
    if tokenizer is not None:
        for name, given in numbers.items():
            if given is not None and given != getattr(tokenizer, name):
                problems.append(f"{name} = {given}, but the tokenizer's is {getattr(tokenizer, name)}; leave it out")
        numbers = {name: getattr(tokenizer, name) for name in numbers}
    vocab_size, eos_id = numbers["vocab_size"], numbers["eos_id"]
    problems += [
        f"{name} is not given; expected it, or a tokenizer"
        for name in ("vocab_size", "eos_id")
        if numbers[name] is None
    ]
    if vocab_size is not None:
        problems += [
            f"{name} = {value}: expected 0 to {vocab_size - 1}, since vocab_size = {vocab_size}"
            for name, value in numbers.items()
            if name != "vocab_size" and value is not None and not 0 <= value < vocab_size
        ]
    if problems:
        raise UserError(f"cannot open {path}:\n" + "\n".join(f"  - {problem}" for problem in problems))
    numbers = {**numbers, "pad_id": eos_id if numbers["pad_id"] is None else numbers["pad_id"]}
    unknown = "unknown-" + "-".join(str(value) for value in numbers.values())
    return {"fingerprint": unknown if tokenizer is None else tokenizer.fingerprint, **numbers}


def _sample_digest(file: Path) -> str:
    digest, size = hashlib.sha256(), file.stat().st_size
    with file.open("rb") as handle:
        if size <= STRETCHES * STRETCH_BYTES:
            return hashlib.file_digest(handle, "sha256").hexdigest()
        for i in range(STRETCHES):
            handle.seek(i * (size - STRETCH_BYTES) // (STRETCHES - 1))
            digest.update(handle.read(STRETCH_BYTES))
    return digest.hexdigest()
