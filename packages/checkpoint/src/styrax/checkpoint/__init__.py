"""Atomic, asynchronous, verified checkpoints of everything that a run is, on Orbax."""

from typing import TYPE_CHECKING

from styrax.core import lazy_exports

if TYPE_CHECKING:
    from styrax.checkpoint.config import CheckpointConfig
    from styrax.checkpoint.errors import CheckpointError
    from styrax.checkpoint.manifest import Item, Leaf, Manifest, list_steps, read_manifest
    from styrax.checkpoint.store import Store
    from styrax.checkpoint.verify import verify

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "Item",
    "Leaf",
    "Manifest",
    "Store",
    "list_steps",
    "read_manifest",
    "verify",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "CheckpointConfig": "config",
        "CheckpointError": "errors",
        "Item": "manifest",
        "Leaf": "manifest",
        "Manifest": "manifest",
        "Store": "store",
        "list_steps": "manifest",
        "read_manifest": "manifest",
        "verify": "verify",
    },
)
