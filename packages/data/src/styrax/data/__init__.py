"""Token stores and batches that are a pure function of the step."""

from typing import TYPE_CHECKING

from styrax.core import lazy_exports

if TYPE_CHECKING:
    from styrax.data.arrays import ArrayData
    from styrax.data.bpe import BPETokenizer, train_bpe
    from styrax.data.build import Quarantine, Records, StoreWriter, build_store, write_store
    from styrax.data.build.decontaminate import Decontaminator
    from styrax.data.build.minhash import MinHash
    from styrax.data.build.sources import Document, find_documents
    from styrax.data.chat import ChatEncoder, ChatTemplate, PreferenceData, build_chat_store, build_preference_store
    from styrax.data.config import MixtureConfig, TokensConfig
    from styrax.data.dataset import LMData, Span
    from styrax.data.grain_guard import iterate, window_shuffle
    from styrax.data.grain_source import to_grain
    from styrax.data.loader import Loader
    from styrax.data.plan.mixture import Mixture
    from styrax.data.sharded import global_batch
    from styrax.data.store import TokenStore
    from styrax.data.store.copy import copy_store
    from styrax.data.store.diff import diff_stores
    from styrax.data.store.megatron import MegatronStore
    from styrax.data.store.merge import merge_stores
    from styrax.data.store.remote import RemoteStore, open_store
    from styrax.data.tokenizer import ByteTokenizer, load_tokenizer

__all__ = [
    "ArrayData",
    "BPETokenizer",
    "ByteTokenizer",
    "ChatEncoder",
    "ChatTemplate",
    "Decontaminator",
    "Document",
    "LMData",
    "Loader",
    "MegatronStore",
    "MinHash",
    "Mixture",
    "MixtureConfig",
    "PreferenceData",
    "Quarantine",
    "Records",
    "RemoteStore",
    "Span",
    "StoreWriter",
    "TokenStore",
    "TokensConfig",
    "build_chat_store",
    "build_preference_store",
    "build_store",
    "copy_store",
    "diff_stores",
    "find_documents",
    "global_batch",
    "iterate",
    "load_tokenizer",
    "merge_stores",
    "open_store",
    "to_grain",
    "train_bpe",
    "window_shuffle",
    "write_store",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "ArrayData": "arrays",
        "BPETokenizer": "bpe",
        "ByteTokenizer": "tokenizer",
        "ChatEncoder": "chat",
        "ChatTemplate": "chat",
        "Decontaminator": "build.decontaminate",
        "Document": "build.sources",
        "LMData": "dataset",
        "Loader": "loader",
        "MegatronStore": "store.megatron",
        "MinHash": "build.minhash",
        "Mixture": "plan.mixture",
        "MixtureConfig": "config",
        "PreferenceData": "chat",
        "Quarantine": "build",
        "Records": "build",
        "RemoteStore": "store.remote",
        "Span": "dataset",
        "StoreWriter": "build",
        "TokenStore": "store",
        "TokensConfig": "config",
        "build_chat_store": "chat",
        "build_preference_store": "chat",
        "build_store": "build",
        "copy_store": "store.copy",
        "diff_stores": "store.diff",
        "find_documents": "build.sources",
        "global_batch": "sharded",
        "iterate": "grain_guard",
        "load_tokenizer": "tokenizer",
        "merge_stores": "store.merge",
        "open_store": "store.remote",
        "to_grain": "grain_source",
        "train_bpe": "bpe",
        "window_shuffle": "grain_guard",
        "write_store": "build",
    },
)
