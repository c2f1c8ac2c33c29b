"""Records that cannot be used: what was wrong, how many a build may refuse, and the count of what became of all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from styrax.core.errors import UserError

EXCERPT_CHARS = 200
EXAMPLES = 3
NAMED_HITS = 100

CURES = {
    "not UTF-8": "convert the file, leave it out with a glob, pass errors 'replace' or 'skip'",
    "no text": "name the field that holds the text (text=, --text)",
    "no id": "name the field that holds the id (id=, --id), or leave it away for numbers",
}


@dataclass(frozen=True)
class Quarantine:
    """Let a build go on past malformed records, up to a budget.

    Refused records are kept in the store's `quarantine-00000.jsonl`, each with its id, the reason and how it
    begins, and are counted by reason in `meta["report"]`.

    Args:
        max_fraction: The largest share of all records, over the whole build, that may be refused.

    Raises:
        UserError: The share is not between 0 and 1.

    Example:
        >>> Quarantine(max_fraction=0.01)
        Quarantine(max_fraction=0.01)
    """

    max_fraction: float = 1e-3

    def __post_init__(self) -> None:
        if not 0 <= self.max_fraction <= 1:
            raise UserError(f"max_fraction = {self.max_fraction}: expected a share between 0 and 1")


@dataclass(frozen=True)
class Refused:
    """A record that cannot be used.

    Attributes:
        id: What the record would be called in the store.
        where: Where a person finds it: the file and the line.
        reason: What is wrong, in the words that the report counts by.
        detail: What is wrong with this one.
        excerpt: How it begins.
        quiet: Whether the user said to leave such records out, so that it is no error.
    """

    id: str
    where: str
    reason: str
    detail: str
    excerpt: str
    quiet: bool = False

    def error(self) -> UserError:
        """Make the error for a build that refuses nothing."""
        cure = CURES.get(self.reason, "repair it, leave the file out")
        return UserError(
            f"{self.where} {self.detail}; {cure}, or let the build refuse such records (on_error=Quarantine(...), "
            "--on-error quarantine)"
        )

    def line(self) -> str:
        """Make the line of the quarantine file."""
        entry = {"id": self.id, "reason": f"{self.reason}: {self.detail}", "excerpt": self.excerpt}
        return json.dumps(entry, ensure_ascii=False) + "\n"


@dataclass
class Tally:
    """Counts of what a build did with records; parts of a build are added up.

    Attributes:
        read: Records that were read.
        refused: Malformed ones, by reason.
        dropped: Ones left out for another reason, by reason.
        changed: Ones whose text a filter replaced, by filter.
        hits: Ones that stood in a text to keep out, by that text.
    """

    read: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Add another part's counts."""
        self.read += other.read
        for name in ("refused", "dropped", "changed", "hits"):
            getattr(self, name).update(getattr(other, name))

    def json(self) -> dict[str, Any]:
        """Give the counts as JSON."""
        counters = {name: dict(getattr(self, name)) for name in ("refused", "dropped", "changed", "hits")}
        return {"read": self.read, **counters}

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> Tally:
        """Read what `json` gave."""
        counters = {name: Counter(content[name]) for name in ("refused", "dropped", "changed", "hits")}
        return cls(content["read"], **counters)

    def report(self, kept: int) -> dict[str, Any]:
        """Sum up a build for `meta["report"]`.

        Args:
            kept: How many documents the store holds.

        Returns:
            `documents` that were read, `kept`, `dropped` by reason, malformed ones as `refused: REASON`; and
            where there is something to say, `changed` by filter and the texts most often hit.
        """
        dropped = {**self.dropped, **{f"refused: {reason}": count for reason, count in self.refused.items()}}
        report: dict[str, Any] = {"documents": self.read, "kept": kept, "dropped": dict(sorted(dropped.items()))}
        if self.changed:
            report["changed"] = dict(sorted(self.changed.items()))
        if self.hits:
            most = sorted(self.hits.items(), key=lambda item: (-item[1], item[0]))
            report["contaminated"] = dict(most[:NAMED_HITS])
        return report


def check_budget(quarantine: Quarantine, tally: Tally, lines: Iterable[bytes]) -> None:
    """Refuse a build that refused too much.

    Args:
        quarantine: The budget.
        tally: What the whole build counted.
        lines: The lines of the quarantine file, for examples.

    Raises:
        UserError: Lists the counts by reason, and some of the records.
    """
    refused = sum(tally.refused.values())
    if refused <= quarantine.max_fraction * tally.read:
        return
    examples: dict[str, list[str]] = {reason: [] for reason in tally.refused}
    for line in lines:
        entry = json.loads(line)
        reason, _, detail = entry["reason"].partition(": ")
        if len(examples.setdefault(reason, [])) < EXAMPLES:
            examples[reason].append(f"      {entry['id']} {detail}")
    counts = sorted(tally.refused.items(), key=lambda item: (-item[1], item[0]))
    raise UserError(
        f"{refused} of {tally.read} records cannot be used; expected at most {quarantine.max_fraction:g} of them "
        f"({int(quarantine.max_fraction * tally.read)}):\n"
        + "\n".join("\n".join([f"  - {reason}: {count}", *examples[reason]]) for reason, count in counts)
        + "\nrepair the sources, or allow more (Quarantine(max_fraction=...), --max-bad)"
    )
