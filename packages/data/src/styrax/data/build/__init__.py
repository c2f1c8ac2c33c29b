"""Building token stores: from files, tables and iterables, over many processes, resumable."""

from typing import TYPE_CHECKING

from styrax.core import lazy_exports

if TYPE_CHECKING:
    from styrax.data.build.job import Contamination, NearDuplicates
    from styrax.data.build.pipeline import build_store
    from styrax.data.build.quarantine import Quarantine
    from styrax.data.build.sources import Document, find_documents
    from styrax.data.build.units import Records
    from styrax.data.build.write import Progress, write_store
    from styrax.data.build.writer import StoreWriter

__all__ = [
    "Contamination",
    "Document",
    "NearDuplicates",
    "Progress",
    "Quarantine",
    "Records",
    "StoreWriter",
    "build_store",
    "find_documents",
    "write_store",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Contamination": "job",
        "Document": "sources",
        "NearDuplicates": "job",
        "Progress": "write",
        "Quarantine": "quarantine",
        "Records": "units",
        "StoreWriter": "writer",
        "build_store": "pipeline",
        "find_documents": "sources",
        "write_store": "write",
    },
)
