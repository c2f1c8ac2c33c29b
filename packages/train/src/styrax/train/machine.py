"""What a command sets up for its process and machine: caches and memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from styrax.core import UserError


def cache_root() -> tuple[Path, str]:
    """Where things that can be made again are kept, and the variable that says so.

    The folder is ``$STYRAX_CACHE``, else ``$XDG_CACHE_HOME/styrax``, else ``~/.cache/styrax``.
    """
    if own := os.environ.get("STYRAX_CACHE"):
        return Path(own), "STYRAX_CACHE"
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "styrax", "XDG_CACHE_HOME"
    return Path.home() / ".cache" / "styrax", ""


@contextlib.contextmanager
def caching() -> Iterator[None]:
    """Turn errors of the file system in the cache into one that names the variable to set."""
    try:
        yield
    except OSError as error:
        root, variable = cache_root()
        root, name = root.absolute(), error.filename
        path = Path(os.fsdecode(name)).absolute() if isinstance(name, (str, bytes)) else None
        if path is None or not (path.is_relative_to(root) or root.is_relative_to(path)):
            raise
        chosen = f"{variable}={os.environ[variable]}" if variable else "the default, as STYRAX_CACHE is not set"
        raise UserError(
            f"cannot write the cache {root} ({chosen}): {error.strerror or error} ({path}). "
            "Set STYRAX_CACHE to a folder that can be written and has space"
        ) from error


def use_compilation_cache() -> None:
    """Let a restart reuse the compiled step, in a folder for this kind of machine, unless the user chose one.

    A folder that cannot be written is said once, here, instead of at every function that JAX compiles.
    """
    import jax

    chosen = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if chosen and "://" in chosen:
        return
    root, variable = (Path(chosen), "JAX_COMPILATION_CACHE_DIR") if chosen else cache_root()
    folder = root if chosen else root / "jax" / f"{platform.machine()}-{jax.__version__}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        if not folder.is_dir():
            jax.config.update("jax_enable_compilation_cache", False)
            jax.config.update("jax_compilation_cache_dir", None)
        warnings.warn(
            f"compiled steps are not kept for the next start: cannot write {folder} ({error.strerror or error}). "
            f"Set {variable or 'STYRAX_CACHE'} to a folder that can be written",
            stacklevel=2,
        )
        warnings.filterwarnings("ignore", "Error writing persistent compilation cache")
    if folder.is_dir():
        jax.config.update("jax_compilation_cache_dir", str(folder))


def keep_freed_memory() -> None:
    """Let glibc keep large blocks for the next step instead of giving them back to the kernel.

    XLA:CPU allocates its temporary buffer anew in every step. Above glibc's limit of 32 MiB each allocation is a
    fresh mapping, whose pages fault one by one; that took a quarter of a small model's step where it was measured.
    Only this command's process is affected; elsewhere than on glibc nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # the names' values in malloc.h
        for option in (mmap_threshold, trim_threshold):
            mallopt(option, 2**31 - 1)
