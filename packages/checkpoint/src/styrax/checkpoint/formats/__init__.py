"""Arrays by path from and to other formats: safetensors, `.npz`, Orbax and torch Distributed Checkpoint folders.

`read` gives a lazy mapping of tree path -> array that is read when asked for, `write` takes one; a file of this
folder for each format. Neither holds more than about one array in memory.
"""

from typing import TYPE_CHECKING

from styrax.core import lazy_exports

if TYPE_CHECKING:
    from styrax.checkpoint.formats.base import Array, Source
    from styrax.checkpoint.formats.casting import cast
    from styrax.checkpoint.formats.dispatch import detect, read, write
    from styrax.checkpoint.formats.importing import import_arrays
    from styrax.checkpoint.formats.names import flat_name, tree_path

__all__ = ["Array", "Source", "cast", "detect", "flat_name", "import_arrays", "read", "tree_path", "write"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Array": "base",
        "Source": "base",
        "cast": "casting",
        "detect": "dispatch",
        "flat_name": "names",
        "import_arrays": "importing",
        "read": "dispatch",
        "tree_path": "names",
        "write": "dispatch",
    },
)
