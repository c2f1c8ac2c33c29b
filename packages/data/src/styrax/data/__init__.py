"""Token stores and batches that are a pure function of the step."""

from typing import TYPE_CHECKING

from styrax.core import lazy_exports

if TYPE_CHECKING:
    from styrax.data.bpe import BPETokenizer, train_bpe
    from styrax.data.build import build_store, write_store
    from styrax.data.config import TokensConfig
    from styrax.data.dataset import LMData, Span
    from styrax.data.grain_source import to_grain
    from styrax.data.loader import Loader
    from styrax.data.sharded import global_batch
    from styrax.data.sources import Document, find_documents
    from styrax.data.store import TokenStore
    from styrax.data.tokenizer import ByteTokenizer, load_tokenizer

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "Document",
    "LMData",
    "Loader",
    "Span",
    "TokenStore",
    "TokensConfig",
    "build_store",
    "find_documents",
    "global_batch",
    "load_tokenizer",
    "to_grain",
    "train_bpe",
    "write_store",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "BPETokenizer": "bpe",
        "ByteTokenizer": "tokenizer",
        "Document": "sources",
        "LMData": "dataset",
        "Loader": "loader",
        "Span": "dataset",
        "TokenStore": "store",
        "TokensConfig": "config",
        "build_store": "build",
        "find_documents": "sources",
        "global_batch": "sharded",
        "load_tokenizer": "tokenizer",
        "to_grain": "grain_source",
        "train_bpe": "bpe",
        "write_store": "build",
    },
)
