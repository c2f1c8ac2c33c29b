"""Atomic, asynchronous, verified checkpoints of everything that a run is, on Orbax."""

from typing import TYPE_CHECKING

from styrax.core import lazy_exports

if TYPE_CHECKING:
    from styrax.checkpoint.config import CheckpointConfig
    from styrax.checkpoint.diff import Difference, diff
    from styrax.checkpoint.doctor import examine
    from styrax.checkpoint.errors import CheckpointError, Damaged
    from styrax.checkpoint.manifest import Item, Leaf, Manifest, Shard, list_steps, read_manifest
    from styrax.checkpoint.pending import Ticket
    from styrax.checkpoint.reading import Resumed
    from styrax.checkpoint.remote import Bucket, Mirror, TieredStore
    from styrax.checkpoint.retention import Best
    from styrax.checkpoint.schema import fingerprint
    from styrax.checkpoint.store import Store
    from styrax.checkpoint.verify import verify

__all__ = [
    "Best",
    "Bucket",
    "CheckpointConfig",
    "CheckpointError",
    "Damaged",
    "Difference",
    "Item",
    "Leaf",
    "Manifest",
    "Mirror",
    "Resumed",
    "Shard",
    "Store",
    "Ticket",
    "TieredStore",
    "diff",
    "examine",
    "fingerprint",
    "list_steps",
    "read_manifest",
    "verify",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Best": "retention",
        "Bucket": "remote",
        "CheckpointConfig": "config",
        "CheckpointError": "errors",
        "Damaged": "errors",
        "Difference": "diff",
        "Item": "manifest",
        "Leaf": "manifest",
        "Manifest": "manifest",
        "Mirror": "remote",
        "Resumed": "reading",
        "Shard": "manifest",
        "Store": "store",
        "Ticket": "pending",
        "TieredStore": "remote",
        "diff": "diff",
        "examine": "doctor",
        "fingerprint": "schema",
        "list_steps": "manifest",
        "read_manifest": "manifest",
        "verify": "verify",
    },
)
