"""What is done to every record of a build, and the making of one part."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from styrax.data.build.encode import Encoded, batches, encode
from styrax.data.build.filters import Filter, apply, filter_identity
from styrax.data.build.parts import PartWriter
from styrax.data.build.quarantine import Refused, Tally
from styrax.data.build.readers import Meter
from styrax.data.build.records import ReadSettings
from styrax.data.build.units import Unit
from styrax.data.build.writer import token_dtype
from styrax.data.tokenizer import StoreTokenizer

if TYPE_CHECKING:
    from jaxtyping import Bool, Shaped

PARTS_VERSION = 1


class NearDuplicates(Protocol):
    """Finds documents that are nearly the same; it goes to worker processes, so it must pickle.

    Attributes:
        settings: JSON: everything that its answers depend on.
    """

    @property
    def settings(self) -> Mapping[str, Any]: ...  # noqa: D102

    def signatures(self, texts: Sequence[str]) -> Shaped[np.ndarray, " docs ..."]:
        """Sum up texts, one row each."""
        ...

    def duplicates(self, signatures: Shaped[np.ndarray, " docs ..."]) -> Bool[np.ndarray, " docs"]:
        """Tell, from the rows of all documents in order, which ones are too near to one before."""
        ...


class Contamination(Protocol):
    """Finds documents that hold a text to keep out; it goes to worker processes, so it must pickle.

    Attributes:
        settings: JSON: everything that its answers depend on.
    """

    @property
    def settings(self) -> Mapping[str, Any]: ...  # noqa: D102

    def hits(self, text: str) -> list[str]:
        """Name the texts to keep out that stand in a document."""
        ...


class _Ready(NamedTuple):
    """A document that is to be stored."""

    name: str
    text: str
    size: int
    digest: bytes


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every unit of a build has in common.

    Attributes:
        folder: Where parts are kept.
        tokenizer: Makes the ids.
        read: How sources are read.
        filters: See `styrax.data.build.filters.apply`.
        quarantine: Whether malformed records are put aside; else the first one is an error.
        near: Finds near duplicates, if they are looked for.
        contamination: Finds texts to keep out, if there are any.
    """

    folder: Path
    tokenizer: StoreTokenizer
    read: ReadSettings = field(default_factory=ReadSettings)
    filters: tuple[Filter, ...] = ()
    quarantine: bool = False
    near: NearDuplicates | None = None
    contamination: Contamination | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """JSON: everything that a part depends on, but for what is read."""
        return {
            "version": PARTS_VERSION,
            "tokenizer": self.tokenizer.fingerprint,
            "dtype": token_dtype(self.tokenizer).str,
            "text": self.read.text,
            "id": self.read.id,
            "errors": self.read.errors,
            "split_on": self.read.split_on,
            "filters": [filter_identity(function) for function in self.filters],
            "quarantine": self.quarantine,
            "near": None if self.near is None else dict(self.near.settings),
            "contamination": None if self.contamination is None else dict(self.contamination.settings),
        }


def make_part(
    job: Job, unit: Unit, key: str, batch_chars: int, report: Callable[[int], None] = lambda position: None
) -> None:
    """Turn one unit into one part.

    Args:
        job: What is done.
        unit: What is read.
        key: What the part is called.
        batch_chars: How much text the tokenizer is given at a time; it changes no byte of the part.
        report: Told how many bytes of the unit have been read.

    Raises:
        UserError: A source cannot be read, a record is malformed and there is no quarantine, a filter fails,
            or the tokenizer changes the text.
    """
    tally, meter = Tally(), Meter()
    with PartWriter(job.folder, key) as part, ThreadPoolExecutor(1) as pool:
        # The tokenizer works on one batch while the one before is written and the next one is read.
        waiting: Future[None] | None = None
        for batch in batches(_documents(job, unit, part, tally, meter), lambda ready: len(ready.text), batch_chars):
            future = pool.submit(_add, job, part, batch)
            if waiting is not None:
                waiting.result()
            waiting = future
            report(min(unit.size, meter.read()))
        if waiting is not None:
            waiting.result()
        part.finish(tally)


def _add(job: Job, part: PartWriter, batch: list[_Ready]) -> None:
    texts = [ready.text for ready in batch]
    names = [ready.name for ready in batch]
    encoded: Encoded = encode(job.tokenizer, names, texts, [ready.size for ready in batch])
    signatures = None if job.near is None else job.near.signatures(texts)
    part.add(names, [ready.digest for ready in batch], encoded, signatures)


def _documents(job: Job, unit: Unit, part: PartWriter, tally: Tally, meter: Meter) -> Iterator[_Ready]:
    """Read a unit's records and keep those that are to be stored."""
    for record in unit.records(job.read, meter):
        tally.read += 1
        if isinstance(record, Refused):
            if record.quiet:
                tally.dropped[record.reason] += 1
                continue
            if not job.quarantine:
                raise record.error()
            tally.refused[record.reason] += 1
            part.refuse(record)
            continue
        if job.filters and record.text:
            record = apply(job.filters, record, tally)
            if record is None:
                continue
        if not record.text:
            tally.dropped["empty"] += 1
            continue
        if job.contamination is not None and (hits := job.contamination.hits(record.text)):
            tally.dropped["contaminated"] += 1
            tally.hits.update(set(hits))
            continue
        content = record.text.encode()
        yield _Ready(record.id, record.text, len(content), hashlib.blake2b(content, digest_size=16).digest())
