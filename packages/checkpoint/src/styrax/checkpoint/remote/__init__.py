"""Checkpoints in object storage: a bucket as a place for them, and stores that are mirrored there."""

from typing import TYPE_CHECKING

from styrax.core import lazy_exports

if TYPE_CHECKING:
    from styrax.checkpoint.remote.bucket import Bucket
    from styrax.checkpoint.remote.bucket_store import BucketStore
    from styrax.checkpoint.remote.config import Mirror
    from styrax.checkpoint.remote.tickets import BucketTicket, MirrorTicket
    from styrax.checkpoint.remote.tiers import TieredStore

__all__ = ["Bucket", "BucketStore", "BucketTicket", "Mirror", "MirrorTicket", "TieredStore"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Bucket": "bucket",
        "BucketStore": "bucket_store",
        "BucketTicket": "tickets",
        "Mirror": "config",
        "MirrorTicket": "tickets",
        "TieredStore": "tiers",
    },
)
