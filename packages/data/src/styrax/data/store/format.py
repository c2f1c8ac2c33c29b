"""What the folder of a token store holds, by name, and the description that says so.

meta.json               what the folder must hold: counts, sizes, checksums, tokenizer, build arguments, report
tokenizer.json          the tokenizer
tokens-00000.bin        every document's ids with the end token after each, uint16 or uint32, little endian
docs-00000.npy          one record per document: start and tokens (in the .bin), bytes (UTF-8), id_hash
ids-00000.jsonl         one JSON string per document: its id
mask-00000.bin          optional: uint8 for each token, 1 where it carries loss; without the file all do
quarantine-00000.jsonl  optional: the records that were refused, each with its id, the reason and how it begins

Each file has one sha256 for every shard, a stretch of `shard_bytes` (64 MiB), so that damage has a place and a store
can be fetched and checked in shards.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from styrax.core.errors import UserError
from styrax.data.hashing import fingerprint

FORMAT = "styrax-token-store"
VERSION = 2
META, TOKENIZER = "meta.json", "tokenizer.json"
TOKENS, DOCS, IDS = "tokens-00000.bin", "docs-00000.npy", "ids-00000.jsonl"
MASK, QUARANTINE = "mask-00000.bin", "quarantine-00000.jsonl"
RECORD = np.dtype([("start", "<i8"), ("tokens", "<i8"), ("bytes", "<i8"), ("id_hash", "<u8")])

SHARD_BYTES = 64 << 20
CHECK_THREADS = 4

NEEDED = (TOKENS, DOCS, IDS, TOKENIZER)
HELD = (TOKENS, DOCS, IDS, MASK)
ABOUT = ("dtype", "num_documents", "num_tokens", "num_bytes", "tokenizer")


def describe(content: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a store's meta: what it holds as one fingerprint, then a checksum of the meta itself.

    Args:
        content: `dtype`, `num_documents`, `num_tokens`, `num_bytes`, `tokenizer`, `files`, `build`, `report`.

    Returns:
        The content with `format`, `version`, `shard_bytes`, `fingerprint` and `checksum`. How a store was made, what
        was left out of it and how its tokenizer's file is written do not enter the fingerprint.
    """
    meta = {"format": FORMAT, "version": VERSION, "shard_bytes": SHARD_BYTES, **content}
    holds = {name: entry for name, entry in content["files"].items() if name in HELD}
    about = {key: meta[key] for key in ("format", "version", *ABOUT)}
    meta["fingerprint"] = fingerprint({**about, "files": holds})
    return {**meta, "checksum": fingerprint(meta)}


def is_store(path: Path) -> bool:
    """Tell whether a folder looks like a token store, of any version and in any state."""
    try:
        return json.loads((path / META).read_text(encoding="utf-8"))["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        return False


def hash_shards(
    files: Iterable[Path], threads: int = CHECK_THREADS, shard_bytes: int | None = None
) -> dict[Path, list[str]]:
    """Hash files by the shard, several shards at once.

    Args:
        files: What is read.
        threads: How many shards at a time.
        shard_bytes: How long a shard is; `SHARD_BYTES` by default.

    Returns:
        For each file, the sha256 of every shard; one, of nothing, for an empty file.
    """
    files, size = list(files), shard_bytes or SHARD_BYTES
    shards = [(file, start, size) for file in files for start in range(0, max(1, file.stat().st_size), size)]
    digests: dict[Path, list[str]] = {file: [] for file in files}
    with ThreadPoolExecutor(max(1, threads)) as pool:
        for (file, *_), digest in zip(shards, pool.map(lambda shard: _hash_shard(*shard), shards), strict=True):
            digests[file].append(digest)
    return digests


def read_meta(path: Path) -> dict[str, Any]:
    """Read and check a store's `meta.json`.

    Raises:
        UserError: There is none, it is damaged, or another version wrote it.
    """
    file = path / META
    try:
        text = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        what = "has no meta.json" if path.is_dir() else "does not exist" if not path.exists() else "is a file"
        raise UserError(
            f"there is no token store at {path}: it {what}; build one: `styrax data build IN... --out {path}`"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error
    return parse_meta(text, path)


def parse_meta(text: bytes, path: Path | str) -> dict[str, Any]:
    """Check the content of a `meta.json`.

    Args:
        text: The content.
        path: The store's folder or URL, for messages.

    Raises:
        UserError: It is damaged, or another version wrote it.
    """
    file = f"{path}/{META}"
    try:
        meta = json.loads(text)
    except ValueError as error:
        raise UserError(f"{file} is damaged: expected JSON, got {error}; {rebuild(path, {})}") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise UserError(f"{file}: expected the meta of a {FORMAT}, got something else; is it the right folder?")
    version = meta.get("version")
    if version != VERSION:
        newer = not isinstance(version, int) or version > VERSION
        cure = "upgrade styrax-data, or " if newer else "an older styrax-data wrote it; "
        raise UserError(f"{file}: expected store version {VERSION}, got {version!r}; {cure}{rebuild(path, meta)}")
    got = fingerprint({key: value for key, value in meta.items() if key != "checksum"})
    if got != meta.get("checksum"):
        raise UserError(
            f"{file} is damaged: expected checksum {meta.get('checksum')}, got {got}; {rebuild(path, meta)}"
        )
    return meta


def complain(problems: list[str], path: Path | str, meta: Mapping[str, Any]) -> None:
    """Raise one error for all that is wrong with a store, if anything is.

    Raises:
        UserError: `problems` is not empty.
    """
    if problems:
        raise UserError(
            "the token store is incomplete or damaged:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
            + f"\n{rebuild(path, meta)}"
        )


def shard_size(meta: Mapping[str, Any]) -> int:
    """Give the bytes of a shard of a store's files, the last of each file apart."""
    return meta.get("shard_bytes", SHARD_BYTES)


def rebuild(path: Path | str, meta: Mapping[str, Any]) -> str:
    """Say which command builds a store anew."""
    build = meta.get("build")
    command = build.get("command") if isinstance(build, dict) else None
    words = [str(word) for word in command] if isinstance(command, list) else ["IN..."]
    quoted = " ".join(word if word == "IN..." else shlex.quote(word) for word in words)
    if "://" in str(path):
        return f"build it anew (`styrax data build {quoted} --out DIR`) and upload it (copy_store, overwrite=True)"
    return f"build it anew: `styrax data build {quoted} --out {shlex.quote(str(path))} --overwrite`"


def _hash_shard(file: Path, start: int, size: int) -> str:
    digest, left = hashlib.sha256(), size
    with file.open("rb") as handle:
        handle.seek(start)
        while left and (chunk := handle.read(min(left, 1 << 20))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()
