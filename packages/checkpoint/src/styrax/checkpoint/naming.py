"""What Orbax is told that items and leaves are called."""

from __future__ import annotations

import re
import urllib.parse

from styrax.checkpoint import digest

# Names that Orbax may treat in its own way, or that its own files have, get a dash in front.
_PLAIN = re.compile(r"(?!(metrics|state|pytree|default|descriptor)$)[a-z][a-z0-9_]*")
# What lies beside the folders of arrays.
_TAKEN = re.compile(r"_.*|d|array_metadatas")
_MOST = 200  # of 255 bytes that a file's name may have


def item_name(name: str) -> str:
    """Give the name under which Orbax holds an item.

    Example:
        >>> item_name("params"), item_name("Metrics")
        ('params', '-Metrics')
    """
    return name if _PLAIN.fullmatch(name) else f"-{name}"


def orbax_name(path: str) -> str:
    """Give the one flat name under which Orbax holds a leaf, which is also that of a folder.

    Orbax joins keys by dots, so that `{"a.b": x}` and `{"a": {"b": y}}` would be one entry; here no dot or
    slash is left. One that is too long for a folder ends in its digest.

    Example:
        >>> orbax_name("a.b/c"), orbax_name("_METADATA")
        ('a%2Eb%2Fc', '%5FMETADATA')
    """
    name = urllib.parse.quote(path, safe="", errors="surrogatepass").replace(".", "%2E") or "%"
    if _TAKEN.fullmatch(name):
        name = f"%{ord(name[0]):02X}{name[1:]}"
    return name if len(name) <= _MOST else f"{name[: _MOST - 33]}~{digest.of(name.encode())}"
