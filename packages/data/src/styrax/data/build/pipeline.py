"""Build a token store: sources in, ids on disk, the same bytes from the same sources every time."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from styrax.core.errors import UserError
from styrax.data.atomic import explained, working_folder
from styrax.data.build.filters import Filter, filter_name
from styrax.data.build.job import Contamination, Job, NearDuplicates
from styrax.data.build.merge import merge
from styrax.data.build.parts import part_path, remove_others
from styrax.data.build.pool import can_leave, count_cores, run_here, run_workers
from styrax.data.build.quarantine import Quarantine
from styrax.data.build.records import Errors, ReadSettings
from styrax.data.build.sources import find_documents
from styrax.data.build.training import make_tokenizer
from styrax.data.build.units import Records, Unit, as_source, file_units, record_units
from styrax.data.build.write import Progress
from styrax.data.build.writer import StoreWriter, check_out
from styrax.data.store.tokens import TokenStore
from styrax.data.tokenizer import StoreTokenizer

#: Bytes of files from which processes are started unasked.
WORTH_BYTES = 64_000_000

Dedup = Literal["exact"] | NearDuplicates
OnError = Literal["raise"] | Quarantine
Source = str | Path | Records | Any


def build_store(
    sources: Sequence[Source] | Source,
    out: str | Path,
    *,
    tokenizer: str | StoreTokenizer = "bpe:4096",
    text: str = "text",
    id: str | None = None,
    errors: Errors = "raise",
    split_on: str | None = None,
    max_bytes: int | None = None,
    filters: Sequence[Filter] = (),
    on_error: OnError = "raise",
    dedup: Dedup | None = None,
    decontaminate: Contamination | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> TokenStore:
    """Build a store from files, in the order of their ids, and from iterables, in the order given.

    A build that is killed goes on where it was when it is called again. Neither that nor the number of
    processes changes a byte of the store.

    Args:
        sources: Files, folders, globs, `python:stdlib` (see `find_documents`), `Records(iterable)`, or Hugging
            Face `datasets` objects. `.jsonl`, `.ndjson`, `.csv`, `.tsv` and `.parquet` hold one document per
            record, all other files are one document each; `.gz` and `.zst` are decompressed.
        out: The folder to make; it appears whole or not at all.
        tokenizer: `byte`, `bpe:N` (trained on a fixed sample of the text), a `tokenizer.json`, or an object.
        text: The field of a record that holds its text.
        id: The field that holds its id, for provenance; by default record 7 of a file is `FILE@7`.
        errors: What to do with text that is not UTF-8: `raise`, `replace`, or `skip` it.
        split_on: Cut each text file after every such text, one document per piece.
        max_bytes: Take a fixed subset of whole files of at most this size.
        filters: Functions of a mapping with `id`, `text` and the record's other fields; each answers whether
            to keep the record, or with another text or mapping. See `styrax.data.build.filters.apply`.
        on_error: `raise` at the first malformed record, or put such records aside within a budget.
        dedup: `exact` keeps the first of documents with equal text; an object finds near duplicates.
        decontaminate: Finds documents that hold a text to keep out; they are dropped.
        workers: How many processes; by default one for each core, or this one alone where there is little to do.
        overwrite: Replace a store at `out`.
        progress: Called as `progress(label, done, total)`, in bytes.

    Returns:
        The store, open; `meta["report"]` says what was read, dropped and why.

    Raises:
        UserError: Missing or damaged sources, malformed records, an existing `out`, another build of `out`, a
            full disk, a lossy tokenizer, a worker process that ended.
    """
    out = Path(out)
    check_out(out, overwrite)
    _check_settings(errors, split_on, on_error, dedup, workers, max_bytes)
    names, records = _sort_out(sources)
    read = ReadSettings(text=text, id=id, errors=errors, split_on=split_on, all_fields=bool(filters))
    made = tokenizer
    with working_folder(out) as folder:
        try:
            documents = find_documents(names, max_bytes=max_bytes) if names or not records else []
            units = file_units(documents, read)
            if isinstance(made, str):
                pieces = [piece for unit in units for piece in unit.pieces]
                made = make_tokenizer(made, pieces, records, read, progress)
            job = Job(
                folder=folder,
                tokenizer=made,
                read=read,
                filters=tuple(filters),
                quarantine=on_error != "raise",
                near=None if isinstance(dedup, str) else dedup,
                contamination=decontaminate,
            )
            keys = make_parts(units, records, job, workers, progress, out)
            with StoreWriter(out, made, overwrite=overwrite) as writer:
                return merge(
                    folder,
                    keys,
                    writer,
                    quarantine=None if on_error == "raise" else on_error,
                    exact=dedup == "exact",
                    near=job.near,
                    build=describe_build(sources, tokenizer, max_bytes, on_error, dedup, job),
                    progress=progress,
                )
        except UserError as error:
            kept = sum(path.name.startswith("part-") for path in folder.iterdir())
            if not kept:
                raise
            raise type(error)(
                f"{error}\n({kept} finished parts are kept in {folder}: the same build goes on from there)"
            ) from error


def make_parts(
    units: Sequence[Unit],
    records: Sequence[Records],
    job: Job,
    workers: int | None,
    progress: Progress | None,
    out: Path,
) -> list[str]:
    """Make the parts of a build, except those that are there from a build before.

    Args:
        units: Of files.
        records: Iterables, which come after the files.
        job: What is done.
        workers: How many processes; `None` for one per core.
        progress: Told how many bytes have been read.
        out: What errors of the disk name.

    Returns:
        The keys of all parts, in order.

    Raises:
        UserError: See `build_store`.
    """
    settings, keys = job.settings, []
    total = None if records else sum(unit.size for unit in units)
    remove_others(job.folder, None if records else {unit.key(settings) for unit in units})
    finished, told, under_way = 0, -1, {}

    def report(key: str, position: int, complete: bool) -> None:
        nonlocal finished, told
        under_way[key] = position
        if complete:
            finished += under_way.pop(key)
        done = finished + sum(under_way.values())
        if progress is not None and done != told:
            told = done
            progress("tokenize", done, total)

    def tasks() -> Iterator[tuple[Unit, str]]:
        every = itertools.chain.from_iterable(record_units(source, job.read) for source in records)
        for unit in itertools.chain(units, every):
            keys.append(unit.key(settings))
            if part_path(job.folder, keys[-1]).is_dir():
                report(keys[-1], unit.size, True)
            else:
                yield unit, keys[-1]

    waiting = tasks()
    with explained(out):
        some = list(itertools.islice(waiting, 2))
        # One unit is not worth a process, nor is what the tokenizer does on all cores before processes have begun.
        small = workers is None and total is not None and total < WORTH_BYTES
        count = _workers(workers, job) if len(some) == 2 and not small else 1
        if count > 1:
            run_workers(itertools.chain(some, waiting), job, count, report)
        else:
            run_here(itertools.chain(some, waiting), job, report)
    return keys


def describe_build(
    sources: Any,
    tokenizer: str | StoreTokenizer,
    max_bytes: int | None,
    on_error: OnError,
    dedup: Dedup | None,
    job: Job,
) -> dict[str, Any]:
    """Say, as JSON, how a store is made; `command` holds the words after `styrax data build`, if that can do it."""
    names, records = _sort_out(sources)
    filters = [filter_name(function) for function in job.filters]
    build = {
        "sources": [*map(str, names), *(f"records of {source.name}" for source in records)],
        "tokenizer": tokenizer if isinstance(tokenizer, str) else None,
        "text": job.read.text,
        "id": job.read.id,
        "errors": job.read.errors,
        "split_on": job.read.split_on,
        "max_bytes": max_bytes,
        "filters": filters,
        "on_error": "raise" if on_error == "raise" else {"max_fraction": on_error.max_fraction},
        "dedup": dedup if dedup is None or isinstance(dedup, str) else dict(dedup.settings),
        "decontaminate": None if job.contamination is None else dict(job.contamination.settings),
    }
    special = isinstance(build["dedup"], dict) or job.contamination is not None or any("<" in name for name in filters)
    if records or special or build["tokenizer"] is None:
        return build
    words = [*build["sources"], "--tokenizer", build["tokenizer"], "--errors", job.read.errors]
    words += [] if job.read.text == "text" else ["--text", job.read.text]
    for option in ("id", "split_on", "max_bytes", "dedup"):
        words += [] if build[option] is None else [f"--{option.replace('_', '-')}", str(build[option])]
    for name in filters:
        words += ["--filter", name]
    if on_error != "raise":
        words += ["--on-error", "quarantine", "--max-bad", f"{on_error.max_fraction:g}"]
    return {"command": words, **build}


def _check_settings(
    errors: str, split_on: str | None, on_error: Any, dedup: Any, workers: int | None, max_bytes: int | None
) -> None:
    near = all(hasattr(dedup, name) for name in ("signatures", "duplicates", "settings"))
    wrong = {
        f"errors = {errors!r}: expected 'raise', 'replace' or 'skip'": errors not in ("raise", "replace", "skip"),
        "split_on is empty; expected the text after which to cut, or none": split_on == "",
        f"on_error = {on_error!r}: expected 'raise' or Quarantine(max_fraction=...)": not (
            on_error == "raise" or isinstance(on_error, Quarantine)
        ),
        f"dedup = {dedup!r}: expected 'exact', an object that finds near duplicates, or none": not (
            dedup in (None, "exact") or near
        ),
        f"workers = {workers}: expected 1 or more": workers is not None and workers < 1,
        f"max_bytes = {max_bytes}: expected 1 or more": max_bytes is not None and max_bytes < 1,
    }
    problems = [problem for problem, found in wrong.items() if found]
    if problems:
        raise UserError("\n".join(problems))


def _sort_out(sources: Any) -> tuple[list[str | Path], list[Records]]:
    """Tell names of files from sources of records."""
    if isinstance(sources, (str, Path)) or as_source(sources) is not None:
        sources = [sources]
    elif isinstance(sources, Mapping):
        sources = [Records(sources)]
    elif isinstance(sources, Iterator):
        raise UserError(
            "the sources are an iterator; expected Records(...) around it if it gives texts, pairs (id, text) or "
            "mappings, or a list if it gives names of files"
        )
    names: list[str | Path] = []
    records: list[Records] = []
    problems = []
    for number, source in enumerate(sources):
        if isinstance(source, (str, Path)):
            names.append(source)
        elif (found := as_source(source)) is not None:
            records.append(found)
        else:
            problems.append(f"  - source {number} is a {type(source).__name__}")
    if problems:
        raise UserError(
            "expected names of files and folders, or Records(...) around iterables of texts, pairs (id, text) or "
            "mappings:\n" + "\n".join(problems)
        )
    return names, records


def _workers(workers: int | None, job: Job) -> int:
    """Decide how many processes to use."""
    inside = multiprocessing.current_process().daemon
    if workers == 1 or inside:
        return 1
    reason = can_leave(job)
    if reason is None:
        return workers or count_cores()
    if workers is not None:
        raise UserError(f"{reason}; or pass workers=1 to build in one process")
    return 1
