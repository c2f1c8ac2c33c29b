"""Token stores: what they look like on disk, and how they are opened."""

from styrax.data.store.format import RECORD, is_store
from styrax.data.store.tokens import TokenStore

__all__ = ["RECORD", "TokenStore", "is_store"]
